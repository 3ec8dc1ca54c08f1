"""A module with all steps, a callback that sees what a run does, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer.lit import Classifier, numbers, samples, weights


class Steps(Classifier):
    """Trains, validates, tests and predicts; all of its parameters are in layers."""

    def __init__(self) -> None:
        super().__init__()
        del self.log_temperature

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)
        return result

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, add_dataloader_idx=False)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        result: Tensor = self.model(batch[0])
        return result

    def train_dataloader(self) -> Any:
        return load(74)  # 5 batches, the last one short

    def val_dataloader(self) -> Any:
        return load(36, seed=1)  # 3 batches

    def test_dataloader(self) -> Any:
        return load(36, seed=2)

    predict_dataloader = test_dataloader


def load(count: int, seed: int = 0, **options: Any) -> DataLoader[Any]:
    """Like `trainer.lit.loader`, and fit for Lightning's ways with loaders made in hooks."""
    return DataLoader(samples(count, seed), batch_size=16, **options)


class Spy(Callback):
    """Keeps what happens, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.losses: list[float] = []

    def _saw(self, what: str, trainer: L.Trainer, *of_batch: int) -> None:
        self.events.append((what, trainer.current_epoch, trainer.global_step, *of_batch))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._saw("train", trainer, batch_idx)
        self.losses.append(float(outputs["loss"]))

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *indices: int
    ) -> None:
        self._saw("sanity" if trainer.sanity_checking else "validate", trainer, *indices)

    def on_test_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *indices: int
    ) -> None:
        self._saw("test", trainer, *indices)

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *indices: int
    ) -> None:
        self._saw("predict", trainer, *indices)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._saw("epoch ends", trainer)


def outcome(run: L.Trainer, module: L.LightningModule, spy: Spy) -> dict[str, Any]:
    """All that can be compared after a run."""
    return {
        "events": spy.events,
        "losses": spy.losses,
        "metrics": numbers(run.callback_metrics),
        "weights": weights(module),
    }


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any], rank: int) -> None:
    """Every rank has what one device has; rank 0 has all weights as well."""
    assert actual.keys() == expected.keys()
    for what, value in expected.items():
        if what == "weights" and rank > 0:
            continue
        if what in ("events", "seen"):
            assert actual[what] == value, f"rank {rank}, {what}"
        else:
            assert_close(actual[what], value, f"rank {rank}, {what}")


def assert_close(actual: Any, expected: Any, where: str) -> None:
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0,
        atol=1e-10,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )
