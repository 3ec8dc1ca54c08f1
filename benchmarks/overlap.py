#!/usr/bin/env python3
"""Measure what a step gains where gradients are summed during the cool-down, not after it.

Stages sleep instead of computing, so that 8 processes on 2 cores keep time. Two replicas sum small
gradients over gloo; a sum counts as complete no earlier than it would be if each rank had a link of
some bandwidth to the other replica, which carries the sums of its stages one after the other.

overlapped  as in training: each sum starts right after the last backward of its stage
at the end  the same program, but all sums start when all ranks have done their last backward

The ideal time is that of a machine and messages that cost nothing themselves. With one stage of one
size on each rank there is nothing to gain: rank 0 has nothing left to do after its last backward,
and its sum is the last one. There is with several stages on a rank, and with a large last stage.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --steps 30 --only interleaved
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lightning_pipe.programs import RankPrograms, Timing
from lightning_pipe.runtime import training
from lightning_pipe.runtime.call import PipelinedModule, attach
from lightning_pipe.runtime.distributed_transport import GlooTransport
from lightning_pipe.runtime.groups import GlooGroups, Group, Pending
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.reduction import Reduction, StageReductions
from lightning_pipe.runtime.rounds import Sharing
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.schedule import Costs, look_up, make_plan, policy_for, simulate
from lightning_pipe.schedule.instructions import LastBackward

TIMEOUT = timedelta(seconds=60)
NUM_RANKS, REPLICAS = 4, 2
FORWARD_S, BACKWARD_S = 0.005, 0.010  # of a micro-batch on a rank
WARM_UP = 3
ROWS, WIDTH = 2, 64


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured."""

    name: str
    schedule: str
    stages_per_rank: int
    num_microbatches: int
    sum_s: tuple[float, ...]  # for each stage, how long the link takes for its gradients


CASES = [
    Case("1f1b, equal stages", "1f1b", 1, 8, (0.04,) * 4),
    Case("1f1b, large last stage", "1f1b", 1, 8, (0.02, 0.02, 0.02, 0.06)),
    Case("interleaved, 2 stages a rank", "interleaved", 2, 8, (0.03,) * 8),
    Case("interleaved, 4 stages a rank", "interleaved", 4, 8, (0.015,) * 16),
]


class Nap(torch.autograd.Function):
    """The identity; sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        ctx.save_for_backward(weight)
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradient, torch.ones_like(ctx.saved_tensors[0]), None, None


class NapLayer(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Nap.apply(x, self.weight, *self.seconds)
        return out


class Link:
    """Carries one sum after the other, each for its time."""

    def __init__(self) -> None:
        self._free = 0.0

    def carry(self, seconds: float) -> float:
        """Return when it will be done."""
        self._free = max(self._free, time.perf_counter()) + seconds
        return self._free


class SlowGroup:
    """Sums over replicas by a link that takes its time."""

    def __init__(self, group: Group, link: Link, seconds: float) -> None:
        self.size, self.index = group.size, group.index
        self._group, self._link, self._seconds = group, link, seconds

    def sum(self, tensor: Tensor) -> Pending:
        # The first message, of one number for each parameter, is small.
        seconds = self._seconds if tensor.numel() > 1 else 0.0
        return Until(self._group.sum(tensor), self._link.carry(seconds))

    def sum_to(self, tensor: Tensor, receiver: int) -> Pending:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, sender: int) -> Pending:
        raise NotImplementedError

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return self._group.gather(values)


class Until:
    def __init__(self, pending: Pending, when: float) -> None:
        self._pending, self._when = pending, when

    def wait(self) -> None:
        time.sleep(max(0.0, self._when - time.perf_counter()))
        self._pending.wait()


class AtTheEnd(StageReductions):
    """Starts all sums when all ranks are there."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        super().__init__(reductions)
        self._ended: list[int] = []

    def end_stage(self, stage: int) -> None:
        self._ended.append(stage)

    def finish(self) -> None:
        dist.barrier()
        for stage in self._ended:
            super().end_stage(stage)
        super().finish()


class Model(PipelinedModule, nn.Sequential):
    """What the step calls."""


def make_pipeline(case: Case, grid: Grid) -> tuple[Pipeline, Model]:
    placement = look_up(case.schedule).place(NUM_RANKS, case.stages_per_rank)
    policy = policy_for(case.schedule, weight_stashing=True, vertical_sync=False)
    timing = Timing(case.schedule, case.num_microbatches, policy, placement)
    v = case.stages_per_rank
    transport = GlooTransport(grid.pipelines(), torch.device("cpu"), TIMEOUT)
    groups = GlooGroups(grid, TIMEOUT)
    replicas = [groups.over([rank]) for rank in range(NUM_RANKS)][grid.pipeline_rank]
    random_states = RandomStates(0)
    stages, reductions, link = {}, [], Link()
    for index in placement.stages_of(grid.pipeline_rank):
        layer = NapLayer(FORWARD_S / v, BACKWARD_S / v)
        stages[index] = Stage(
            index, placement.num_stages, [layer], index, random_states=random_states
        )
        group = SlowGroup(replicas, link, case.sum_s[index])
        reductions.append(Reduction(list(layer.parameters()), group, frozenset([index])))
    pipeline = Pipeline(
        stages,
        placement.num_stages,
        lambda batch: case.num_microbatches,
        RankPrograms(timing, grid.pipeline_rank, "posted"),
        transport,
        random_states,
        Sharing((), reductions, replicas),
        last_rank=placement.rank_of[-1],
    )
    model = Model()
    attach(model, pipeline)
    return pipeline, model


def measure(rank: int, cases: Sequence[Case], port: int, num_steps: int) -> None:
    """One rank: time steps of both kinds in turn; rank 0 prints a row for each case."""
    torch.set_num_threads(1)
    grid = Grid(NUM_RANKS, REPLICAS, 1, rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=grid.size, timeout=TIMEOUT
    )
    for case in cases:
        took = step_seconds(case, grid, num_steps)
        if rank == 0:
            print_row(case, took)
    dist.barrier()  # rank 0 has the store
    dist.destroy_process_group()


def step_seconds(case: Case, grid: Grid, num_steps: int) -> dict[str, float]:
    """Median time of a step, by kind."""
    pipeline, model = make_pipeline(case, grid)
    batch = torch.zeros(ROWS * case.num_microbatches, WIDTH)
    seconds: dict[str, list[float]] = {"overlapped": [], "at the end": []}
    for number in range(WARM_UP + num_steps):
        for kind, reductions in (("overlapped", StageReductions), ("at the end", AtTheEnd)):
            training.StageReductions = reductions  # type: ignore[misc]
            dist.barrier()
            start = time.perf_counter()
            step = 2 * number + (kind != "overlapped")
            pipeline.train(lambda piece, _: model(piece).mean(), batch, step)
            dist.barrier()  # a step ends with its last rank
            seconds[kind].append(time.perf_counter() - start)
    return {kind: statistics.median(s[WARM_UP:]) for kind, s in seconds.items()}


def ideal_seconds(case: Case) -> dict[str, float]:
    """The step times of the schedule if all but sleep and link were free."""
    placement = look_up(case.schedule).place(NUM_RANKS, case.stages_per_rank)
    plan = make_plan(case.schedule, placement, case.num_microbatches)
    v = case.stages_per_rank
    timeline = simulate(plan, Costs(FORWARD_S / v, BACKWARD_S / v))
    ends: dict[int, float] = {}
    for event in timeline.events:
        if isinstance(event.instruction, LastBackward):
            stage = event.instruction.stage
            ends[stage] = max(ends.get(stage, 0.0), event.end)
    free, work = [0.0] * NUM_RANKS, [0.0] * NUM_RANKS
    for stage, end in sorted(ends.items(), key=lambda item: item[1]):
        rank, seconds = placement.rank_of[stage], case.sum_s[stage]
        free[rank] = max(free[rank], end) + seconds
        work[rank] += seconds
    return {"overlapped": max(free), "at the end": max(ends.values()) + max(work)}


def print_row(case: Case, took: dict[str, float]) -> None:
    ideal = ideal_seconds(case)
    ratio = took["overlapped"] / took["at the end"]
    ideal_ratio = ideal["overlapped"] / ideal["at the end"]
    cells = [f"{1e3 * took[kind]:.0f} ms (ideal {1e3 * ideal[kind]:.0f})" for kind in took]
    cells += [f"{ratio:.2f}", f"{ideal_ratio:.2f}"]
    print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="of each kind, for each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    print("| 4 ranks, 2 replicas | overlapped | at the end | ratio | ideal ratio |")
    print("|---|---|---|---|---|", flush=True)
    mp.spawn(measure, (cases, port, arguments.steps), NUM_RANKS * REPLICAS)


if __name__ == "__main__":
    main()
