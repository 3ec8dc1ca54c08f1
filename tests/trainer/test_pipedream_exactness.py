"""Asynchronous schedules in a Trainer train to the weights of the replay on one device.

Wherever Lightning pauses, foretold or not, the pipeline drains, and a new fill begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from runtime import oracle
from torch import Tensor, nn

from .lit import Options, assert_equal_weights, trainer, weights
from .pipedream import (
    POLICIES,
    After,
    Before,
    Regression,
    as_loader,
    call,
    fit,
    make_batches,
    replay,
)
from .ranks import Ranks

EPOCH = make_batches()  # five batches, the last one ragged


@dataclass
class Case:
    """A training run with pauses.

    Attributes:
        drains: Numbers of the batches after which the pipeline is empty.
        batches: Numbers in the epoch of the batches that are trained.
        options: Of the Trainer.
        callback: Made in each process, for a directory.
        module: What is trained.
    """

    drains: set[int]
    batches: list[int] = field(default_factory=lambda: [*range(5)] * 2)
    options: Options = field(default_factory=dict)
    callback: Callable[[Path], Callback] | None = None
    module: Callable[[], Regression] = Regression


class Skipping(Regression):
    """Leaves each epoch after two batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def stop(trainer: L.Trainer, module: Any) -> None:
    trainer.should_stop = True


CASES = {
    "epochs with validation": Case({4}),
    "val_check_interval": Case({1, 3, 4, 6, 8}, options={"val_check_interval": 2}),
    "limit_train_batches": Case({2}, [0, 1, 2] * 2, {"limit_train_batches": 3}),
    "max_steps": Case({4}, [*range(5), 0, 1], {"max_steps": 7, "max_epochs": -1}),
    "EarlyStopping": Case(
        {4},
        options={"max_epochs": 9},
        callback=lambda _: EarlyStopping("val_loss", min_delta=1e9, patience=1),
    ),
    "should_stop": Case({4}, [*range(5), 0, 1], callback=lambda _: After(6, stop)),
    "ModelCheckpoint": Case(
        {2, 4, 5, 8},
        callback=lambda directory: ModelCheckpoint(directory, every_n_train_steps=3),
    ),
    "save_checkpoint": Case(
        {2, 4}, callback=lambda d: After(2, lambda trainer, _: trainer.save_checkpoint(d / "a"))
    ),
    "save_checkpoint before a batch": Case(
        {1, 4}, callback=lambda d: Before(2, lambda trainer, _: trainer.save_checkpoint(d / "a"))
    ),
    "rest of the epoch skipped": Case({1}, [0, 1] * 2, module=Skipping),
    "call": Case({1, 4}, callback=lambda _: After(1, call)),
}


def train(name: str, count: int, directory: Path) -> dict[str, tuple[dict[str, Tensor], set[int]]]:
    """By policy, the weights and the numbers of updates of all stages."""
    case, trained = CASES[name], {}
    for policy in POLICIES:
        options = dict(case.options)
        if case.callback is not None:
            options |= {"callbacks": [case.callback(directory)], "enable_checkpointing": True}
        per_batch = max(count, 4) if policy == "2bw" else count
        run, module = fit(policy, per_batch, EPOCH, case.module(), **options)
        updates = {stage.updates for stage in run.strategy.report.stages}
        trained[policy] = weights(module), updates
    return trained


def check(ranks: Ranks, num_stages: int, name: str, count: int, directory: Path) -> None:
    batches = [EPOCH[number] for number in CASES[name].batches]
    trained = ranks.run(num_stages, train, name, count, directory)[0]

    for policy, (found, updates) in trained.items():
        per_batch = max(count, 4) if policy == "2bw" else count
        drains = CASES[name].drains
        expected = replay(policy, per_batch, batches, num_stages, drains)
        try:
            assert_equal_weights(found, expected.weights)
        except AssertionError as error:
            error.add_note(policy)
            raise
        pieces = [min(per_batch, len(x)) for x, _ in batches]
        assert updates == {len(batches) if policy == "2bw" else sum(pieces)}, policy


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_weights_and_updates(ranks: Ranks, num_stages: int, count: int, tmp_path: Path) -> None:
    """Over two epochs with validation between, and a ragged last batch."""
    check(ranks, num_stages, "epochs with validation", count, tmp_path)


@pytest.mark.parametrize("name", [name for name in CASES if name != "epochs with validation"])
def test_pauses(ranks: Ranks, name: str, tmp_path: Path) -> None:
    check(ranks, 3, name, 1, tmp_path)


def sample(trainer: L.Trainer, module: Any) -> None:
    """A pipelined call as users look at samples while they train."""
    module.eval()
    with torch.inference_mode():
        call(trainer, module)
    module.train()


class Dropped(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.Dropout(0.5))


def train_and_call(action: Callable[[L.Trainer, Any], None]) -> dict[str, Tensor]:
    module = Dropped()
    pipeline = {"schedule": "pipedream", "activation_checkpointing": "layer"}
    run = trainer(pipeline, callbacks=[After(2, action)])
    run.fit(module, as_loader(EPOCH))
    return weights(module)


def test_what_is_in_flight_is_drained_as_in_training(ranks: Ranks) -> None:
    """What backward computes again, too: the mode in which a hook makes a call is the call's."""
    expected = ranks.run(3, train_and_call, call)[0]

    assert_equal_weights(ranks.run(3, train_and_call, sample)[0], expected)


class Freezing(Regression):
    """Learns in its first layer until a batch, and in its last from it."""

    def __init__(self, drains: bool) -> None:
        super().__init__()
        self.drains = drains
        self.net[5].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == 3:
            if self.drains:
                call(self.trainer, self)
            self.net[0].requires_grad_(False)
            self.net[5].requires_grad_(True)


def train_and_freeze(policy: oracle.Policy, drains: bool, **options: Any) -> dict[str, Tensor]:
    return weights(fit(policy, 4, EPOCH, Freezing(drains), **options)[1])


def freeze(drains: bool) -> list[dict[str, Tensor]]:
    return [train_and_freeze(policy, drains) for policy in POLICIES]


def freeze_and_end() -> list[dict[str, Tensor]]:
    return [
        train_and_freeze("stashing", drains=True, max_steps=steps, max_epochs=-1)
        for steps in (3, 10)
    ]


def test_what_a_hook_freezes_is_trained_no_more(ranks: Ranks) -> None:
    """A new fill begins there."""
    expected = ranks.run(2, freeze, True)[0]
    for found, drained in zip(ranks.run(2, freeze, False)[0], expected, strict=True):
        assert_equal_weights(found, drained)

    before, after = ranks.run(2, freeze_and_end)[0]
    frozen = [name for name, weight in before.items() if torch.equal(weight, after[name])]
    assert frozen == ["net.0.0.weight", "net.0.0.bias"]
