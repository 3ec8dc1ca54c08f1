"""`compare_gradients` tells a pipeline that computes what one device computes from others."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.checking.parity import ParityError, compare, compare_gradients
from lightning_pipe.checking.parity_records import Run
from lightning_pipe.runtime import synchronous_work
from lightning_pipe.runtime.groups import Alone, GlooGroup
from lightning_pipe.runtime.steps import Losses

from .lit import FEATURES, Classifier, Options, Samples, loader, samples


class Inside(Classifier):
    """All parameters in layers, as asynchronous schedules want it."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.log_temperature.requires_grad_(False)
        self.model.extend(more)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 6},
        {"schedule": "pipedream", "num_microbatches": 5},
        {"schedule": "pipedream_2bw", "num_microbatches": 3},
        {"schedule": "1f1b", "num_microbatches": 3, "activation_checkpointing": "layer"},
    ],
    ids=lambda options: options["schedule"],
)
def test_equal_to_one_device(options: Options) -> None:
    module = Inside()
    x, y = samples(16).tensors  # the first batch
    twin = Inside()
    twin.load_state_dict(module.state_dict())
    torch.autograd.backward(twin.double().loss((x.double(), y)))

    report = compare_gradients(module, loader(), **options)

    assert report.is_equal, report
    assert report.reference == "batch"
    assert report.num_microbatches == options["num_microbatches"]
    assert report.loss is not None
    assert report.loss[0] == pytest.approx(report.loss[1], abs=1e-12)
    assert report.differences[0].relative < 1e-12
    norms = {n: float(p.grad.norm()) for n, p in twin.named_parameters() if p.grad is not None}
    assert {d.name: d.norm for d in report.differences} == pytest.approx(norms, rel=1e-10)
    assert {d.stage for d in report.differences} == set(
        range(options.get("stages_per_rank", 1) * 2)
    )
    assert set(report.logged) == {"train_loss", "train_loss_step", "train_loss_epoch"}
    assert not report.logged_differently
    assert "equal those of one device: " in report.summary


def test_the_caller_keeps_its_module_and_its_random_state() -> None:
    module = Classifier()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()

    assert compare_gradients(module, Samples(), batch_size=4, num_microbatches=4).is_equal

    assert torch.equal(torch.get_rng_state(), state)
    assert module._trainer is None
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_where_processes_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    report = compare_gradients(Classifier(dropout=0.2), Samples(), num_microbatches=4)

    assert report.is_equal, report
    assert report.reference == "micro-batches"


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 2},
        {"schedule": "pipedream", "num_microbatches": 3},
        {"zero_stage": 1, "schedule": "zero_bubble"},
        {"zero_stage": 2},
        {"zero_stage": 3},
    ],
    ids=lambda options: f"{options.get('schedule', '1f1b')}-{options.get('zero_stage', 0)}",
)
def test_replicas_have_the_gradients_of_all_samples(options: Options) -> None:
    """16 samples, of which two replicas have 8 each; what they divide is put together."""
    report = compare_gradients(Inside(), loader(), devices=4, data_parallel_size=2, **options)

    assert report.is_equal, report
    assert report.reference == "batch"
    assert report.differences[0].relative < 1e-12
    assert len([d for d in report.differences if d.norm > 0]) > 8
    assert report.loss is not None
    assert report.loss[0] == pytest.approx(report.loss[1], abs=1e-12)
    assert not report.logged
    assert "2 replicas had a share" in report.notes[-1]


@pytest.mark.parametrize("options", [{}, {"schedule": "pipedream"}], ids=str)
def test_replicas_that_share_unequally_or_draw_random_numbers(options: Options) -> None:
    """11 samples are 6 and 5, or with an asynchronous schedule twice 5."""
    report = compare_gradients(
        Noisy(), loader(), 4, batch_size=11, data_parallel_size=2, num_microbatches=2, **options
    )

    assert report.is_equal, report
    assert report.reference == "micro-batches"
    assert report.differences[0].relative < 1e-12


def test_replicas_that_weigh_their_losses() -> None:
    report = compare_gradients(Summed(weighted=True), loader(), 4, data_parallel_size=2)

    assert report.is_equal, report
    assert report.loss is None
    assert "and the loss, since training_step returns weights" in report.notes[-1]


def test_a_replica_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GlooGroup, "sum", lambda group, tensor: Alone().sum(tensor))

    report = compare_gradients(Inside(), loader(), 2, data_parallel_size=2)

    assert not report.is_equal
    assert all(d.relative > 1e-3 for d in report.differences if d.norm > 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 4, "tensor_parallel_size": 2}, "one device has none"),
        ({"devices": 3, "data_parallel_size": 2}, "with 3 processes"),
    ],
)
def test_sizes_that_cannot_be_compared(options: Options, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        compare_gradients(Classifier(), loader(), **options)


def test_more_replicas_than_samples() -> None:
    with pytest.raises(ParityError, match="at least one sample for each"):
        compare_gradients(Classifier(), loader(), 2, batch_size=1, data_parallel_size=2)


# ----------------------------------------------------------------------------------- wrong engines


def test_a_scaled_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    take = synchronous_work.SynchronousWork._take

    def scaled(work: Any, parameters: Any) -> None:
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.shape == (3, 10):  # of the last layer
                parameter.grad.mul_(1 + 1e-6)
        take(work, parameters)

    monkeypatch.setattr(synchronous_work.SynchronousWork, "_take", scaled)

    report = compare_gradients(Classifier(), loader())

    assert not report.is_equal
    worst = report.differences[0]
    assert (worst.name, worst.stage) == ("model.7.weight", 1)
    assert worst.relative == pytest.approx(1e-6, rel=1e-3)
    assert report.differences[1].relative < 1e-12
    assert "of 1 of 12 parameters differ" in report.summary
    assert "'model.7.weight': by 1.0e-06, where 1e-08 is allowed" in report.summary
    assert "float32" in report.notes[0]


def test_a_micro_batch_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Losses.add

    def drop(losses: Losses, result: Any, share: float, output: Any) -> Tensor:
        loss = add(losses, result, share, output)
        return loss * 0 if losses.weight == share else loss  # the first one

    monkeypatch.setattr(Losses, "add", drop)

    report = compare_gradients(Inside(), loader(), num_microbatches=4)

    assert not report.is_equal
    assert report.reference == "batch"
    assert all(d.relative > 1e-3 for d in report.differences)
    assert report.loss is not None
    assert report.loss[0] == pytest.approx(report.loss[1], abs=1e-12)
    assert not report.notes


def test_a_loss_that_is_reported_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    mean: Any = vars(Losses)["mean"].fget
    monkeypatch.setattr(Losses, "mean", property(lambda losses: mean(losses) * 2))

    report = compare_gradients(Classifier(), loader())

    assert not report.is_equal
    assert report.differences[0].relative < 1e-12
    assert report.summary.startswith("The loss is 2.")


# --------------------------------------------------------------------- what differs by nature


class Noisy(Inside):
    """Draws in its step before and after the call, and in a layer."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.3))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output = self.model(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(output + 0.1 * torch.randn_like(output), y)


@pytest.mark.parametrize(
    "options",
    [{"num_microbatches": 5}, {"schedule": "pipedream"}, {"activation_checkpointing": "layer"}],
    ids=str,
)
def test_random_numbers(options: Options) -> None:
    report = compare_gradients(Noisy(), loader(), **options)

    assert report.is_equal, report
    assert report.reference == "micro-batches"
    assert report.differences[0].relative < 1e-12
    assert report.logged.keys() == {"train_loss"}
    assert not report.logged_differently
    assert "'model.8' draws random numbers" in report.notes[0]


def test_random_numbers_do_not_hide_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_gradients(Noisy(), loader(), num_microbatches=2).is_equal

    def half(work: Any, parameters: Any) -> None:
        parameters = list(parameters)
        for parameter in parameters:
            parameter.grad = None if parameter.shape == (3,) else parameter.grad
        take(work, parameters)

    take = synchronous_work.SynchronousWork._take
    monkeypatch.setattr(synchronous_work.SynchronousWork, "_take", half)

    report = compare_gradients(Noisy(), loader(), num_microbatches=2)

    assert not report.is_equal
    assert report.differences[0].name == "model.7.bias"
    assert report.differences[0].relative == 1.0


def test_batchnorm() -> None:
    report = compare_gradients(Inside(nn.BatchNorm1d(3)), loader(), num_microbatches=4)

    assert report.is_equal, report
    assert report.reference == "micro-batches"
    assert "BatchNorm 'model.8' normalises by micro-batch" in report.notes[0]
    # A bias before it has no gradient but for rounding.
    zero = next(d for d in report.differences if d.name == "model.7.bias")
    assert zero.norm < 1e-12


class Summed(Inside):
    """A loss that is a sum, with its weight or without."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        per_sample = F.cross_entropy(self.model(x), y, reduction="none") * (y > 0)
        if not self.weighted:
            return per_sample.sum()
        weight = (y > 0).sum()
        return {"loss": per_sample.sum() / weight, "weight": weight}


def test_a_loss_that_is_no_mean_over_samples() -> None:
    report = compare_gradients(Summed(weighted=False), loader(), num_microbatches=3)

    assert not report.is_equal
    assert report.reference == "batch"
    assert "Return {'loss': loss, 'weight': number" in report.notes[0]


def test_a_loss_with_its_weight() -> None:
    assert compare_gradients(Summed(weighted=True), loader(), num_microbatches=3).is_equal


class Root(Inside):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("root", loss.detach().sqrt())
        return loss


def test_logged_values_that_are_no_means() -> None:
    report = compare_gradients(Root(), loader(), num_microbatches=4)

    assert report.is_equal
    assert report.logged_differently == ["root"]
    assert "Logged values that differ: 'root'" in report.notes[-1]


class Built(Classifier):
    """Its layers are built in the ranks, its callbacks would monitor what is not there."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))

    def configure_callbacks(self) -> Any:
        raise AssertionError("callbacks have no part in gradients")


def test_layers_that_are_built_in_the_ranks() -> None:
    report = compare_gradients(Built(), loader())

    assert report.is_equal, report
    assert len(report.differences) == 9


def test_single_precision() -> None:
    report = compare_gradients(Classifier(), loader(), precision="32-true")

    assert report.is_equal
    assert report.tolerance == 1e-4
    assert 1e-9 < report.differences[0].relative < 1e-5


# ------------------------------------------------------------------------------- runs without end


class Failing(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1:
            raise KeyError("the user's error")


def test_a_rank_that_fails() -> None:
    with pytest.raises(ParityError) as raised:
        compare_gradients(Failing(), loader())

    assert str(raised.value).rstrip().endswith('KeyError: "the user\'s error"')


class Sleeping(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.world_size == 2 and self.trainer.global_rank == 1:
            time.sleep(100)


def test_a_rank_that_hangs() -> None:
    start = time.monotonic()
    with pytest.raises(ParityError, match="Not done within 3 s") as raised:
        compare_gradients(Sleeping(), loader(), time_limit=3)

    assert time.monotonic() - start < 12
    assert "rank 1 was here" in str(raised.value)
    assert "in on_train_batch_start" in str(raised.value)


class Skipping(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Skipping(), {}, "No training step was made"),
        (Classifier(), {"batch_size": 17}, "first batch of 16 samples"),
    ],
)
def test_nothing_to_compare(module: Classifier, options: Options, message: str) -> None:
    with pytest.raises(ParityError, match=message):
        compare_gradients(module, loader(), **options)


def test_wrong_options() -> None:
    with pytest.raises(MisconfigurationException, match="There is no schedule 'nix'"):
        compare_gradients(Classifier(), loader(), schedule="nix")


# ----------------------------------------------------------------------------- comparing numbers


@pytest.mark.parametrize(
    ("pipeline", "expected", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1e-17, 0.0], [0.0, 0.0], 1e-17 / 1e-4 / 2.0),  # noise, where others have 2
        (None, None, 0.0),
        (None, [0.0, 2.0], 1.0),
        ([float("nan"), 1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_relative_difference(
    pipeline: list[float] | None, expected: list[float] | None, relative: float
) -> None:
    def run(gradient: list[float] | None) -> Run:
        both = {"it": gradient, "other": [2.0]}
        return Run({n: None if g is None else torch.tensor(g) for n, g in both.items()}, 0.0, {})

    found = compare([run(pipeline)], run(expected), tolerance=1e-8)

    (it,) = [difference for difference in found if difference.name == "it"]
    assert it.relative == pytest.approx(relative, rel=1e-6)
