"""Train the digits and a small GPT under every schedule, and compare what comes out.

python examples/compare_schedules.py
python examples/compare_schedules.py --quick
python examples/compare_schedules.py --tasks digits --ranks 2 --seed 2

All runs of a task start with the same weights, see the same batches in the same order, and make one
update for each. What differs is how long ranks wait for each other, and how old the weights are
that a gradient is computed with. Prints a table, and draws the losses by time and by update.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
from gpt import LitGPT
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from minimal import DigitsClassifier, digits
from stdlib_text import StdlibText
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import LinearLR

from lightning_pipe import PipelineStrategy
from lightning_pipe.report import PipelineReport
from lightning_pipe.schedule import Placement, make_plan, policy_for, staleness

# PipeDream updates after every micro-batch, so its batches are not cut: one update for each.
SCHEDULES: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive"},
    "gpipe": {"schedule": "gpipe", "num_microbatches": 8},
    "1f1b": {"schedule": "1f1b", "num_microbatches": 8},
    "pipedream, weight stashing": {"schedule": "pipedream"},
    "pipedream, vertical sync": {"schedule": "pipedream", "vertical_sync": True},
    "pipedream, no stashing": {"schedule": "pipedream", "weight_stashing": False},
    "pipedream_2bw": {"schedule": "pipedream_2bw", "num_microbatches": 8},
}


class DeepDigits(DigitsClassifier):
    """The classifier of minimal.py with layers for four stages, and a learning rate that falls."""

    def __init__(self, width: int = 128, lr: float = 1e-3) -> None:
        super().__init__(width, lr)
        self.model = nn.Sequential(
            nn.Linear(64, width),
            nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)),
            nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)),
            nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 10)),
        )

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), self.lr)
        scheduler = LinearLR(optimizer, 1, 0, total_iters=self.trainer.max_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


small_gpt = partial(
    LitGPT,
    width=64,
    optimizer=partial(AdamW, lr=1e-3),
    scheduler=partial(LinearLR, start_factor=0.05, total_iters=20),
)

# Model, data, number of updates, and that number for --quick.
TASKS = {
    "digits": (DeepDigits, digits, 276, 207),
    "gpt": (small_gpt, StdlibText, 200, 10),
}


class Losses(DummyLogger):
    """Keeps the loss of each batch, and when it became known."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.moments: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "train_loss" in metrics:
            self.losses.append(metrics["train_loss"])
            self.moments.append(time.monotonic())


@dataclass
class Run:
    """What came out of training.

    Attributes:
        task: Its name.
        schedule: Its name in `SCHEDULES`.
        losses: Of the batches, in order.
        seconds: From the start of training until each of them was known.
        metrics: After training.
        report: Of the strategy.
    """

    task: str
    schedule: str
    losses: list[float]
    seconds: list[float]
    metrics: dict[str, float]
    report: PipelineReport


def train(task: str, schedule: str, num_ranks: int, quick: bool, seed: int) -> Run:
    """Train; called on all ranks."""
    make_model, make_data, *counts = TASKS[task]
    num_updates = counts[quick]
    L.seed_everything(seed, verbose=False)
    losses, timer = Losses(), Timer()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=PipelineStrategy(**SCHEDULES[schedule]),
        max_epochs=-1,
        max_steps=num_updates,
        val_check_interval=num_updates,  # once, at the end
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=timer,
        logger=losses,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make_model(), make_data())
    return Run(
        task,
        schedule,
        losses.losses,
        [moment - timer.start_time() for moment in losses.moments],
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        trainer.strategy.report,
    )


def staleness_of(run: Run) -> tuple[int, ...]:
    """By stage, how many updates late gradients are applied: known from the plan."""
    options = {"weight_stashing": True, "vertical_sync": False} | SCHEDULES[run.schedule]
    options.pop("num_microbatches", None)
    report = run.report
    num_ranks, count = len(report.stages), report.num_microbatches
    batches = (count,) * 4 * num_ranks if report.continuous else count
    placement, policy = Placement.round_robin(num_ranks, 1), policy_for(**options)
    return staleness(make_plan(report.schedule, placement, batches, policy=policy))


HEADER = ["task", "schedule", "updates", "loss", "val. loss", "accuracy", "seconds"]
HEADER += ["used", "predicted", "staleness", "versions", "weights in kB"]

LEGEND = """
loss       of training, mean of the last 20 batches
used       measured utilisation: share of time in forward and backward, mean of the ranks
predicted  the same, if nothing else took time
By stage, from first to last:
staleness  updates made between a gradient's forward and its own update
versions   of the weights, held at a time, at most
weights    of all these versions
"""


def table(runs: Sequence[Run]) -> str:
    """One line for each run."""
    rows = [HEADER, *map(row, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]
    return "\n".join(lines)


def row(run: Run) -> list[str]:
    report, stages = run.report, run.report.stages
    (updates,) = {stage.updates for stage in stages}
    accuracy = run.metrics.get("val_accuracy")
    return [
        run.task,
        run.schedule,
        f"{updates}",
        f"{mean(run.losses[-20:]):.3f}",
        f"{run.metrics['val_loss']:.3f}",
        f"{accuracy:.1%}" if accuracy is not None else "",
        f"{run.seconds[-1]:.1f}",
        f"{1 - mean(report.measured_bubble):.0%}",
        f"{1 - report.predicted_bubble:.0%}",
        by_stage(staleness_of(run)),
        by_stage(stage.live_versions for stage in stages),
        by_stage(round(stage.weight_bytes / 1000) for stage in stages),
    ]


def by_stage(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the losses, each a mean over ten batches."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(run.task for run in runs))
    figure = Figure(figsize=(12, 4.5 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), 2, squeeze=False)
    for run in runs:
        style = ("-", "--", ":")[list(SCHEDULES).index(run.schedule) % 3]
        losses = [mean(run.losses[max(0, i - 9) : i + 1]) for i in range(len(run.losses))]
        by_time, by_update = grid[tasks.index(run.task)]
        for axes, x in ((by_time, run.seconds), (by_update, range(1, len(losses) + 1))):
            axes.plot(x, losses, style, label=run.schedule)
            axes.set(ylabel=f"{run.task}: training loss", yscale="log")
        by_time.set(xlabel="seconds since training began")
        by_update.set(xlabel="updates")
    grid[0, 1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train under every schedule, and compare.")
    parser.add_argument("--ranks", type=int, default=4, help="processes, each with one stage")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--quick", action="store_true", help="fewer updates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=Path("outputs/compare_schedules.png"))
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):  # not the same words for every run
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*(LeafSpec|pin_memory|many workers)")

    # Lightning starts this script once more for each further rank; all of them do the same.
    runs = []
    for task in options.tasks:
        for schedule in SCHEDULES:
            runs.append(train(task, schedule, options.ranks, options.quick, options.seed))
            tell(f"{task}, {schedule}: {runs[-1].seconds[-1]:.0f} s")
    show(runs, options.picture)


@rank_zero_only
def tell(text: str) -> None:
    print(text, flush=True)


@rank_zero_only
def show(runs: Sequence[Run], picture: Path) -> None:
    """Print the table, and draw the picture if there is something to draw with."""
    print("", table(runs), LEGEND, sep="\n")
    num_ranks, cores = len(runs[0].report.stages), os.cpu_count() or 1
    if num_ranks > cores:
        print(f"{num_ranks} ranks shared {cores} cores, and a rank that waits for a core counts as")
        print("computing: seconds and utilisation say little about speed here.")
    try:
        draw(runs, picture)
    except ImportError:
        print("To have the losses drawn: pip install matplotlib")
    else:
        print(f"losses by time and by update: {picture}")


if __name__ == "__main__":
    main()
