"""`deferred_batchnorm` through the Trainer; what it computes is tested in tests/runtime."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
from torch import Tensor, nn

from .lit import FEATURES, Classifier, Options, loader, trainer, weights
from .ranks import Ranks


class Normalized(Classifier):
    """Normalises its input, whose statistics do not depend on any weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, nn.BatchNorm1d(FEATURES))


def fit(module: type[Classifier], pipeline: Options | None) -> tuple[dict[str, Tensor], list[str]]:
    L.seed_everything(5, verbose=False)
    model = module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(pipeline).fit(model, loader())
    return weights(model), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("checkpointing", ["none", "stage"])
@pytest.mark.parametrize("deferred", [True, False])
def test_statistics_are_those_of_whole_batches(
    ranks: Ranks, deferred: bool, checkpointing: str
) -> None:
    expected, _ = fit(Normalized, None)
    pipeline = {"num_microbatches": 2, "deferred_batchnorm": deferred}

    options = pipeline | {"activation_checkpointing": checkpointing}
    trained, messages = ranks.run(2, fit, Normalized, options)[0]

    calls = 1 if deferred else 2  # of an update, for each of the six batches
    assert expected["model.0.num_batches_tracked"] == 6
    assert trained["model.0.num_batches_tracked"] == 6 * calls
    for name in "model.0.running_mean", "model.0.running_var":
        off = (trained[name] - expected[name]).abs().max()
        assert off < 1e-10 if deferred else off > 1e-3
    assert not [message for message in messages if "deferred_batchnorm" in message]


def test_a_model_without_any(ranks: Ranks) -> None:
    _, messages = ranks.run(2, fit, Classifier, {"deferred_batchnorm": True})[0]
    assert [message for message in messages if "deferred_batchnorm=True" in message]
