#!/usr/bin/env python3
"""Measure how much memory each rank takes for a model that `configure_model` builds.

The model (1 GB by default, blocks of two linear layers) is trained for a step and saved, on as many
processes as there are ranks. Then others load it. Each rank says how much memory it took at most
until it was set up (VmHWM of Linux, less what it had before), how much it has then, and how much it
takes at most in training, with gradients. The file is read as mapped memory, which counts here,
although the system takes it back whenever it is needed.

    python benchmarks/huge_model.py
    python benchmarks/huge_model.py --ranks 2 --megabytes 200
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipelineStrategy

NUM_BLOCKS = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.leave(torch.relu(self.enter(x)))
        return out


class Huge(L.LightningModule):
    def __init__(self, width: int, defers: bool, readings: dict[str, Any]) -> None:
        super().__init__()
        self.width, self.readings = width, readings
        if not defers:
            self.build()

    def build(self) -> None:
        self.model = nn.Sequential(*(Block(self.width) for _ in range(NUM_BLOCKS)))
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.build()

    def on_fit_start(self) -> None:
        self.readings["set up"] = reading()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def reading() -> list[float]:
    """The peak since the last reading, and what is in memory now, in MB."""
    gc.collect()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    values = [int(lines[name].split()[0]) / 2**10 for name in ("VmHWM", "VmRSS", "RssFile")]
    Path("/proc/self/clear_refs").write_text("5")
    return values


def fit(arguments: argparse.Namespace, width: int, defers: bool, file: Path | None) -> L.Trainer:
    """Train for a step, or for a second one after loading a file."""
    arguments.readings.clear()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=arguments.ranks,
        strategy=PipelineStrategy(num_microbatches=1),
        max_steps=1 if file is None else 2,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    data = DataLoader(TensorDataset(torch.ones(4, width)), batch_size=4)
    trainer.fit(Huge(width, defers, arguments.readings), data, ckpt_path=file)
    return trainer


def measure(arguments: argparse.Namespace) -> None:
    """What each rank's process does: train and save, or load."""
    torch.set_num_threads(1)
    width = int((arguments.megabytes * 2**20 / 4 / NUM_BLOCKS / 2) ** 0.5)
    directory = Path(arguments.directory)
    file = directory / "huge.ckpt"
    arguments.readings = {}
    fit(arguments, 8, True, None)  # what a first run imports
    imported = reading()
    loads = arguments.phase == "loaded"
    trainer = fit(
        arguments, width, arguments.built_in == "configure_model", file if loads else None
    )
    report = [imported, arguments.readings["set up"], reading()]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    (directory / f"{arguments.phase}{rank}.json").write_text(json.dumps(report))
    if not loads:
        trainer.save_checkpoint(file)


def run(arguments: argparse.Namespace) -> None:
    share = arguments.megabytes / arguments.ranks
    print(f"model {arguments.megabytes} MB on {arguments.ranks} ranks, {share:.0f} MB each; MB:")
    with tempfile.TemporaryDirectory() as directory:
        for phase in ("built", "loaded"):
            command = [sys.executable, __file__, *sys.argv[1:]]
            command += ["--directory", directory, "--phase", phase]
            done = subprocess.run(
                command, timeout=arguments.timeout, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            for rank in range(arguments.ranks):
                readings = json.loads(Path(directory, f"{phase}{rank}.json").read_text())
                (_, base, base_file), (peak, now, file), (trained, _, _) = readings
                print(
                    f"  rank {rank} {phase}: at most {peak - base:.0f}, then {now - base:.0f}"
                    f" (of it mapped {file - base_file:.0f}); training at most {trained - base:.0f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the model")
    parser.add_argument(
        "--built-in", default="configure_model", choices=["configure_model", "init"]
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="of the whole run, in seconds")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.directory:
        measure(arguments)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
