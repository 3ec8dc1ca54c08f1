"""What an asynchronous schedule cannot do ends in an error on all ranks, with the reason."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

from lightning_pipe import PipelineStrategy

from .lit import Classifier, Options, assert_equal_weights, loader, trainer, weights
from .pipedream import SIZES, WIDTH, Regression, as_loader, call, fit, make_batches, replay
from .ranks import Ranks

EPOCH = make_batches()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"schedule": "pipedream", "weight_stashing": False, "vertical_sync": True},
            "vertical_sync=True needs weight_stashing=True: .* have to keep",
        ),
        (
            {"schedule": "pipedream_2bw", "weight_stashing": False},
            "weight_stashing=False .*'pipedream_2bw', which always keeps two versions",
        ),
        ({"schedule": "pipedream_2bw", "vertical_sync": True}, "vertical_sync=True .*two versions"),
        ({"schedule": "gpipe", "vertical_sync": True}, "vertical_sync=True .*'gpipe'.*defaults"),
        ({"schedule": "1f1b", "weight_stashing": False}, "weight_stashing=False .*'1f1b'"),
        ({"schedule": "forward"}, "'forward'. does not train. Choose one of naive, "),
    ],
    ids=str,
)
def test_arguments_that_contradict_each_other(arguments: Options, says: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"(?s){says}"):
        PipelineStrategy(**arguments)


class OwnWeight(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": 2.0}


class GradientHook(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[5].weight.register_hook(lambda gradient: 2 * gradient)


class NoStep(Regression):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()


class Normalized(Regression):
    """What stochastic weight averaging looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.BatchNorm1d(WIDTH).double()


class CallsInUpdate(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        call(self.trainer, self)


class SavesInUpdate(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trainer.save_checkpoint("never.ckpt")


class SavesBeforeUpdate(Regression):
    def on_after_backward(self) -> None:
        self.trainer.save_checkpoint("never.ckpt")


def averaging() -> Options:
    return {"callbacks": [StochasticWeightAveraging(1e-3, 1)]}


def accumulating_later() -> Options:
    return {"callbacks": [GradientAccumulationScheduler({1: 2})]}


PIPEDREAM, PIPEDREAM_2BW = {"schedule": "pipedream"}, {"schedule": "pipedream_2bw"}
NO_STASHING = {**PIPEDREAM, "weight_stashing": False}

Case = tuple[Callable[[], Any], Options, Callable[[], Options], str]

CASES: dict[str, Case] = {
    "accumulation": (
        Regression,
        PIPEDREAM,
        lambda: {"accumulate_grad_batches": 2},
        "accumulate_grad_batches=2 .*every micro-batch.*Leave it at 1",
    ),
    "accumulation from the second epoch": (
        Regression,
        PIPEDREAM_2BW,
        accumulating_later,
        "accumulate_grad_batches=2 .*'pipedream_2bw' accumulates over num_microbatches",
    ),
    "parameter outside the layers": (Classifier, PIPEDREAM, dict, "'log_temperature'"),
    "own weight": (OwnWeight, PIPEDREAM, dict, "weight of its own.*synchronous"),
    "own weight in 2bw": (OwnWeight, PIPEDREAM_2BW, dict, "weight of its own.*synchronous"),
    "several stages on a rank": (
        Regression,
        {**PIPEDREAM, "stages_per_rank": 2},
        dict,
        "4 stages on 2 ranks.*'pipedream'.*stages_per_rank=1",
    ),
    "too few micro-batches": (
        Regression,
        {**PIPEDREAM_2BW, "num_microbatches": 1},
        dict,
        "num_microbatches=1.*'pipedream_2bw'.*num_microbatches=2 or more",
    ),
    "autocast": (
        Regression,
        NO_STASHING,
        lambda: {"precision": "bf16-mixed"},
        "weight_stashing=False.*'bf16-mixed'.*weight_stashing=True",
    ),
    "gradient hook": (GradientHook, PIPEDREAM, dict, "'weight' .* has gradient hooks"),
    "no step": (NoStep, PIPEDREAM, dict, r"update from batch 0 was not made.*`optimizer_step`"),
    "no step after the last batch": (
        NoStep,
        PIPEDREAM,
        lambda: {"limit_train_batches": 1},
        "update from batch 0 was not made",
    ),
    "weight averaging with BatchNorm": (Normalized, PIPEDREAM, averaging, "BatchNorm.*'1f1b'"),
    "call in an update": (CallsInUpdate, PIPEDREAM, dict, "on_train_batch_end|after the batch"),
    "checkpoint in an update": (SavesInUpdate, PIPEDREAM, dict, "on_train_batch_end"),
    "checkpoint before an update": (SavesBeforeUpdate, PIPEDREAM, dict, "on_train_batch_end"),
}


def fail(name: str) -> str:
    """What a rank says to a bad case."""
    module, pipeline, options, _ = CASES[name]
    run = trainer(pipeline, **options())
    try:
        run.fit(module(), loader() if module is Classifier else as_loader(EPOCH))
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return "nothing failed"


@pytest.mark.parametrize("name", CASES)
def test_refused(ranks: Ranks, name: str) -> None:
    """All ranks fail, and one at least says why; the others may only have lost it."""
    *_, says = CASES[name]
    messages = ranks.run(2, fail, name)
    reasons = [re.search(f"(?s)MisconfigurationException: .*{says}", text) for text in messages]
    assert any(reasons), messages
    for reason, message in zip(reasons, messages, strict=True):
        assert reason or "PeerLostError" in message


class Clipped(torch.optim.SGD):
    """Clips by the norm of each stage's gradients."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__(net.parameters(), lr=0.05, momentum=0.9)
        first, _ = SIZES[2]
        self.stages = net[:first], net[first:]

    def step(self, closure: Any = None) -> None:
        for stage in self.stages:
            nn.utils.clip_grad_norm_(stage.parameters(), 0.05)
        super().step(closure)


class ClippedRegression(Regression):
    def configure_optimizers(self) -> Any:
        return Clipped(self.net)


def clip(algorithm: str) -> tuple[dict[str, Tensor], list[str]]:
    options: Options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, module = fit("stashing", 1, EPOCH, **options)
    return weights(module), [str(w.message) for w in caught if "gradient_clip" in str(w.message)]


def test_gradients_are_clipped_by_the_norm_of_each_stage(ranks: Ranks) -> None:
    (found, said), *others = ranks.run(2, clip, "norm")

    drains = {len(EPOCH) - 1}
    expected = replay("stashing", 1, EPOCH * 2, 2, drains, ClippedRegression)
    assert_equal_weights(found, expected.weights)
    (warning,) = said
    assert re.search(r"gradient_clip_val=0.05 .*each stage", warning)
    assert not any(said for _, said in others)


def test_clipping_by_value_needs_no_warning(ranks: Ranks) -> None:
    assert not any(said for _, said in ranks.run(2, clip, "value"))
