"""Bad numbers and bad loaders end all ranks with an error, or are borne as on one device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from steps import Spy, Steps, assert_same, load, outcome
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from trainer.lit import FEATURES, Options
from trainer.lit import trainer as make_trainer
from trainer.ranks import Ranks


class Root(nn.Module):
    """Its derivative at 0 is infinite, and times 0 not a number; its value is fine."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).sqrt()


class NaNInBackward(Steps):
    """In a layer of the first stage, or of the last one."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.model.insert(place, Root())


class NaNLoss(Steps):
    """Its loss is not a number in the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == 2 else 1.0)


class Empty(Steps):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(0, FEATURES))  # type: ignore[arg-type]


class EmptyValidation(Steps):
    val_dataloader = Empty.train_dataloader


class NoLength(IterableDataset[Any]):
    """Ends after some samples: on the ranks alike, or not."""

    def __init__(self, count: int, more_on_rank: int) -> None:
        self._count, self._more_on_rank = count, more_on_rank

    def __iter__(self) -> Iterator[Any]:
        more = int(os.environ.get("LOCAL_RANK", -1)) == self._more_on_rank
        generator = torch.Generator().manual_seed(1)
        for _ in range(self._count + 16 * more):
            yield torch.randn(FEATURES, generator=generator), torch.tensor(1)


class Endless(Steps):
    """Its data have no length."""

    def __init__(self, more_on_rank: int = -2) -> None:
        super().__init__()
        self.more_on_rank = more_on_rank

    def train_dataloader(self) -> Any:
        return DataLoader(NoLength(40, self.more_on_rank), batch_size=16)


class EndlessValidation(Endless):
    def train_dataloader(self) -> Any:
        return load(40)

    def val_dataloader(self) -> Any:
        return super().train_dataloader()


def fit(pipeline: Options | None, module: type[Steps]) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    spy, made = Spy(), module()
    run = make_trainer(pipeline, callbacks=[spy])
    run.fit(made)
    return outcome(run, made, spy)


@pytest.mark.parametrize("module", [NaNLoss, Empty, EmptyValidation, Endless])
def test_it_is_borne_as_on_one_device(ranks: Ranks, module: type[Steps]) -> None:
    expected = fit(None, module)

    for rank, actual in enumerate(ranks.run(2, fit, {}, module)):
        assert_same(actual, expected, rank)


def say(pipeline: Options, module: Callable[[int], Steps], argument: int, options: Options) -> str:
    """The error of a rank, with what it says of another one's."""
    try:
        make_trainer(pipeline, **options).fit(module(argument))
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "nothing"


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("place", [1, 7], ids=["first stage", "last stage"])
def test_an_anomaly_ends_all_ranks(ranks: Ranks, schedule: str, place: int) -> None:
    """Each says which function of which rank it was."""
    failing = 0 if place == 1 else 1
    pipeline = {"schedule": schedule}
    for rank, text in enumerate(
        ranks.run(2, say, pipeline, NaNInBackward, place, {"detect_anomaly": True})
    ):
        assert re.search(r"Function '\w+' returned nan values", text), f"rank {rank}: {text}"
        if rank != failing:
            assert f"Rank {failing} of 2 failed" in text, f"rank {rank}: {text}"


@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize("module", [Endless, EndlessValidation])
def test_data_that_end_at_different_times(ranks: Ranks, module: type[Steps], longer: int) -> None:
    for rank, text in enumerate(ranks.run(2, say, {}, module, longer, {})):
        assert re.search("(?s)PipelineError.*batch", text), f"rank {rank}: {text}"
