"""Callbacks that average weights: equal to one device, and resumed in another layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

from .lit import WIDTH, Classifier, Options, assert_equal_weights, loader, trainer
from .ranks import Ranks

AVERAGES: dict[str, Callable[[], Callback]] = {
    "mean": WeightAveraging,
    "moving": lambda: EMAWeightAveraging(decay=0.7),
    # From the second epoch on.
    "stochastic": lambda: StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1),
}


class Validated(Classifier):
    """Keeps what validation saw: of averaged weights, where they take the place of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(2, Scaled())
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.losses.append(float(loss))


class Scaled(nn.Module):
    """Has a buffer, which averages hold as well."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def fit(
    pipeline: Options | None, directory: Path, resumes: bool
) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    """Train with each callback, from the start (and save), or from the end of the second epoch."""
    outcomes = {}
    for name, make in AVERAGES.items():
        L.seed_everything(3, verbose=False)
        module = Validated().double()
        callbacks, path = [make()], None
        if resumes:
            path = directory / f"{name}-epoch=1.ckpt"
            for parameter in module.parameters():
                nn.init.zeros_(parameter)  # what it needs is in the checkpoint
        else:
            callbacks.append(ModelCheckpoint(directory, f"{name}-{{epoch}}", save_top_k=-1))
        run = trainer(pipeline, max_epochs=4, callbacks=callbacks, enable_checkpointing=not resumes)
        run.fit(module, loader(20, 8), loader(9, seed=1), ckpt_path=path)
        outcomes[name] = dict(module.state_dict()), module.losses[-2:]
    return outcomes


@pytest.fixture(scope="module")
def expected(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one device trains to."""
    outcome: dict[str, Any]
    (outcome,) = ranks.run(1, fit, None, tmp_path_factory.mktemp("one"), False)
    return outcome


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_averages_equal_one_device(
    ranks: Ranks, expected: dict[str, Any], tmp_path: Path, sharded: bool
) -> None:
    """Three ranks train and save, two of them another way go on."""
    three = {"num_microbatches": 4, "save_distributed_checkpoint": sharded}
    two = {"schedule": "gpipe", "num_microbatches": 3}

    trained = ranks.run(3, fit, three, tmp_path, False, timeout=60)
    resumed = ranks.run(2, fit, two, tmp_path, True, timeout=60)

    for outcomes in (trained, resumed):
        for name, (weights, losses) in expected.items():
            assert_equal_weights(outcomes[0][name][0], weights)
            for outcome in outcomes:
                assert outcome[name][1] == pytest.approx(losses, rel=0, abs=1e-10)


def test_the_averages_differ(expected: dict[str, Any]) -> None:
    """Else one that does nothing would go unnoticed."""
    values = [weights["model.0.weight"] for weights, _ in expected.values()]
    for index, value in enumerate(values):
        for other in values[:index]:
            assert (value - other).abs().max() > 1e-4
