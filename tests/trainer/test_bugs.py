"""Each past bug that takes a Trainer or gloo to show, told by a test."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from .lit import CLASSES, FEATURES, WIDTH, Classifier, Options, loader, numbers, trainer, weights
from .ranks import Ranks


class Tagged(nn.Linear):
    """Returns a constant beside its tensor, and takes it from the layer before."""

    def forward(self, x: Any) -> tuple[Tensor, int]:
        x, count = x if isinstance(x, tuple) else (x, 0)
        return super().forward(x), count + 1


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, int]) -> Tensor:
        return pair[0]


class WithConstants(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = [Tagged(WIDTH, WIDTH) for _ in range(4)]
        self.model = nn.Sequential(
            Tagged(FEATURES, WIDTH), *middle, nn.Sequential(First(), nn.Linear(WIDTH, CLASSES))
        )


def trained_with_constants(pipeline: Options | None) -> Any:
    module = WithConstants()
    trainer(pipeline, max_epochs=1).fit(module, loader(24, batch_size=24))
    return weights(module)


def test_several_stages_on_a_rank_may_exchange_constants(ranks: Ranks) -> None:
    """A constant lets no receive be asked for ahead: confirming a message twice hung both ranks."""
    pipeline = {
        "schedule": "interleaved",
        "stages_per_rank": 3,
        "num_microbatches": 8,
        "partition": [1] * 6,
    }
    whole = ranks.run(2, trained_with_constants, pipeline)[0]
    expected = trained_with_constants(None)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


class FailsInHook(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 0:
            raise ValueError("in a hook")


def fit_and_save_on_exception(folder: str) -> str:
    callback = ModelCheckpoint(folder, save_on_exception=True)
    run = trainer({}, callbacks=[callback], enable_checkpointing=True)
    try:
        run.fit(FailsInHook(), loader())
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return "nothing failed"


def test_saving_on_an_exception_waits_for_nobody(ranks: Ranks, tmp_path: Any) -> None:
    """The other ranks are still training, and will not take part."""
    for message in ranks.run(2, fit_and_save_on_exception, str(tmp_path)):
        assert "in a hook" in message


class Masked(nn.Module):
    """Draws numbers of torch's default dtype, as many layers do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, device=x.device) > 0.5)


class Drawing(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [[nn.Linear(WIDTH, WIDTH), nn.Tanh(), Masked()] for _ in range(2)]
        self.model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), *sum(layers, []), nn.Linear(WIDTH, CLASSES)
        )


def drawn(checkpointing: str) -> Any:
    module = Drawing()
    pipeline = {"activation_checkpointing": checkpointing, "num_microbatches": 4}
    run = trainer(pipeline, max_epochs=1)
    torch.manual_seed(3)  # of the streams
    run.fit(module, loader())
    return weights(module)


def test_recomputation_draws_numbers_of_the_same_dtype(ranks: Ranks) -> None:
    """The default dtype of `64-true` holds in the step, but not in backward."""
    expected, *_ = ranks.run(2, drawn, "none")
    for checkpointing in ("stage", "layer"):
        whole, *_ = ranks.run(2, drawn, checkpointing)
        torch.testing.assert_close(whole, expected, rtol=0, atol=0)


class Normalised(Classifier):
    """A BatchNorm after the call: its statistics change on the last rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.norm(self.model(x)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def validated(pipeline: Options | None) -> Any:
    torch.manual_seed(0)
    module = Normalised()
    run = trainer(pipeline, max_epochs=1)
    run.fit(module, loader(32), loader(32))
    return numbers(run.callback_metrics), weights(module.norm)


def test_buffers_outside_the_layers_follow_the_last_rank(ranks: Ranks) -> None:
    """Rank 0 validated, and saved, with statistics that had never changed."""
    partition: Options = {"partition": [6, 2], "num_microbatches": 1}
    (metrics, norm), (other_metrics, _) = ranks.run(2, validated, partition)
    expected_metrics, expected_norm = validated(None)
    assert metrics == other_metrics
    torch.testing.assert_close(norm, expected_norm, rtol=0, atol=1e-10)
    assert abs(metrics["val_loss"] - expected_metrics["val_loss"]) < 1e-10


class LogsDict(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"val_loss": self.loss(batch)})


def validated_on_the_last_rank(pipeline: Options | None) -> Any:
    torch.manual_seed(0)
    run = trainer(pipeline)
    run.validate(LogsDict(), loader(), verbose=False)
    return numbers(run.callback_metrics)


def test_a_dict_logged_on_the_last_rank_is_weighted_by_samples(ranks: Ranks) -> None:
    """Its last batch is short; `log_dict` passes ``batch_size=None`` on."""
    ours = ranks.run(2, validated_on_the_last_rank, {"evaluation_outputs": "last"})
    expected = validated_on_the_last_rank(None)
    for metrics in ours:
        assert abs(metrics["val_loss"] - expected["val_loss"]) < 1e-10


class Weighted(Classifier):
    """Classes above 0 count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y.masked_fill(y == 0, -100))
        self.log("train_loss", loss)
        return {"loss": loss, "weight": (y > 0).sum()}


def weighted_logs(pipeline: Options | None) -> Any:
    torch.manual_seed(0)
    run = trainer(pipeline, max_epochs=1)
    run.fit(Weighted(), loader())
    return numbers(run.callback_metrics)


def test_what_a_weighted_step_logs_is_weighted(ranks: Ranks) -> None:
    expected = weighted_logs(None)
    for metrics in ranks.run(2, weighted_logs, {"num_microbatches": 4}):
        assert abs(metrics["train_loss"] - expected["train_loss"]) < 1e-10
