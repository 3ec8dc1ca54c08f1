"""What asynchronous training logs reaches all ranks equally late, and loggers once.

The lag is that of the first stage: w_0 micro-batches, in whole batches. A drain waits for nothing:
it delivers all at once, under the steps at which the values would have come.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import ceil, isnan, nan
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from runtime import oracle
from torch import Tensor
from torch.nn.functional import mse_loss
from torchmetrics import MeanSquaredError

from .lit import Options
from .pipedream import After, Before, Regression, call, fit, make_batches, replay
from .ranks import Ranks

EPOCH = make_batches((8, 8, 7, 8, 8, 3))
BATCHES = EPOCH * 2


class Record(Callback):
    """Keeps what a callback sees after each batch: the step's output, and the logged loss."""

    def __init__(self) -> None:
        self.outputs: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics.get("loss_step", "nan")))


class Talkative(Regression):
    """Logs values and a metric, and in other hooks of a batch, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mse = MeanSquaredError().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        self.mse(out, y)
        self.log("mse", self.mse, on_step=True, on_epoch=True)
        loss = mse_loss(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("at_update", float(self.global_step))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("at_end", float(self.global_step))


Seen = tuple[list[float], list[float]]
Rows = list[tuple[int, float]]


HOOKS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "on_train_batch_end": lambda: [After(3, call)],
    "on_train_batch_start": lambda: [Before(4, call)],
    "should_stop": lambda: [After(9, stop)],
}


def stop(trainer: L.Trainer, module: Any) -> None:
    trainer.should_stop = True


def talk(
    policy: oracle.Policy, count: int, directory: Path, options: Options, hook: str = "none"
) -> Seen:
    record = Record()
    logger = CSVLogger(directory, "csv", 0)
    callbacks = [record, *HOOKS[hook]()]
    fit(policy, count, EPOCH, Talkative(), callbacks=callbacks, logger=logger, **options)
    return record.outputs, record.logged


def rows_of(directory: Path, name: str) -> Rows:
    """Steps and values under a name, by step."""
    with (directory / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = [(int(row["step"]), row[name]) for row in csv.DictReader(file)]
    return sorted((step, float(value)) for step, value in rows if value)


def heard(drains: Sequence[int], lag: int) -> list[int | None]:
    """The batch that the others hear of in each round; the latest, where several."""
    batches: list[int | None] = []
    for end_before, end in pairwise((-1, *drains)):
        fill = range(end_before + 1, end + 1)
        batches += [number - lag if number - lag in fill else None for number in fill[:-1]]
        batches.append(end)
    return batches


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(
    ("num_stages", "policy", "count", "options", "drains"),
    [
        (2, "stashing", 1, {}, [5, 11]),
        (3, "stashing", 1, {"val_check_interval": 2}, [1, 3, 5, 7, 9, 11]),
        (3, "vertical_sync", 4, {}, [5, 11]),
        (4, "no_stashing", 1, {"val_check_interval": 5}, [4, 5, 10, 11]),
        (4, "2bw", 4, {"val_check_interval": 4}, [3, 5, 9, 11]),
        (4, "stashing", 1, {"log_every_n_steps": 3}, [5, 11]),
    ],
)
def test_values_of_the_last_stage_come_once_and_equally_late(
    ranks: Ranks,
    tmp_path: Path,
    num_stages: int,
    policy: oracle.Policy,
    count: int,
    options: Options,
    drains: list[int],
) -> None:
    losses = replay(policy, count, BATCHES, num_stages, drains, Talkative).losses
    lag = ceil((num_stages - 1) / count)
    every = options.get("log_every_n_steps", 1)

    def logged(values: Iterable[float], first_step: int) -> Rows:
        return [(n, v) for n, v in enumerate(values, first_step) if (n + 1) % every == 0]

    results = ranks.run(num_stages, talk, policy, count, tmp_path, options)

    outputs = [losses[b] if b is not None else nan for b in heard(drains, lag)]
    latest = list(accumulate(outputs, lambda before, now: before if isnan(now) else now))
    assert_close(results, [(outputs, latest)] * num_stages)
    for name in ("loss", "mse"):
        assert_close(rows_of(tmp_path, f"{name}_step"), logged(losses, lag))
        assert_close(rows_of(tmp_path, f"{name}_epoch"), epoch_means(losses))
    rounds = range(len(BATCHES))
    assert rows_of(tmp_path, "at_end") == logged((n + 1 for n in rounds), 0)
    with_update = {n for n, loss in enumerate(outputs) if not isnan(loss)}
    assert with_update & {*rounds[every - 1 :: every]} <= {*dict(rows_of(tmp_path, "at_update"))}


@pytest.mark.parametrize(
    ("hook", "drains", "num_batches"),
    [
        ("on_train_batch_end", [3, 5, 11], 12),
        ("on_train_batch_start", [3, 5, 11], 12),
        ("should_stop", [5, 9], 10),
    ],
)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_values_that_a_drain_in_a_hook_completes(
    ranks: Ranks, tmp_path: Path, num_stages: int, hook: str, drains: list[int], num_batches: int
) -> None:
    batches = BATCHES[:num_batches]
    losses = replay("stashing", 1, batches, num_stages, drains, Talkative).losses

    ranks.run(num_stages, talk, "stashing", 1, tmp_path, {}, hook)

    steps_and_losses = [*enumerate(losses, num_stages - 1)]
    assert_close(rows_of(tmp_path, "loss_step"), steps_and_losses)
    assert_close(rows_of(tmp_path, "mse_step"), steps_and_losses)
    assert [step for step, _ in rows_of(tmp_path, "at_end")] == [*range(num_batches)]
    assert [step for step, _ in rows_of(tmp_path, "val_loss")] == [5, num_batches - 1]


def epoch_means(losses: Sequence[float]) -> Rows:
    """By the last step of each epoch, of all its samples."""
    sizes = [len(x) for x, _ in EPOCH]
    means = []
    for first in range(0, len(losses), len(EPOCH)):
        terms = (size * loss for size, loss in zip(sizes, losses[first:], strict=False))
        means.append((first + len(EPOCH) - 1, sum(terms) / sum(sizes)))
    return means
