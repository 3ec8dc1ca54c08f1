"""A user's script for a cluster: ``train_on_cluster.py [RANK THAT FAILS]``, on two nodes."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_pipe import PipelineStrategy
from trainer.lit import Classifier, loader, weights

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


class Failing(Classifier):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.global_rank == self.rank:
            raise ValueError("the user's error")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    L.seed_everything(4)
    module = Failing(int(sys.argv[1]))
    strategy = PipelineStrategy(num_microbatches=4)
    run = L.Trainer(num_nodes=2, devices=2, strategy=strategy, **OPTIONS)
    run.fit(module, loader())
    print(f"world: {run.world_size}")
    if run.is_global_zero:
        torch.save(weights(module), "weights.pt")
