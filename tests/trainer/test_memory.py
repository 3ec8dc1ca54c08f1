"""Layers that other ranks own take no memory."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from .lit import loader, trainer
from .ranks import Ranks

NUM_RANKS, NUM_LAYERS, WIDTH = 4, 8, 2560
LAYER_MB = WIDTH * WIDTH * 4 / 2**20  # 25 MB in float32, 200 MB together


class Large(L.LightningModule):
    """Notes how much memory the process has once its part of the model is set up."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def on_predict_start(self) -> None:
        gc.collect()
        self.resident_mb = resident_mb()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros(1)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure() -> tuple[float, float]:
    """What the whole model adds to the process, and what is left of that after setup."""
    torch.empty(WIDTH, WIDTH)  # once it has freed one, glibc keeps blocks of that size
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have left
    before = resident_mb()
    module = Large()
    whole = resident_mb()
    trainer({}, precision="32-true").predict(module, loader())
    return whole - before, module.resident_mb - before


def test_resident_size_falls_to_a_ranks_share(ranks: Ranks) -> None:
    share_mb = NUM_LAYERS / NUM_RANKS * LAYER_MB

    for whole_mb, left_mb in ranks.run(NUM_RANKS, measure):
        assert whole_mb > 0.9 * NUM_LAYERS * LAYER_MB
        assert left_mb < share_mb + 20  # a Trainer and its connections need some, too
