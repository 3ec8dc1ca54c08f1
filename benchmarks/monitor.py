#!/usr/bin/env python3
"""Measure what PipelineMonitor costs, and how well it predicts the step time, on sleeping stages.

Each line is one run of ``Trainer.fit`` over stages that sleep, equal or not. The error is that of
the predicted time of a step, against the measured one. The cost of recording is measured within one
run: every other block of steps is recorded, and the medians of both kinds of steps are compared;
once more for stages that take no time at all, where it is largest. To that comes what it takes to
put the records of ten steps together, every 50 steps. Give the machine nothing else to do: late
wake-ups make steps longer than their parts say, most so with equal stages.

    python benchmarks/monitor.py
    python benchmarks/monitor.py --milliseconds 20 --steps 30
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peers import NapStage
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipelineMonitor, PipelineStrategy

WIDTH = 8
# Schedule, options, micro-batches, relative times of the stages.
RUNS: dict[str, tuple[dict[str, Any], int, tuple[float, ...]]] = {
    "gpipe, equal": ({"schedule": "gpipe"}, 8, (1, 1, 1, 1)),
    "1f1b, equal": ({"schedule": "1f1b"}, 8, (1, 1, 1, 1)),
    "1f1b, unequal": ({"schedule": "1f1b"}, 8, (1, 2, 1, 1.5)),
    "interleaved, unequal": (
        {"schedule": "interleaved", "stages_per_rank": 2},
        8,
        (1, 2, 1, 1.5, 1, 1, 2, 1),
    ),
    "zero_bubble, unequal": ({"schedule": "zero_bubble"}, 8, (1, 2, 1, 1.5)),
    "zero_bubble V, unequal": (
        {"schedule": "zero_bubble", "stages_per_rank": 2},
        8,
        (1, 2, 1, 1.5, 1, 1, 2, 1),
    ),
    "pipedream, equal": ({"schedule": "pipedream"}, 1, (1, 1, 1, 1)),
    "pipedream, unequal": ({"schedule": "pipedream"}, 1, (1, 2, 1, 1.5)),
    "pipedream_2bw, unequal": ({"schedule": "pipedream_2bw"}, 4, (1, 2, 1, 1.5)),
}
EVERY = 50  # steps to an exchange, as Trainer's default
BLOCK = 5  # steps with the monitor, and as many without


class Naps(L.LightningModule):
    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.model = nn.Sequential(*[NapStage(WIDTH, one, 2 * one) for one in seconds])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InBlocks(PipelineMonitor):
    """Records in every other block of steps, and times them all; and what an exchange takes."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange = 0.0
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self._began: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        on = index // BLOCK % 2 == 1
        pipeline: Any = trainer.strategy.pipeline
        pipeline.record_to(self._recorder if on else None)
        self._on = on
        if index % BLOCK:
            self._end()
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def _exchange(self, trainer: L.Trainer) -> Any:
        trainer.strategy.barrier()
        began = time.perf_counter()
        outcome = super()._exchange(trainer)
        self.exchange = time.perf_counter() - began
        return outcome

    def _end(self) -> None:
        if self._began is not None:
            self.steps[self._on].append(time.perf_counter() - self._began)


def fit(kind: str, milliseconds: float, steps: int, blocks: bool) -> None:
    """Train, and print the results on rank 0."""
    torch.set_num_threads(1)
    options, count, relative = RUNS[kind]
    stages = len(relative)
    per_rank = options.get("stages_per_rank", 1)
    monitor = InBlocks() if blocks else PipelineMonitor(record_steps=steps - 5)
    strategy = PipelineStrategy(**options, num_microbatches=count, partition="uniform")
    model = Naps([milliseconds / 1000 * one for one in relative])
    data = torch.zeros(steps * count, WIDTH)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages // per_rank,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[monitor],
    )
    trainer.fit(model, DataLoader(TensorDataset(data, data), count))
    if not trainer.is_global_zero:
        return
    if isinstance(monitor, InBlocks):
        on, off = (statistics.median(monitor.steps[key]) for key in (True, False))
        print("result", json.dumps([on, off, monitor.exchange]))
        return
    report = monitor.report
    assert report is not None
    prediction = report.prediction
    print("result", json.dumps([prediction.measured_step, prediction.predicted_step]))


def run(kind: str, *arguments: str) -> list[float]:
    """Run `fit` in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--fit", kind, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    result: list[float] = json.loads(output.rsplit("result", 1)[1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--milliseconds", type=float, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--fit", choices=list(RUNS), help="for the processes that are measured")
    parser.add_argument("--blocks", action="store_true", help="measure the cost")
    options = parser.parse_args()
    if options.fit:
        fit(options.fit, options.milliseconds, options.steps, options.blocks)
        return
    for kind in options.only:
        times = "--milliseconds", str(options.milliseconds), "--steps", str(options.steps)
        measured, predicted = run(kind, *times)
        print(
            f"{kind:<24} measured {1000 * measured:7.1f} ms  predicted {1000 * predicted:7.1f} ms"
            f"  {predicted / measured - 1:+.2%}",
            flush=True,
        )
    for milliseconds, steps in ((options.milliseconds, 60), (0, 600)):
        on, off, exchange = run(
            "1f1b, equal", "--milliseconds", str(milliseconds), "--steps", str(steps), "--blocks"
        )
        print(
            f"recording, stages of {milliseconds:g} ms: {1000 * off:.2f} ms a step without, "
            f"{1000 * on:.2f} ms with it, {on / off - 1:+.2%}; an exchange "
            f"takes {1000 * exchange:.1f} ms, {exchange / off / EVERY:.2%} of {EVERY} steps",
            flush=True,
        )


if __name__ == "__main__":
    main()
