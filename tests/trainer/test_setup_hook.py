"""Modules that build or change something in `setup`, which runs after the model is cut."""

from __future__ import annotations

import re
import traceback
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lit import CLASSES, WIDTH, Classifier, Options, assert_equal_weights, loader, trainer, weights
from .ranks import Ranks


class BuiltLate(Classifier):
    """Has no layers before `setup`."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def setup(self, stage: str) -> None:
        if not hasattr(self, "model"):
            self.model = Classifier().model.to(self.log_temperature.dtype)


class Extended(Classifier):
    """Adds a parameter outside the layers, which differs by rank at first."""

    def setup(self, stage: str) -> None:
        self.shift = nn.Parameter(torch.randn(CLASSES, dtype=self.log_temperature.dtype))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x) + self.shift, y)


class Replaced(Classifier):
    """Changes its last layer when its classes are known."""

    def setup(self, stage: str) -> None:
        self.model[-1] = nn.Linear(WIDTH, CLASSES)


def fit(module: type[Classifier], pipeline: Options | None) -> dict[str, Tensor]:
    if module is not Extended:
        L.seed_everything(3, verbose=False)
    model = module()
    trainer(pipeline).fit(model, loader())
    return weights(model)


def test_layers_built_in_setup(ranks: Ranks) -> None:
    expected = fit(BuiltLate, None)

    results = ranks.run(2, fit, BuiltLate, {"num_microbatches": 4})

    assert_equal_weights(results[0], expected)


def test_a_parameter_added_in_setup_is_equal_on_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.run(2, fit, Extended, {"num_microbatches": 4})

    assert torch.equal(one["shift"], other["shift"])


def fail(module: type[Classifier]) -> str:
    try:
        fit(module, {"num_microbatches": 4})
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return "nothing failed"


class Synchronised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model.insert(1, nn.SyncBatchNorm(WIDTH))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Replaced, "'model.7.weight', 'model.7.bias'.*`__init__` or in `configure_model`"),
        (Synchronised, "nn.SyncBatchNorm.*nn.BatchNorm1d"),
    ],
)
def test_what_is_refused(ranks: Ranks, module: type[Classifier], says: str) -> None:
    for message in ranks.run(2, fail, module):
        assert re.search(f"(?s)MisconfigurationException: .*{says}", message), message
