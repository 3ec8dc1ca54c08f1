"""A LightningModule, its data, and Trainers for one device and for a pipeline, all small."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipelineStrategy

FEATURES, WIDTH, CLASSES = 6, 10, 3

Options = dict[str, Any]
"""Arguments of PipelineStrategy, or of Trainer."""


class Classifier(L.LightningModule):
    """A chain of eight layers that contain all but one parameter, and a ragged set of sizes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.GELU(),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            nn.Dropout(dropout),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.log_temperature = nn.Parameter(torch.zeros(()))  # outside of all layers

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x) * self.log_temperature.exp(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(count: int, seed: int = 0) -> TensorDataset:
    """Points whose class follows from two of their features."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return TensorDataset(x, y)


def loader(count: int = 37, batch_size: int = 16, seed: int = 0, **options: Any) -> DataLoader[Any]:
    """Batches of `samples`; the last of 37 samples is short."""
    return DataLoader(samples(count, seed), batch_size, **options)


class Samples(L.LightningDataModule):
    """For a command line."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


def trainer(pipeline: Options | None, **options: Any) -> L.Trainer:
    """A quiet Trainer that computes in float64; an option ``None`` is left at Lightning's default.

    Args:
        pipeline: arguments of PipelineStrategy; with None it is plain Lightning on one device.
        options: of the Trainer.
    """
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": "64-true",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    if pipeline is None:
        where: Options = {"strategy": "auto", "devices": 1}
    else:
        devices = int(os.environ["NUM_RANKS"])
        where = {"strategy": PipelineStrategy(**pipeline), "devices": devices}
    given = {**quiet, **where, **options}
    return L.Trainer(**{name: value for name, value in given.items() if value is not None})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers; copies, those of layers of other ranks on the meta device."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Logged values as numbers."""
    return {name: float(value) for name, value in metrics.items()}


def assert_equal_weights(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    torch.testing.assert_close(dict(actual), dict(expected), rtol=0, atol=1e-10)
