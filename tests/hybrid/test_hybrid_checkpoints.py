"""What one layout saves, another one continues: replicas, ZeRO, stages, one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from trainer.lit import Options, assert_equal_weights, trainer, weights
from trainer.ranks import Ranks

from .models import Dealt, Tied

ONE_DEVICE: tuple[int, Options | None] = (1, None)
LAYOUTS: dict[str, tuple[int, Options | None]] = {
    "one device": ONE_DEVICE,
    "pipeline": (2, {}),
    "replicas": (4, {"data_parallel_size": 2, "schedule": "gpipe"}),
    "zero 1": (4, {"data_parallel_size": 2, "zero_stage": 1}),
    "zero 1 of 4": (4, {"data_parallel_size": 4, "zero_stage": 1}),
    "zero 2": (4, {"data_parallel_size": 2, "zero_stage": 2}),
    "zero 3": (4, {"data_parallel_size": 2, "zero_stage": 3}),
    "zero 3, directory": (
        4,
        {"data_parallel_size": 2, "zero_stage": 3, "save_distributed_checkpoint": True},
    ),
    "zero 1, directory": (
        4,
        {"data_parallel_size": 2, "zero_stage": 1, "save_distributed_checkpoint": True},
    ),
}


def fit(kind: Any, pipeline: Options | None, load: str | None = None) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = kind().double()  # or Lightning loads its weights in 32 bits
    trainer(pipeline, use_distributed_sampler=False, max_epochs=2).fit(module, ckpt_path=load)
    return weights(module)


def fit_and_save(kind: Any, pipeline: Options | None, path: str) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = kind().double()  # or Lightning loads its weights in 32 bits
    saving = ModelCheckpoint(Path(path).parent, Path(path).stem, save_on_train_epoch_end=True)
    options = {"enable_checkpointing": True, "callbacks": saving, "max_epochs": 1}
    trainer(pipeline, use_distributed_sampler=False, **options).fit(module)
    return weights(module)


@pytest.mark.parametrize(
    ("kind", "saved", "resumed"),
    [
        (Dealt, "zero 3", "one device"),
        (Tied, "one device", "zero 3"),
        (Tied, "zero 1", "zero 1 of 4"),
        (Dealt, "replicas", "zero 2"),
        (Dealt, "zero 1 of 4", "one device"),
        (Tied, "pipeline", "replicas"),
        (Tied, "zero 3, directory", "zero 1, directory"),
        (Dealt, "zero 1, directory", "zero 3, directory"),
    ],
)
def test_resumed_in_another_layout(
    ranks: Ranks, tmp_path: Path, kind: Any, saved: str, resumed: str
) -> None:
    path = str(tmp_path / "first.ckpt")
    (expected,) = ranks.run(1, fit, kind, None)
    size, pipeline = LAYOUTS[saved]
    first, *_ = ranks.run(size, fit_and_save, kind, pipeline, path)
    assert not any(tensor.is_meta for tensor in first.values())  # rank 0 has it all
    size, pipeline = LAYOUTS[resumed]
    second, *_ = ranks.run(size, fit, kind, pipeline, path)
    assert_equal_weights(second, expected)


class Predicts(Dealt):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])


def one_epoch_after_another(pipeline: Options | None) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = Predicts()
    for _ in range(2):
        run = trainer(pipeline, use_distributed_sampler=False, max_epochs=1)
        run.fit(module)
        run.predict(module, module.train_dataloader())
    return weights(module)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_module_is_an_ordinary_one_between_fits(ranks: Ranks, zero_stage: int) -> None:
    (expected,) = ranks.run(1, one_epoch_after_another, None)
    pipeline = {"data_parallel_size": 2, "zero_stage": zero_stage}
    whole, *_ = ranks.run(4, one_epoch_after_another, pipeline)
    assert_equal_weights(whole, expected)


def states(pipeline: Options) -> int:
    """Elements of optimizer state on this rank."""
    module = Dealt()
    run = trainer(pipeline, use_distributed_sampler=False, max_epochs=1)
    counted: list[int] = []

    class Counts(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            state = trainer.optimizers[0].state
            tensors = [t for each in state.values() for t in each.values() if torch.is_tensor(t)]
            counted.append(sum(t.numel() for t in tensors if t.numel() > 1))

    run.callbacks.append(Counts())  # type: ignore[attr-defined]
    run.fit(module)
    return counted[0]


def test_a_resumed_replica_has_its_own_states_only(ranks: Ranks) -> None:
    whole = ranks.run(2, states, {})
    parts = ranks.run(4, states, {"data_parallel_size": 2, "zero_stage": 1})
    assert parts[0] + parts[1] == whole[0]
    assert parts[2] + parts[3] == whole[1]
    assert max(parts) < max(whole)
