#!/usr/bin/env python3
"""Measure what a rank holds for each parameter with mixed-precision Adam, by the stage of ZeRO.

Weights and gradients are of 16 bits, Adam's two moments and its copy of the weights of 32: that is
16 bytes a parameter where each replica holds all (Rajbhandari et al. 2020, section 3.1). With N
replicas stage 1 leaves 4 + 12/N of it, stage 2 2 + 14/N and stage 3 16/N.

Parameters are counted after a step, gradients right before one, states after one: the bytes of all
distinct storages. "All" is what any tensor holds after a step, gradients, batch and buffers
included; what lives for a moment only, as a layer that is gathered, is not in it.

    python benchmarks/zero_memory.py
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import warnings
from collections.abc import Iterable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import lightning as L
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy

LAYERS, WIDTH = 8, 128  # of equal sizes, so that each replica has equally many
STEPS = 2
STAGES, REPLICAS = (1, 2, 3), (1, 2, 4)
KINDS = ("weights", "gradients", "states")
FORMULAS = {1: "4 + 12/N", 2: "2 + 14/N", 3: "16/N"}


def expected(stage: int, replicas: int) -> float:
    """Bytes a parameter, by the formulas."""
    return {1: 4 + 12 / replicas, 2: 2 + 14 / replicas, 3: 16 / replicas}[stage]


class Measured(L.LightningModule):
    """Counts the bytes of its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.bytes: dict[str, int] = {}

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(STEPS * 8, WIDTH).bfloat16().unbind(), batch_size=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.bytes["gradients"] = count_bytes(p.grad for p in self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        states = self.trainer.optimizers[0].state.values()
        self.bytes["weights"] = count_bytes(self.parameters())
        self.bytes["states"] = count_bytes(value for state in states for value in state.values())
        gc.collect()
        self.bytes["all"] = count_bytes(gc.get_objects())


def count_bytes(values: Iterable[Any]) -> int:
    """Of all storages in the memory of this rank."""
    tensors = [value for value in values if issubclass(type(value), Tensor)]
    local = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local if not tensor.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(stage: int, num_ranks: int, replicas: int) -> dict[str, float]:
    """On one rank: train, and return its bytes by kind, for each of the rank's parameters."""
    gc.collect()
    before = count_bytes(gc.get_objects())
    module = Measured()
    parameters = sum(p.numel() for p in module.parameters()) * replicas / num_ranks
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        precision="bf16-true",
        strategy=PipelineStrategy(
            num_microbatches=2, data_parallel_size=replicas, zero_stage=stage
        ),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module)
    module.bytes["all"] -= before
    return {kind: count / parameters for kind, count in module.bytes.items()}


def run(rank: int, replicas: int, port: int) -> None:
    """One rank of a pipeline of one stage; rank 0 prints a row for each stage of ZeRO."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(replicas)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    quiet()
    for stage in STAGES:
        os.environ["WORLD_SIZE"] = str(replicas)
        found = measure(stage, replicas, replicas)
        if rank == 0:
            parts = [found[kind] for kind in KINDS]
            numbers = [*parts, sum(parts), found["all"], expected(stage, replicas)]
            row = f"{stage}, N={replicas}", *(f"{number:.2f}" for number in numbers)
            cells = [*row, FORMULAS[stage]]
            print(f"| {' | '.join(cells)} |", flush=True)


def quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"| ZeRO | {' | '.join(KINDS)} | sum | all | expected | formula |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for replicas in REPLICAS:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        mp.spawn(run, (replicas, port), replicas)


if __name__ == "__main__":
    main()
