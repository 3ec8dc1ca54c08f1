"""All ranks of a pipeline work on the same batches, with the same random numbers."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from .lit import FEATURES, Classifier, loader, samples, trainer
from .ranks import Ranks

Loader = Callable[[], DataLoader[Any]]


class Recorder(Classifier):
    """Keeps the batches of the training.

    Its dropout layers draw other numbers on every stage, in training and in calls from a hook.
    """

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.batches: list[list[float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch[0].flatten().tolist())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])

    def on_train_epoch_end(self) -> None:
        self.model(torch.zeros(4, FEATURES, dtype=torch.float64))


class Augmented(Dataset[Any]):
    """Every sample has noise from each of the generators that people use."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return _noisy(index), index % 3


class Stream(IterableDataset[Any]):
    """The same, without a length."""

    def __init__(self, count: int = 24) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(24).tolist()
        return iter([(_noisy(index), index % 3) for index in order[: self.count]])


def _noisy(index: int) -> Tensor:
    x = torch.full((FEATURES,), float(index)).double()
    x[0], x[1], x[2] = torch.rand(()), np.random.rand(), random.random()
    return x


def shuffled() -> DataLoader[Any]:
    return loader(shuffle=True)


def augmented() -> DataLoader[Any]:
    return DataLoader(Augmented(), 8, shuffle=True)


def augmented_by_workers() -> DataLoader[Any]:
    return DataLoader(Augmented(), 8, shuffle=True, num_workers=2)


def streamed() -> DataLoader[Any]:
    return DataLoader(Stream(), 8)


def own_generator() -> DataLoader[Any]:
    data, generator = samples(24), torch.Generator()
    generator.seed()  # from the operating system
    return DataLoader(data, 8, sampler=RandomSampler(data, generator=generator))


def record(make: Loader, seeded: bool) -> list[list[float]]:
    """The batches that a rank trains on, over two epochs."""
    if seeded:
        L.seed_everything(1, workers=True, verbose=False)
    module = Recorder()
    trainer({}, limit_val_batches=1).fit(module, make(), loader(shuffle=True))
    return module.batches


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize(
    "make", [shuffled, augmented, augmented_by_workers, streamed, own_generator]
)
def test_batches_are_the_same_on_all_ranks(ranks: Ranks, make: Loader, seeded: bool) -> None:
    first, second = ranks.run(2, record, make, seeded)

    assert len(first) == 6
    assert first == second
    assert first[:3] != first[3:], "each epoch is shuffled and augmented anew"


def test_an_unshuffled_loader_keeps_its_order(ranks: Ranks) -> None:
    in_order = [batch[0].flatten().tolist() for batch in loader()]

    for batches in ranks.run(2, record, loader, False):
        assert batches == in_order * 2


class Forked(Dataset[Any]):
    """Depends on the rank, as a shard of a dataset does."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((FEATURES,), index + float(os.environ["LOCAL_RANK"])), index % 3


def uneven() -> DataLoader[Any]:
    """The second rank has a batch less."""
    return loader(24 - 8 * int(os.environ["LOCAL_RANK"]), batch_size=8)


def forked() -> DataLoader[Any]:
    return DataLoader(Forked(), 8)


def failure(train: Loader, validation: Loader, **pipeline: Any) -> tuple[str, int]:
    """What a rank says, and how many batches it has trained."""
    module = Recorder()
    run = trainer(pipeline, max_epochs=1)
    try:
        run.fit(module, train(), validation())
    except Exception as error:
        return "".join(traceback.format_exception(error)), run.global_step
    return "nothing failed", run.global_step


def uneven_stream() -> DataLoader[Any]:
    """The second rank has a batch less, and nobody can know before it has ended."""
    return DataLoader(Stream(24 - 8 * int(os.environ["LOCAL_RANK"])), 8)


@pytest.mark.parametrize(
    ("train", "validation", "named", "steps"),
    [
        pytest.param(forked, loader, "train_dataloader", 0, id="train"),
        pytest.param(loader, forked, "val_dataloader", 3, id="validation"),
        pytest.param(
            uneven, loader, "DataLoader over TensorDataset has 2 batches", 0, id="train length"
        ),
        pytest.param(
            loader, uneven, "DataLoader over TensorDataset has 2 batches", 0, id="validation length"
        ),
    ],
)
def test_different_batches_are_an_error_that_names_the_loader(
    ranks: Ranks, train: Loader, validation: Loader, named: str, steps: int
) -> None:
    for message, trained in ranks.run(2, failure, train, validation):
        assert "PipelineError" in message  # both tell the cause
        assert named in message
        assert trained <= steps


def impatient(train: Loader, validation: Loader) -> tuple[str, int]:
    return failure(train, validation, timeout=timedelta(seconds=3))


def test_streams_of_different_length_end_by_the_timeout(ranks: Ranks) -> None:
    for message, trained in ranks.run(2, impatient, uneven_stream, loader):
        assert "nothing failed" not in message
        assert trained <= 3


class Noisy(Recorder):
    """Draws before the call, as diffusion, mixup and masked models do."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise, mixup, mask = torch.randn_like(x), np.random.beta(1, 1), random.random()
        self.draws.append((noise.tolist(), mixup, mask))
        out = self.model(mixup * x + mask * noise)
        loss = F.cross_entropy(out, y) + (out * noise.mean()).sum()
        self.log("noise_of_last", noise.sum())
        return loss


def draw() -> tuple[list[Any], dict[str, Tensor]]:
    module = Noisy()
    run = trainer({"num_microbatches": 4})
    run.fit(module, loader())
    return module.draws, run.callback_metrics


def test_a_step_draws_the_same_on_all_stages(ranks: Ranks) -> None:
    first, *others = [draws for draws, _ in ranks.run(3, draw)]

    num_draws = 2 * 3 * 4  # epochs, batches, micro-batches
    assert len(first) == num_draws
    assert len({mixup for _, mixup, _ in first}) == num_draws, "each is a new one"
    for draws in others:
        assert draws == first
