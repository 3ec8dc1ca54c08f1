"""The update that comes from a batch has the learning rate and the other values of that batch.

A scheduler runs after every batch, and the update may come rounds later, several in one drain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, OneCycleLR

from .lit import assert_equal_weights, weights
from .pipedream import POLICIES, Regression, fit, make_batches, replay
from .ranks import Ranks

BATCHES = make_batches((8, 8, 7, 8, 8, 6))
EPOCHS = 2
NUM_BATCHES = EPOCHS * len(BATCHES)
COUNTS = {"2bw": (4,)}  # of micro-batches

Values = tuple[float, float]

SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "own recursion": lambda optimizer: ExponentialLR(optimizer, 0.8),
    "momentum too": lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=NUM_BATCHES + 1),
    "zero at first": lambda optimizer: LambdaLR(optimizer, lambda step: step / NUM_BATCHES),
}


class Scheduled(Regression):
    def __init__(self, scheduler: str, tensor: bool = False) -> None:
        super().__init__()
        self.scheduler, self.lr = (
            scheduler,
            torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1,
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = SCHEDULERS[self.scheduler](optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def values_of(optimizer: Any) -> Values:
    (group,) = optimizer.param_groups
    return float(group["lr"]), group["momentum"]


def on_one_device(scheduler: str) -> list[Values]:
    """Learning rate and momentum of each batch, and after the last."""
    (optimizer,), (config,) = Scheduled(scheduler).configure_optimizers()
    values = [values_of(optimizer)]
    for _ in range(NUM_BATCHES):
        optimizer.step()
        config["scheduler"].step()
        values.append(values_of(optimizer))
    return values


class Prescribed(torch.optim.SGD):
    """Takes the values of one update after the other from a list."""

    def __init__(self, parameters: Any, values: list[Values]) -> None:
        super().__init__(parameters, lr=0.0)
        self.values = iter(values)

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["lr"], self.param_groups[0]["momentum"] = next(self.values)
        super().step(closure)


def train(scheduler: str, tensor: bool) -> dict[Any, tuple[dict[str, Tensor], Values, Any]]:
    """By policy and number of micro-batches: weights, values after training, scheduler's last."""
    trained = {}
    for policy in POLICIES:
        for count in COUNTS.get(policy, (1, 4)):
            module = Scheduled(scheduler, tensor)
            run, _ = fit(policy, count, BATCHES, module, max_epochs=EPOCHS)
            last = float(run.lr_scheduler_configs[0].scheduler.get_last_lr()[0])
            assert (run.optimizers[0].param_groups[0]["lr"] is module.lr) == tensor
            trained[policy, count] = weights(module), values_of(run.optimizers[0]), last
    return trained


@pytest.mark.parametrize(
    ("scheduler", "tensor"), [*((name, False) for name in SCHEDULERS), ("own recursion", True)]
)
def test_values_of_the_own_batch(ranks: Ranks, scheduler: str, tensor: bool) -> None:
    values = on_one_device(scheduler)
    assert len(set(values)) > NUM_BATCHES / 2
    sizes = [len(x) for x, _ in BATCHES] * EPOCHS

    results = ranks.run(3, train, scheduler, tensor)

    for (policy, count), (found, *_) in results[0].items():
        times = [1 if policy == "2bw" else min(count, size) for size in sizes]
        by_update = [v for v, n in zip(values, times, strict=False) for _ in range(n)]

        class Replayed(Regression):
            def configure_optimizers(self, by_update: list[Values] = by_update) -> Any:
                return Prescribed(self.parameters(), by_update)

        drains = {len(BATCHES) - 1}
        expected = replay(policy, count, BATCHES * EPOCHS, 3, drains, Replayed)
        assert_equal_weights(found, expected.weights)
    for trained in results:
        for _, after, last in trained.values():
            assert after == pytest.approx(values[-1], rel=1e-10)
            assert last == pytest.approx(values[-1][0], rel=1e-10)


class Counting(torch.optim.SGD):
    """Keeps in its param group what it needs of earlier updates: a number, and a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0].update(number=0, tensor=torch.zeros(()))

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        loss = None if closure is None else closure()
        group["number"] += 1
        group["tensor"] += 1
        before, group["lr"] = group["lr"], group["lr"] / float(group["number"] + group["tensor"])
        super().step()
        group["lr"] = before
        return loss


class Counted(Regression):
    def configure_optimizers(self) -> Any:
        return Counting(self.parameters())


def count_updates() -> dict[str, tuple[dict[str, Tensor], int, int]]:
    trained = {}
    for policy in POLICIES:
        run, module = fit(policy, 4, BATCHES, Counted(), max_epochs=1)
        (group,) = run.optimizers[0].param_groups
        trained[policy] = weights(module), group["number"], int(group["tensor"])
    return trained


def test_an_optimizer_keeps_its_own_count(ranks: Ranks) -> None:
    results = ranks.run(2, count_updates)

    for policy, (found, *_) in results[0].items():
        assert_equal_weights(found, replay(policy, 4, BATCHES, 2, (), Counted).weights)
    for trained in results:
        for policy, (_, number, tensor) in trained.items():
            assert number == tensor == (6 if policy == "2bw" else 24)
