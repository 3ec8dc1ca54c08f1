"""What a user of DDP expects of replicas: logs, metrics, starts, and loaders that end early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import AUROC, MeanMetric
from trainer.lit import Options, assert_equal_weights, numbers, samples, trainer, weights
from trainer.ranks import Ranks

from lightning_pipe import PipelineStrategy

from .models import Dealt, DealtOut, Inside, fit, replica_of

TWO = {"data_parallel_size": 2}


class Logging(Dealt):
    """Logs with and without `sync_dist`, and metrics, in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.area = MeanMetric(), AUROC("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("own", loss, on_step=True, on_epoch=False)
        self.log("synced", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.mean(loss, len(batch[0]))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.area(self.model(x), y)
        self.log("area", self.area)
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("largest", x.max(), sync_dist=True, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        gathered = self.all_gather(torch.tensor(float(replica_of(self.trainer)[0])))
        self.log("replicas", float(torch.as_tensor(gathered).numel()))

    def val_dataloader(self) -> Any:
        replica, replicas = replica_of(self.trainer)
        x, y = samples(24, seed=1).tensors
        return DataLoader(TensorDataset(x[replica::replicas], y[replica::replicas]), 24 // replicas)


def log(pipeline: Options | None) -> dict[str, float]:
    L.seed_everything(3, verbose=False)
    run = trainer(pipeline, use_distributed_sampler=False, max_epochs=1)
    module = Logging()
    run.fit(module)
    return numbers(run.callback_metrics)


def test_logged_values_are_those_of_ddp(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, log, None)
    by_rank = ranks.run(4, log, TWO)
    for values in by_rank:
        for name in ("synced_epoch", "mean", "area", "val_loss", "largest"):
            assert values[name] == pytest.approx(expected[name], abs=1e-10), name
        assert values["replicas"] == 2
    own = [values["own"] for values in by_rank]
    assert own[0] == own[2] != own[1] == own[3]  # ranks 0 and 2 are the pipeline of replica 0
    assert by_rank[0]["synced_step"] == pytest.approx((own[0] + own[1]) / 2, abs=1e-10)


def start_unseeded(pipeline: Options) -> tuple[dict[str, Tensor], list[float]]:
    """No seed: ranks are built with weights of their own."""
    module = Dealt()
    seen: list[float] = []
    module.on_train_start = lambda: seen.extend(  # type: ignore[method-assign]
        p.sum().item() for p in module.parameters() if not p.is_meta
    )
    trainer(pipeline, use_distributed_sampler=False, max_epochs=1).fit(module)
    return weights(module), seen


def test_replicas_start_and_stay_equal(ranks: Ranks) -> None:
    by_rank = ranks.run(4, start_unseeded, TWO)
    assert by_rank[0][1] == by_rank[1][1]
    assert by_rank[2][1] == by_rank[3][1]
    last, other = by_rank[2][0], by_rank[3][0]
    for name, tensor in last.items():
        assert tensor.is_meta or torch.equal(tensor, other[name]), name


def sampled(pipeline: Options) -> list[list[float]]:
    """Lightning's own sampler; the samples that training steps see, by epoch."""
    L.seed_everything(3, verbose=False)
    epochs: list[list[float]] = []

    class Watching(Inside):
        def train_dataloader(self) -> Any:
            return DataLoader(samples(16), 4, shuffle=True)

        def on_train_epoch_start(self) -> None:
            epochs.append([])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            epochs[-1] += batch[0][:, 0].tolist()

    trainer(pipeline).fit(Watching())
    return epochs


def test_lightnings_sampler_deals_out_the_data(ranks: Ranks) -> None:
    by_rank = ranks.run(4, sampled, TWO)
    assert by_rank[0] == by_rank[2] != by_rank[1] == by_rank[3]
    everything = sorted(samples(16).tensors[0][:, 0].double().tolist())
    for first, second in zip(by_rank[0], by_rank[1], strict=True):
        assert sorted(first + second) == pytest.approx(everything)
    assert by_rank[0][0] != by_rank[0][1]  # shuffled anew


class Stream(IterableDataset[Any]):
    """So many batches, of which nobody knows the number ahead."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        x, y = samples(8 * self._length).tensors
        yield from zip(x.split(8), y.split(8), strict=True)


def run_unequal(pipeline: Options, sized: bool, options: Options) -> tuple[int, int, list[float]]:
    L.seed_everything(3, verbose=False)

    class Unequal(Inside):
        def train_dataloader(self) -> Any:
            length = (5, 3)[replica_of(self.trainer)[0]]
            if sized:
                return DataLoader(samples(8 * length), 8)
            return DataLoader(Stream(length), batch_size=None)

    module = Unequal()
    run = trainer(pipeline, use_distributed_sampler=False, **options)
    run.fit(module)
    sums = [p.sum().item() for p in module.parameters() if not p.is_meta]
    return run.global_step, run.current_epoch, sums


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_all_replicas_end_an_epoch_with_the_shortest_loader(
    ranks: Ranks, sized: bool, schedule: str
) -> None:
    by_rank = ranks.run(4, run_unequal, TWO | {"schedule": schedule}, sized, {})
    assert {(step, epoch) for step, epoch, _ in by_rank} == {(2 * 3, 2)}
    assert by_rank[2][2] == by_rank[3][2]


def error_of(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""


def test_an_early_end_in_the_middle_of_an_accumulation_is_an_error(ranks: Ranks) -> None:
    options = {"accumulate_grad_batches": 2}
    errors = ranks.run(4, error_of, run_unequal, TWO, True, options)
    assert all("middle of an accumulation" in error for error in errors)


class FailsOnOne(Dealt):
    """A replica's last stage fails in its second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.trainer.global_rank == 3:
            raise ValueError("a replica is broken")
        return loss


def break_down(pipeline: Options) -> None:
    trainer(pipeline, use_distributed_sampler=False).fit(FailsOnOne())


def test_when_a_rank_of_a_replica_fails_all_end_with_its_report(ranks: Ranks) -> None:
    errors = ranks.run(4, error_of, break_down, TWO, timeout=20)
    assert all("a replica is broken" in error for error in errors), errors


class Skips(DealtOut):
    """One replica leaves its epoch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and replica_of(self.trainer)[0] == 1 else None


def skip(pipeline: Options) -> None:
    trainer(pipeline, use_distributed_sampler=False, max_epochs=1).fit(Skips())


def test_a_replica_that_stops_by_itself_is_an_error(ranks: Ranks) -> None:
    errors = ranks.run(4, error_of, skip, TWO, timeout=20)
    assert all("are not at the same place" in error for error in errors), errors


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"data_parallel_size": "auto"}, "Set pipeline_parallel_size"),
        ({"data_parallel_size": 0}, "expected a number from 1, or 'auto'"),
        ({"tensor_parallel_size": "auto"}, "expected a number from 1"),
        ({"zero_stage": 4}, "expected 0, 1, 2 or 3"),
        ({"zero_stage": 2, "schedule": "pipedream"}, "Use zero_stage=1"),
        ({"reshard_after_forward": True}, "only zero_stage=3 gathers"),
        ({"partition_activations": True}, "tensor_parallel_size from 2"),
        ({"partition": "time", "tensor_parallel_size": 2}, "measured on one rank"),
    ],
)
def test_options_that_cannot_work_are_refused(pipeline: Options, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        PipelineStrategy(**pipeline)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"data_parallel_size": 3}, "expected a multiple of 3"),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 4}, "expected 8, their product"),
        ({"zero_stage": 3, "schedule": "zero_bubble"}, "Use zero_stage=1"),
        ({"activation_offload": True}, "in host memory already"),
    ],
)
def test_what_cannot_work_is_refused(ranks: Ranks, pipeline: Options, message: str) -> None:
    errors = ranks.run(4, error_of, break_down, pipeline, timeout=20)
    assert all(message in error for error in errors), errors


def average(pipeline: Options | None, options: Options) -> dict[str, Tensor]:
    given = {"max_epochs": 3, **options}
    if averages := given.pop("averages", None):
        rates = {"swa_lrs": given.pop("swa_lrs")} if "swa_lrs" in given else {}
        given["callbacks"] = averages(**rates)
    return fit(Dealt, pipeline, given)


@pytest.mark.parametrize(
    ("pipeline", "options", "message"),
    [
        (TWO, {"sync_batchnorm": True}, "SyncBatchNorm needs one"),
        (
            TWO | {"zero_stage": 3},
            {"averages": EMAWeightAveraging},
            "averages whole parameters",
        ),
    ],
)
def test_what_replicas_cannot_do_is_refused(
    ranks: Ranks, pipeline: Options, options: Options, message: str
) -> None:
    errors = ranks.run(4, error_of, average, pipeline, options, timeout=20)
    assert all(message in error for error in errors), errors


@pytest.mark.parametrize(
    "options",
    [
        {"averages": EMAWeightAveraging},
        {"averages": StochasticWeightAveraging, "swa_lrs": 1e-2},
    ],
    ids=["EMA", "SWA"],
)
def test_averages_of_replicas_are_those_of_one_device(ranks: Ranks, options: Options) -> None:
    (expected,) = ranks.run(1, average, None, options)
    whole, *_ = ranks.run(4, average, TWO | {"zero_stage": 1}, options)
    assert_equal_weights(whole, expected)


def test_a_partition_by_time_is_the_same_on_all_replicas(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, fit, Dealt, None)
    whole, *_ = ranks.run(4, fit, Dealt, TWO | {"partition": "time"})
    assert_equal_weights(whole, expected)
