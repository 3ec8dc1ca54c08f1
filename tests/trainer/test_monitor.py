"""PipelineMonitor in real runs: what it logs, what it writes, and whom it refuses."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_pipe import PipelineMonitor
from lightning_pipe.monitoring.clock import behind_first
from lightning_pipe.runtime.groups import GlooGroup

from .lit import Classifier, Options, loader, trainer
from .pipedream import fit as fit_pipedream
from .pipedream import make_batches
from .ranks import Ranks

KINDS = ("warm_up", "imbalance", "communication", "cool_down", "overhead", "reduction")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Nap(nn.Module):
    """Takes so many seconds forward, and twice as many back, and no CPU."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _Sleep.apply
        result: Tensor = apply(x * self.weight, self.seconds, 2 * self.seconds)
        return result


class Naps(L.LightningModule):
    """A stage for each number of seconds."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.model = nn.Sequential(*map(Nap, seconds))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.model(batch[0])
        return output.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Keep(L.Callback):
    """After which batches the monitor had logged, and what it had when each epoch ended."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if "pipeline/bubble" in trainer.callback_metrics:
            self.batches.append(trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.epochs.append(of_pipeline(trainer))


def of_pipeline(trainer: L.Trainer) -> dict[str, float]:
    metrics = trainer.callback_metrics
    return {name: float(metrics[name]) for name in metrics if name.startswith("pipeline/")}


def check_metrics(metrics: dict[str, float], ranks: int) -> None:
    """Kinds of bubbles add up, and a mean is one."""
    for prefix in ["pipeline", *(f"pipeline/rank{rank}" for rank in range(ranks))]:
        kinds = [metrics[f"{prefix}/bubble_{kind}"] for kind in KINDS]
        assert min(kinds) >= -1e-9
        assert metrics[f"{prefix}/bubble"] == pytest.approx(sum(kinds), abs=1e-6)
        assert 0 < metrics[f"{prefix}/bubble"] < 1
    shares = [metrics[f"pipeline/rank{rank}/bubble"] for rank in range(ranks)]
    assert metrics["pipeline/bubble"] == pytest.approx(sum(shares) / ranks, abs=1e-6)


# ---------------------------------------------------------------------------------- sleeping stages


def nap(schedule: str, seconds: tuple[float, ...], count: int, batches: int) -> Any:
    monitor = PipelineMonitor()
    options = {"schedule": schedule, "num_microbatches": count, "partition": "uniform"}
    run = trainer(options, max_epochs=1, callbacks=[monitor])
    run.fit(Naps(*seconds), loader(count * batches, count))
    return of_pipeline(run), monitor.report and (
        monitor.report.prediction.measured_step,
        monitor.report.prediction.predicted_step,
        str(monitor.report),
    )


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_unequal_stages(ranks: Ranks, schedule: str) -> None:
    """A second stage that takes twice as long lets the first one idle for half of the time."""
    count = 1 if schedule == "pipedream" else 4
    results = ranks.run(2, nap, schedule, (0.01, 0.02), count, 24 // count)

    (metrics, (measured, predicted, text)), (others, nothing) = results
    assert metrics == others
    assert nothing is None
    check_metrics(metrics, 2)
    assert metrics["pipeline/rank0/bubble_imbalance"] > 0.2
    assert metrics["pipeline/rank1/bubble_imbalance"] < 0.1
    # From one batch to the next the slow stage, and with 1f1b filling and emptying the other.
    ideal = count * 0.06 + (0.03 if count > 1 else 0)
    assert ideal < measured < 1.5 * ideal
    assert predicted == pytest.approx(measured, rel=0.15)
    assert text.splitlines()[0].startswith("Pipeline, the latest")
    assert len(text.splitlines()) == 5


# ----------------------------------------------------------------------------------------- replicas

SUM_S = 0.04


class SlowSum:
    """A sum that is there so long after it was asked for."""

    def __init__(self, pending: Any) -> None:
        self._pending, self._until = pending, time.perf_counter() + SUM_S

    def wait(self) -> None:
        self._pending.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))


def nap_in_replicas(schedule: str, count: int, folder: str) -> Any:
    original = GlooGroup.sum
    GlooGroup.sum = lambda *args: SlowSum(original(*args))  # type: ignore[method-assign]
    try:
        monitor = PipelineMonitor(trace=Path(folder, "trace.json"))
        options: Options = {"schedule": schedule, "num_microbatches": count}
        options |= {"partition": "uniform", "data_parallel_size": 2}
        run = trainer(options, max_epochs=1, callbacks=[monitor])
        run.fit(Naps(0.01, 0.01), loader(count * 16, count))
    finally:
        GlooGroup.sum = original  # type: ignore[method-assign]
    report = monitor.report
    walls = report and [b.wall * b.share("reduction") for b in report.bubbles]
    return of_pipeline(run), report and (str(report), report.batches, walls)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_sums_over_replicas_are_told_from_other_waits(
    ranks: Ranks, tmp_path: Path, schedule: str
) -> None:
    """Of 2 x 2 ranks those of the first replica are shown."""
    count = 1 if schedule == "pipedream" else 4
    results = ranks.run(4, nap_in_replicas, schedule, count, str(tmp_path))

    metrics, (text, batches, seconds) = results[0]
    assert [other for other, _ in results] == [metrics] * 4
    assert [report for _, report in results[1:]] == [None] * 3
    check_metrics(metrics, 2)
    assert "pipeline/rank2/bubble" not in metrics
    assert len(text.splitlines()) == 5
    assert text.splitlines()[1].split()[-1] == "reduction"
    assert batches == 8
    for rank in range(2):  # once a batch: after the last backward, or before each update
        assert 0.9 * SUM_S < seconds[rank] / batches < 2 * SUM_S
    if schedule == "1f1b":  # the last rank's sum comes while the first one is still computing
        assert metrics["pipeline/rank1/bubble_cool_down"] > 0.1
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["tid"] for e in trace if e.get("args", {}).get("kind") == "reduce"} == {0, 1}


def test_late_messages_are_told_from_slow_stages(ranks: Ranks) -> None:
    metrics, _ = ranks.run(2, nap, "gpipe", (0.01, 0.01), 4, 4)[0]

    check_metrics(metrics, 2)
    assert metrics["pipeline/rank0/bubble_warm_up"] > 0.1
    assert metrics["pipeline/rank1/bubble_warm_up"] > 0.05
    assert metrics["pipeline/rank1/bubble_cool_down"] > 0.1
    assert metrics["pipeline/bubble_imbalance"] < 0.1


# ------------------------------------------------------------------------------------ all schedules

LAYOUTS: dict[str, tuple[Options, int]] = {
    "1f1b": ({"schedule": "1f1b", "num_microbatches": 4}, 4),
    "gpipe for the short batch": (
        {"schedule": "interleaved", "num_microbatches": 4, "stages_per_rank": 2},
        4,
    ),
    "zero_bubble": ({"schedule": "zero_bubble", "num_microbatches": 4}, 4),
    "zero_bubble, last stage on rank 0": (
        {"schedule": "zero_bubble", "num_microbatches": 4, "stages_per_rank": 2},
        4,
    ),
}


def train(options: Options, folder: str, every: int | None) -> Any:
    monitor = PipelineMonitor(
        every, Path(folder, "new", "trace.json"), Path(folder, "new", "step.png"), record_steps=4
    )
    keep = Keep()
    logger = CSVLogger(folder, name="", version="logs")
    run = trainer(options, callbacks=[monitor, keep], logger=logger, log_every_n_steps=3)
    run.fit(Classifier(), loader(37, 16))  # 3 batches in each of 2 epochs, the last of 5 samples
    return of_pipeline(run), keep.batches


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("every", [None, 2])
def test_synchronous_schedules(
    ranks: Ranks, tmp_path: Path, layout: str, every: int | None
) -> None:
    options, in_flight = LAYOUTS[layout]

    (metrics, batches), (others, _) = ranks.run(2, train, options, str(tmp_path), every)

    assert metrics == others
    check_metrics(metrics, 2)
    assert metrics["pipeline/live_versions"] == 1
    assert metrics["pipeline/staleness"] == 0
    assert 1 <= metrics["pipeline/peak_in_flight"] <= in_flight
    n = every or 3
    assert batches == list(range(n - 1, 6))
    logged = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()
    column = logged[0].split(",").index("pipeline/bubble")
    at = logged[0].split(",").index("step")
    rows = [row.split(",") for row in logged[1:]]
    assert [int(row[at]) for row in rows if row[column]] == list(range(n - 1, 6, n))
    check_files(tmp_path / "new", ranks=2, batches=4)


def check_files(folder: Path, ranks: int, batches: int) -> None:
    """A trace with what was measured next to what is predicted, and a picture."""
    slices: dict[str, list[Any]] = {}
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for event in events:
        if event.get("cat") == "compute":
            slices.setdefault(names[event["pid"]], []).append(event)
    assert set(slices) == {"measured", "predicted"}
    measured, predicted = slices["measured"], slices["predicted"]
    assert [(e["tid"], e["name"]) for e in measured] == [(e["tid"], e["name"]) for e in predicted]
    assert {e["tid"] for e in measured} == set(range(ranks))
    first = [e for e in measured if e["name"] == "0F0"]
    assert len(first) == batches
    assert all(e["dur"] > 0 for e in measured)
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------- asynchronous schedules


def train_pipedream(policy: Any, count: int, keep_steps: int, folder: str) -> Any:
    path = Path(folder)
    monitor = PipelineMonitor(
        trace=path / "trace.json", picture=path / "step.png", record_steps=keep_steps
    )
    keep, meetings = Keep(), Meetings()
    batches = make_batches((8,) * 9)
    callbacks = [meetings, monitor, keep]
    fit_pipedream(policy, count, batches, validates=False, callbacks=callbacks, max_epochs=2)
    # Of the last fill three and three batches are kept, or all 18 of both fills.
    assert monitor.report is None or monitor.report.batches == (18 if keep_steps > 9 else 6)
    return keep.epochs, keep.batches, meetings.between


class Meetings(L.Callback):
    """Counts what would let ranks wait for each other between the batches of an epoch."""

    def __init__(self) -> None:
        self.between = 0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        strategy: Any = trainer.strategy
        for name in ("gather", "broadcast", "barrier"):
            setattr(strategy, name, self._counted(trainer, getattr(strategy, name)))

    def _counted(self, trainer: L.Trainer, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            loop = trainer.fit_loop.epoch_loop
            self.between += loop.batch_progress.is_last_batch is False and trainer.training
            return method(*args, **kwargs)

        return counted

    def on_train_start(self, *_: Any) -> None:
        self.between = 0


@pytest.mark.parametrize(
    ("policy", "count", "versions", "staleness"),
    [("stashing", 2, [3, 2, 1], [2, 1, 0]), ("2bw", 4, [2, 2, 1], [1, 1, 1])],
)
@pytest.mark.parametrize("keep_steps", [3, 50])
def test_asynchronous_schedules(
    ranks: Ranks,
    tmp_path: Path,
    policy: str,
    count: int,
    versions: list[int],
    staleness: list[int],
    keep_steps: int,
) -> None:
    results = ranks.run(3, train_pipedream, policy, count, keep_steps, str(tmp_path))

    assert [between for _, _, between in results] == [0, 0, 0]
    epochs, batches, _ = results[0]
    assert [other for other, _, _ in results] == [epochs] * 3
    assert len(epochs) == 2
    assert batches == list(range(9, 18))  # after the first epoch, whose values stay
    for metrics in epochs:
        check_metrics(metrics, 3)
        assert metrics["pipeline/live_versions"] == max(versions)
        assert metrics["pipeline/staleness"] == max(staleness)
        assert metrics["pipeline/peak_in_flight"] == 3
        for rank in range(3):
            assert metrics[f"pipeline/rank{rank}/live_versions"] == versions[rank]
            assert metrics[f"pipeline/rank{rank}/staleness"] == staleness[rank]
            assert metrics[f"pipeline/rank{rank}/peak_in_flight"] == 3 - rank
    if keep_steps > 9:
        check_files(tmp_path, ranks=3, batches=1)


# ------------------------------------------------------------------------------ several fits, clock


class Validated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def fit_twice(folder: str) -> Any:
    monitor = PipelineMonitor(trace=Path(folder, "trace.json"))
    options = {"schedule": "1f1b", "num_microbatches": 4}
    counts = []
    for epochs in (1, 2):
        run = trainer(options, callbacks=[monitor], max_epochs=epochs, enable_checkpointing=False)
        module = Validated()
        run.fit(module, loader(32, 16), ckpt_path=Path(folder, "a.ckpt") if epochs == 2 else None)
        counts.append(monitor.report.batches if monitor.report is not None else None)
        run.save_checkpoint(Path(folder, "a.ckpt"))
    run.validate(module, loader(16, 16), verbose=False)
    return counts


def test_several_fits_and_resumption(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, fit_twice, str(tmp_path)) == [[2, 2], [None, None]]


def behind(seconds: float) -> float:
    skew = seconds if os.environ["LOCAL_RANK"] == "1" else 0.0
    dist.init_process_group("gloo", init_method="env://", rank=int(os.environ["LOCAL_RANK"]))
    return behind_first(lambda: time.perf_counter() - skew)


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_clocks(ranks: Ranks, seconds: float) -> None:
    assert ranks.run(2, behind, seconds) == [0, pytest.approx(seconds, abs=0.01)]


# ----------------------------------------------------------------------------------------- refusals


def test_needs_a_pipeline(tmp_path: Path) -> None:
    run = trainer(None, callbacks=[PipelineMonitor()], default_root_dir=tmp_path)
    with pytest.raises(MisconfigurationException, match="SingleDeviceStrategy.*PipelineStrategy"):
        run.fit(Classifier(), loader())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_every_n_steps": 0}, "log_every_n_steps=0"),
        ({"record_steps": 0}, "record_steps=0"),
        ({"picture": "step.jpeg"}, r"step\.jpeg.*\.png"),
    ],
)
def test_refuses_arguments(options: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        PipelineMonitor(**options)


def log_between_batches() -> str:
    with pytest.raises(MisconfigurationException) as refusal:
        fit_pipedream("stashing", 1, make_batches(), callbacks=[PipelineMonitor(5)])
    return str(refusal.value)


def test_refuses_to_meet_between_batches(ranks: Ranks) -> None:
    for text in ranks.run(2, log_between_batches):
        assert "log_every_n_steps=5" in text
        assert "pipedream" in text
