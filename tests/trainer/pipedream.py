"""A regression for asynchronous schedules, trained by real Trainers and by the oracle."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from runtime import oracle
from runtime.harness import Module, Trained
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from .lit import Options, trainer

WIDTH = 3
# Layers per stage, by number of stages.
SIZES = {2: [3, 3], 3: [2, 3, 1], 4: [2, 1, 2, 1]}
POLICIES: dict[oracle.Policy, Options] = {
    "stashing": {"schedule": "pipedream"},
    "vertical_sync": {"schedule": "pipedream", "vertical_sync": True},
    "no_stashing": {"schedule": "pipedream", "weight_stashing": False},
    "2bw": {"schedule": "pipedream_2bw"},
}

Batch = tuple[Tensor, Tensor]


class Regression(Module):
    """Six layers, momentum, and a validation that sees the weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
        super().__init__(*blocks, nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class After(Callback):
    """Does something in `on_train_batch_end` of one batch."""

    def __init__(self, number: int, action: Callable[[L.Trainer, Any], Any]) -> None:
        self._number, self._action = number, action

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self._number:
            self._action(trainer, module)


class Before(After):
    """The same in `on_train_batch_start`."""

    on_train_batch_start = After.on_train_batch_end

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def call(trainer: L.Trainer, module: Any) -> None:
    """A pipelined call outside of any step."""
    x = torch.ones(5, WIDTH).double()
    assert module.net(x).shape == x.shape


def make_batches(sizes: Sequence[int] = (8, 8, 7, 8, 3)) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def draw(size: int) -> Tensor:
        return torch.randn(size, WIDTH, generator=generator).double()

    return [(draw(size), draw(size)) for size in sizes]


def as_loader(batches: Sequence[Batch]) -> DataLoader[Any]:
    """Gives these batches, of whatever sizes."""
    return DataLoader(batches, batch_size=None, collate_fn=_unchanged)  # type: ignore[arg-type]


def _unchanged(batch: Batch) -> Batch:
    return batch


def strategy_options(policy: oracle.Policy, count: int) -> Options:
    """Arguments of PipelineStrategy for the stages of this world."""
    sizes = SIZES[int(os.environ["NUM_RANKS"])]
    return {**POLICIES[policy], "num_microbatches": count, "partition": sizes}


def fit(
    policy: oracle.Policy,
    count: int,
    batches: Sequence[Batch],
    module: L.LightningModule | None = None,
    validates: bool = True,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[L.Trainer, L.LightningModule]:
    """Train on this rank."""
    module = Regression() if module is None else module
    run = trainer(strategy_options(policy, count), **options)
    val = as_loader(make_batches((4,))) if validates else None
    run.fit(module, as_loader(batches), val, ckpt_path=ckpt_path)
    return run, module


def replay(
    policy: oracle.Policy,
    count: int,
    batches: Sequence[Batch],
    num_stages: int,
    drains: Collection[int],
    make_model: Callable[[], Module] = Regression,
    lr_of: Callable[[int], float] | None = None,
) -> Trained:
    """What the oracle trains to on these batches, which go over all epochs."""
    sizes = SIZES[num_stages]
    return oracle.train(make_model, batches, sizes, policy, count, drains, lr_of)
