"""A checkpoint, even in the middle of an epoch, has the weights after the updates of all batches.

So it is an ordinary one, and what goes on from it is what went on without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from runtime import oracle
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR

from .lit import assert_equal_weights, trainer, weights
from .pipedream import (
    POLICIES,
    Batch,
    Regression,
    as_loader,
    fit,
    make_batches,
    replay,
    strategy_options,
)
from .ranks import Ranks

EPOCH = make_batches((8, 8, 7, 8, 3))
SAVED = (2, 8)  # numbers of batches after which a checkpoint is written


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Resumable:
    """Batches that go on where a checkpoint left them."""

    def __init__(self) -> None:
        self.given, self.start = 0, 0

    def __len__(self) -> int:
        return len(EPOCH)

    def __iter__(self) -> Iterator[Batch]:
        self.given, self.start = self.start, 0
        for batch in EPOCH[self.given :]:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"] % len(EPOCH)


def train(
    policy: oracle.Policy, count: int, directory: Path, resumes_after: int | None = None
) -> dict[str, Any]:
    """Train two epochs, or their rest; give all that came out on this rank."""
    module = Scheduled()
    save = ModelCheckpoint(directory, "{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(strategy_options(policy, count), callbacks=[save], enable_checkpointing=True)
    ckpt_path = None
    if resumes_after is not None:
        ckpt_path = directory / f"step={resumes_after + 1}.ckpt"
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)  # what it needs is in the file
    run.fit(module, Resumable(), as_loader(make_batches((4,))), ckpt_path=ckpt_path)
    return {
        "weights": weights(module),
        "optimizer": run.optimizers[0].state_dict(),
        "scheduler": run.lr_scheduler_configs[0].scheduler.state_dict(),
        "step": run.global_step,
    }


def train_and_resume(directory: Path) -> dict[str, list[dict[str, Any]]]:
    outcomes = {}
    for policy in POLICIES:
        where = directory / policy
        outcomes[policy] = [train(policy, 4, where, after) for after in (None, *SAVED)]
    return outcomes


def test_a_resumed_run_ends_as_the_uninterrupted_one(ranks: Ranks, tmp_path: Path) -> None:
    """Which drained after the same batches. On every rank, with momentum and learning rate."""
    results = ranks.run(3, train_and_resume, tmp_path, timeout=60)

    assert results[0]["2bw"][0]["step"] == 2 * len(EPOCH)
    for outcomes in results:
        for uninterrupted, *resumed in outcomes.values():
            for outcome in resumed:
                torch.testing.assert_close(outcome, uninterrupted, rtol=0, atol=0)


def train_from(checkpoint: Path) -> int:
    run = trainer(None, max_epochs=1)
    run.fit(Regression(), Resumable(), ckpt_path=checkpoint)
    return int(run.global_step)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_file_is_an_ordinary_one(ranks: Ranks, tmp_path: Path, policy: oracle.Policy) -> None:
    ranks.run(2, train_once, policy, tmp_path)

    checkpoint = tmp_path / "step=3.ckpt"
    expected = replay(policy, 4, EPOCH[:3], 2, ())
    assert_equal_weights(weights(Regression.load_from_checkpoint(checkpoint)), expected.weights)
    states = torch.load(checkpoint, weights_only=False)["optimizer_states"][0]["state"]
    assert [*states] == [*range(len(expected.weights))]  # momentum of all stages
    assert train_from(checkpoint) == len(EPOCH)


def train_once(policy: oracle.Policy, directory: Path) -> None:
    save = ModelCheckpoint(directory, "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(policy, 4, EPOCH, callbacks=[save], enable_checkpointing=True, max_epochs=1)


class Validations(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def validate(policy: oracle.Policy) -> list[float]:
    validations = Validations()
    options = {"callbacks": [validations], "val_check_interval": 2, "max_epochs": 1}
    fit(policy, 4, EPOCH, **options)
    return validations.losses


@pytest.mark.parametrize("policy", POLICIES)
def test_validation_sees_the_updates_of_all_batches(ranks: Ranks, policy: oracle.Policy) -> None:
    ((x, y),) = make_batches((4,))
    expected = []
    for drains in ([1], [1, 3]):
        module = Regression()
        module.load_state_dict(replay(policy, 4, EPOCH[: drains[-1] + 1], 3, drains).weights)
        expected.append(mse_loss(module.net(x), y).item())

    for losses in ranks.run(3, validate, policy):
        assert losses == pytest.approx(expected, rel=0, abs=1e-10)
