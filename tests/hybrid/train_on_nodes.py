"""A user's script for two nodes of two ranks each: trains three times, the last time in vain.

Rank 0 writes weights, and what the links between and inside the nodes have carried, to ``*.pt``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainer.lit import trainer, weights

from hybrid.models import SAMPLES, DealtOut

POSITIONS, WIDTH = 8, 256
LINK = "between"  # name of the interface that leads to the other node
MEASURED = (0, 3)  # batches from whose end to whose end bytes are counted
FAILING_RANK = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline of 4": {"num_microbatches": 4},
    "pipeline of 2, 2 replicas": {"num_microbatches": 2, "data_parallel_size": 2},
}


class Wide(DealtOut):
    """Has more gradients than activations: 525 kB in each of its layers."""

    def __init__(self, failing_rank: int | None = None) -> None:
        super().__init__()
        self.failing_rank = failing_rank
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        )

    def data(self) -> Any:
        numbers = torch.Generator().manual_seed(0)
        return torch.randn(SAMPLES, POSITIONS, WIDTH, generator=numbers).double().unbind()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.global_rank == self.failing_rank:
            Path("failed at").write_text(str(time.time()))
            raise ValueError("the user's error")
        return F.mse_loss(self.model(batch), batch.roll(1, -1))


class Bytes(L.Callback):
    """Counts what this node sends to the other one, and from one of its own ranks to another."""

    def __init__(self) -> None:
        self.readings: dict[int, dict[str, int]] = {}

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.readings[arguments[4]] = {
            name: int(Path("/sys/class/net", name, "statistics/tx_bytes").read_text())
            for name in (LINK, "lo")
        }

    @property
    def sent(self) -> dict[str, int]:
        first, last = (self.readings[batch] for batch in MEASURED)
        return {name: last[name] - first[name] for name in first}


def fit(module: DealtOut, pipeline: dict[str, Any] | None, **options: Any) -> Bytes:
    counts = Bytes()
    callbacks = [counts] if pipeline is not None else []
    options |= {"max_epochs": 1, "use_distributed_sampler": False, "callbacks": callbacks}
    trainer(pipeline, **options).fit(module)
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["NUM_RANKS"] = "2"  # on each node
    for name, layout in LAYOUTS.items():
        L.seed_everything(3)
        module = Wide()
        counts = fit(module, layout, num_nodes=2)
        if os.environ["RANK"] == "0":
            torch.save({"weights": weights(module), "sent": counts.sent}, f"{name}.pt")
    try:
        fit(Wide(FAILING_RANK), {}, num_nodes=2)
    finally:
        Path(f"ended {os.environ['RANK']}").write_text(str(time.time()))
