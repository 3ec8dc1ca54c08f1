#!/usr/bin/env python3
"""Measure the steady period of Trainer.fit, one batch after the other, over stages that sleep.

Plain Lightning trains one such stage on one process: forward, backward, loop, progress bar and
logger take as long as nothing else can make them. A pipeline without bubbles that has P stages
takes as long for a batch through all of them. Every line is a ratio to plain Lightning, measured
next to it; one micro-batch a batch for pipedream, four for the others. A period is the median over
the batches: Python's garbage collector stops a process for a quarter of a second now and then.

    python benchmarks/continuous.py
    python benchmarks/continuous.py --stages 4 --repeats 3 --batches 60
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from peers import NapStage
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipelineStrategy

WIDTH, ROWS = 8, 4
MILLISECONDS = ((30, 60), (10, 20))
KINDS: dict[str, dict[str, Any] | None] = {
    "plain Lightning, one stage": None,
    "pipedream": {"schedule": "pipedream"},
    "pipedream, vertical sync": {"schedule": "pipedream", "vertical_sync": True},
    "pipedream_2bw": {"schedule": "pipedream_2bw"},
    "1f1b": {"schedule": "1f1b", "num_microbatches": 4},
}


class Naps(L.LightningModule):
    """Stages that sleep; a batch takes one of them ``seconds`` forward and back."""

    def __init__(self, stages: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.model = nn.Sequential(*[NapStage(WIDTH, forward_s, backward_s) for _ in range(stages)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(L.Callback):
    """When the batches ended on this process."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def fit(kind: str, stages: int, forward_ms: float, backward_ms: float, batches: int) -> None:
    """Train, and print the period in seconds on rank 0."""
    torch.set_num_threads(1)
    options = KINDS[kind]
    micro = 1
    if options is None:
        stages = 1
    elif options["schedule"] != "pipedream":
        micro = 4  # of a quarter of the time each
    clock, where = Clock(), {"devices": 1}
    if options is not None:
        strategy = PipelineStrategy(**options, partition="uniform")
        where = {"devices": stages, "strategy": strategy}
    model = Naps(stages, forward_ms / 1000 / micro, backward_ms / 1000 / micro)
    data = torch.zeros(batches * ROWS, WIDTH)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(tempfile.gettempdir(), name="naps"),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[clock],
        **where,
    )
    trainer.fit(model, DataLoader(TensorDataset(data, data), ROWS))
    if trainer.is_global_zero:
        steady = clock.ends[2 * stages : -stages - 1]
        print("period", json.dumps(statistics.median(b - a for a, b in pairwise(steady))))


def measure(kind: str, arguments: list[str]) -> float:
    """Run `fit` in a process of its own."""
    command = [sys.executable, __file__, "--fit", kind, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    return float(output.rsplit("period", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--only", nargs="*", choices=list(KINDS))
    parser.add_argument("--fit", choices=list(KINDS), help="for the processes that are measured")
    parser.add_argument("--times", type=float, nargs=2, default=MILLISECONDS[0])
    options = parser.parse_args()
    if options.fit:
        fit(options.fit, options.stages, *options.times, options.batches)
        return
    plain, *others = KINDS
    for times in MILLISECONDS:
        arguments = ["--stages", str(options.stages), "--batches", str(options.batches)]
        arguments += ["--times", *map(str, times)]
        periods: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            for kind in [plain, *(options.only or others)]:
                periods.setdefault(kind, []).append(measure(kind, arguments))
        base = periods[plain]
        for kind, measured in periods.items():
            ratio = statistics.median(m / b for m, b in zip(measured, base, strict=True))
            milliseconds = 1000 * statistics.median(measured)
            print(f"{times} ms  {kind:<27} {milliseconds:7.1f} ms  {ratio:.3f} x", flush=True)


if __name__ == "__main__":
    main()
