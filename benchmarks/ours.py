"""lightning_pipe as one of the engines that ``peers.py`` measures, without and with a Trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_pipe.programs import RankPrograms, Timing
from lightning_pipe.runtime.call import PipelinedModule, attach
from lightning_pipe.runtime.distributed_transport import GlooTransport
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.schedule import Costs, Timeline, look_up, make_plan, policy_for, simulate

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=120)


class Model(PipelinedModule, nn.Sequential):
    """What the step calls."""


def ideal_seconds(schedule: str, p: int, m: int, v: int, t_f: float, t_b: float) -> float:
    """The step time of the schedule if all but the sleep were free."""
    plan = make_plan(schedule, look_up(schedule).place(p, v), m)
    timeline: Timeline = simulate(plan, Costs(t_f / v, t_b / v))
    return timeline.makespan


def make_pipeline(
    job: Any, stages: dict[int, nn.Module], rank: int, num_stages: int
) -> tuple[Pipeline, Model]:
    """This rank's end of a pipeline over the process group that is there."""
    placement = look_up(job.schedule).place(job.p, job.v)
    random_states = RandomStates(0)
    parts = {
        index: Stage(index, num_stages, [module], index, random_states=random_states)
        for index, module in stages.items()
    }

    policy = policy_for(job.schedule, weight_stashing=True, vertical_sync=False)
    programs = RankPrograms(Timing(job.schedule, job.m, policy, placement), rank, "posted")
    transport = GlooTransport([list(range(job.p))], CPU, TIMEOUT)
    pipeline = Pipeline(
        parts,
        num_stages,
        lambda batch: job.m,
        programs,
        transport,
        random_states,
        last_rank=placement.rank_of[-1],
    )
    model = Model()
    attach(model, pipeline)
    return pipeline, model


def stages_of(job: Any, work: Any, rank: int) -> dict[int, nn.Module]:
    placement = look_up(job.schedule).place(job.p, job.v)
    return {i: work.stage(i, placement.num_stages) for i in placement.stages_of(rank)}


def step_function(
    job: Any, work: Any, rank: int, stages: dict[int, nn.Module]
) -> Callable[[int], float]:
    """One optimizer step, without a Trainer."""
    pipeline, model = make_pipeline(job, stages, rank, job.p * job.v)
    parameters = [p for module in stages.values() for p in module.parameters()]
    optimizer = work.optimizer(parameters)

    def training_step(microbatch: Any, _: int) -> torch.Tensor:
        inputs, target = microbatch
        return work.loss(model(inputs), target)

    def step(number: int) -> float:
        optimizer.zero_grad()
        result = pipeline.train(training_step, work.batch(number), number)
        result.deliver()
        optimizer.step()
        return result.finished[0].loss.item()

    return step


def measure_fit(job: Any, work: Any, rank: int) -> dict[str, Any]:
    """The same through ``Trainer.fit``; a step is the time between two ends of batches."""
    import lightning as L
    from torch.utils.data import DataLoader, Dataset

    from lightning_pipe import PipelineStrategy

    class Batches(Dataset[Any]):
        def __len__(self) -> int:
            return job.warmup + job.steps + 1

        def __getitem__(self, number: int) -> Any:
            return work.batch(number)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            count = job.p * job.v
            self.model = nn.Sequential(*[work.stage(index, count) for index in range(count)])

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, target = batch
            loss = work.loss(self.model(inputs), target)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return work.optimizer(self.parameters())

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []
            self.cpu: list[float] = []
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.ends.append(time.perf_counter())
            self.cpu.append(time.process_time())
            self.losses.append(float(trainer.callback_metrics["train_loss"]))

    clock = Clock()
    strategy = PipelineStrategy(
        schedule=job.schedule, num_microbatches=job.m, stages_per_rank=job.v, partition="uniform"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.p,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Module(), DataLoader(Batches(), batch_size=None))
    spans = list(zip(clock.ends[:-1], clock.ends[1:], strict=True))
    if rank > 0:  # whose ends are skewed against rank 0's, but as far apart
        spans = [(math.inf, -math.inf)] * len(spans)
    cpu = [b - a for a, b in zip(clock.cpu[:-1], clock.cpu[1:], strict=True)]
    return {
        "spans": spans[job.warmup :],
        "cpu": cpu[job.warmup :],
        "losses": clock.losses,
        "ideal_s": ideal_seconds(job.schedule, job.p, job.m, job.v, job.t_f, job.t_b),
    }


__all__ = ["ideal_seconds", "stages_of", "measure_fit", "step_function"]
