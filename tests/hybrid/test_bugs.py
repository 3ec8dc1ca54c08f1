"""What a second reading of replicas, tied weights and ZeRO has found."""

from __future__ import annotations

import datetime
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer.lit import Options, assert_equal_weights, loader, samples, trainer
from trainer.ranks import Ranks

from .models import SAMPLES, WIDTH, Dealt, DealtOut, Inside, Tied, fit, replica_of

TWO = {"data_parallel_size": 2}
INTERLEAVED = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}
CLIPPED = {"gradient_clip_val": 0.05}


class Chain(DealtOut):
    """Linear layers, some of which have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*self.layers([nn.Linear(WIDTH, WIDTH) for _ in range(4)]))

    def layers(self, linear: list[nn.Linear]) -> list[nn.Module]:
        raise NotImplementedError

    def data(self) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
        return [(row, row.roll(1)) for row in x.unbind(0)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x), y)


class TwoTies(Chain):
    """One is in stages 0 and 3, the other one in 1 and 2: two ranks end them in opposite order."""

    def layers(self, linear: list[nn.Linear]) -> list[nn.Module]:
        linear[2].weight, linear[3].weight = linear[1].weight, linear[0].weight
        return list(linear)


class TiedInStages(Chain):
    """Two layers of one stage have one weight."""

    def layers(self, linear: list[nn.Linear]) -> list[nn.Module]:
        linear[1].weight, linear[3].weight = linear[0].weight, linear[2].weight
        return list(linear)


class TiedInLayers(Chain):
    """Two modules in one layer have one weight."""

    def layers(self, linear: list[nn.Linear]) -> list[nn.Module]:
        linear[1].weight = linear[0].weight
        return [nn.Sequential(linear[0], nn.Tanh(), linear[1]), *linear[2:]]


class Twice(Chain):
    """One layer stands twice in a stage."""

    def layers(self, linear: list[nn.Linear]) -> list[nn.Module]:
        return [linear[0], nn.Tanh(), linear[0], *linear[1:]]


class TiedAndOutside(Tied):
    """The tied weight is in the same ranks as a parameter outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self.model(batch[:, :-1]) * self.scale
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.parametrize(
    ("kind", "size", "pipeline"),
    [
        (TwoTies, 2, INTERLEAVED),
        (TwoTies, 4, INTERLEAVED | TWO | {"zero_stage": 1}),
        (TiedAndOutside, 2, INTERLEAVED),
        (TiedInStages, 4, TWO | {"zero_stage": 2, "partition": [2, 2]}),
        (TiedInStages, 4, TWO | {"zero_stage": 3, "partition": [2, 2]}),
        (TiedInLayers, 4, TWO | {"zero_stage": 3}),
        (Twice, 4, TWO | {"zero_stage": 3, "partition": [3, 3]}),
    ],
)
def test_ties_in_odd_places(ranks: Ranks, kind: Any, size: int, pipeline: Options) -> None:
    (expected,) = ranks.run(1, fit, kind, None, CLIPPED)
    whole, *_ = ranks.run(size, fit, kind, pipeline, CLIPPED)
    assert_equal_weights(whole, expected)  # ties included: it compares the names


@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "pipedream"},
        {"zero_stage": 2},
        {"zero_stage": 3, "reshard_after_forward": True},
    ],
)
def test_replicas_cut_a_short_batch_into_equally_many_pieces(
    ranks: Ranks, pipeline: Options
) -> None:
    """The last batch has two samples on one replica and three on the other."""
    given = {"num_microbatches": 4, "timeout": datetime.timedelta(seconds=20)}
    by_rank = ranks.run(4, fit, Inside, TWO | given | pipeline)
    assert len(by_rank) == 4


class Pauses(Inside):
    """Validates after half of its replica's own batches."""

    def train_dataloader(self) -> Any:
        return DataLoader(samples((64, 32)[replica_of(self.trainer)[0]]), 8)

    def val_dataloader(self) -> Any:
        return loader(8, 4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def error_of(*arguments: Any) -> str:
    try:
        fit(*arguments)
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_replicas_that_validate_at_different_times_are_an_error(
    ranks: Ranks, schedule: str
) -> None:
    options = {"val_check_interval": 0.5}
    errors = ranks.run(4, error_of, Pauses, TWO | {"schedule": schedule}, options)
    assert all("validate after a number of batches" in error for error in errors), errors


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return x + self.sometimes(x) if x[0, 0] > 0 else x


class Conditional(Dealt):
    """Which parameters a micro-batch uses depends on its first sample."""

    def __init__(self) -> None:
        super().__init__()
        self.model[6] = Sometimes()


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_parameters_that_some_replicas_do_not_use(ranks: Ranks, zero_stage: int) -> None:
    pipeline = TWO | {"num_microbatches": 4, "zero_stage": zero_stage}
    whole, *_ = ranks.run(4, fit, Conditional, pipeline, {"limit_train_batches": 4})
    expected, *_ = ranks.run(
        2, fit, Conditional, {"num_microbatches": 8}, {"limit_train_batches": 4}
    )
    assert_equal_weights(whole, expected)


class Buffers(Dealt):
    """Of types that gloo does not know, or of which one element stands for several."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].register_buffer("small", torch.ones(3, dtype=torch.int16))
        self.model[0].register_buffer("expanded", torch.ones(1, 3).expand(4, 3))
        self.model[6].register_buffer("complex", torch.ones(3, dtype=torch.complex64))
        self.model[6].register_buffer("empty", torch.empty(0))


def test_buffers_of_all_kinds(ranks: Ranks) -> None:
    assert len(ranks.run(4, fit, Buffers, TWO, {"max_epochs": 1})) == 4


class Sparse(Tied):
    """An embedding whose gradients are sparse."""

    def build(self) -> None:
        super().build()
        embedding = nn.Embedding(*self.model[0].weight.shape, sparse=True)
        self.model = nn.Sequential(embedding, *list(self.model)[1:])
        self.model[-1].weight = nn.Parameter(self.model[-1].weight.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_become_dense(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, fit, Sparse, None)
    whole, *_ = ranks.run(4, fit, Sparse, TWO)
    assert_equal_weights(whole, expected)


def count_groups() -> list[int]:
    counts = []
    for _ in range(3):
        fit(Inside, TWO | {"zero_stage": 2}, {"max_epochs": 1})
        counts.append(len(distributed_c10d._world.pg_map))
    return counts


def test_runs_leave_no_process_groups_behind(ranks: Ranks) -> None:
    assert all(len(set(counts)) == 1 for counts in ranks.run(4, count_groups))


class Predicts(Inside):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])


def predict(pipeline: Options) -> int:
    L.seed_everything(3, verbose=False)
    run = trainer(pipeline)
    return len(run.predict(Predicts(), loader(15, 2)) or [])


@pytest.mark.parametrize("reshards", [False, True])
def test_replicas_predict_different_numbers_of_batches(ranks: Ranks, reshards: bool) -> None:
    pipeline = TWO | {"zero_stage": 3, "reshard_after_forward": reshards}
    assert ranks.run(4, predict, pipeline) == [4, 4, 4, 4]
    assert ranks.run(2, predict, pipeline | {"pipeline_parallel_size": 1}) == [4, 4]


def fit_with(name: str) -> None:
    class Other(Inside):
        def configure_optimizers(self) -> Any:
            return getattr(torch.optim, name)(self.parameters())

    trainer(TWO | {"zero_stage": 3}, use_distributed_sampler=False).fit(Other())


def refusal(name: str) -> str:
    try:
        fit_with(name)
    except Exception as error:
        return str(error)
    return ""


def test_optimizers_of_whole_matrices_are_refused_where_there_are_none(ranks: Ranks) -> None:
    assert all("whole matrices" in error for error in ranks.run(4, refusal, "Adafactor"))
