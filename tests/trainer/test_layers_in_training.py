"""Models of other forms than one Sequential train as on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lit import (
    CLASSES,
    FEATURES,
    WIDTH,
    Classifier,
    Options,
    assert_equal_weights,
    loader,
    trainer,
    weights,
)
from .ranks import Ranks


class Masked(nn.Module):
    """A layer that takes a keyword argument of the pipelined call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * mask


class Listed(Classifier):
    """Lists its layers, and passes a mask to those that name it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.enter, *self.blocks, self.leave]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.leave(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x, mask=(x[:, :1] > 0).to(x)), y)


class Surrounded(Classifier):
    """Uses parameters outside of the layers before the call, after it, and both."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, FEATURES)
        self.both = nn.Parameter(torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.model(self.before(x) * self.both)
        return F.cross_entropy(out * self.both * self.log_temperature.exp(), y)


class Weighted(Classifier):
    """Weighs a micro-batch by its number of samples of one class, as of tokens that count."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        counts = y == 1
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        return {"loss": losses[counts].sum() / counts.sum().clamp(min=1), "weight": counts.sum()}


def train(module: type[Classifier], pipeline: Options | None) -> dict[str, Tensor]:
    L.seed_everything(7, verbose=False)
    model = module()
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    trainer(pipeline, **options).fit(model, loader())
    return weights(model)


@pytest.mark.parametrize("module", [Listed, Surrounded, Weighted])
def test_training_equals_one_device(ranks: Ranks, module: type[Classifier]) -> None:
    expected = train(module, None)

    pipeline = {"num_microbatches": 4, "module": None if module is Listed else "model"}
    trained = ranks.run(3, train, module, pipeline)

    assert_equal_weights(trained[0], expected)
    outside = [name for name in expected if name in ("log_temperature", "both", "before.weight")]
    for other in trained[1:]:  # they live on every rank, and stay equal
        for name in outside:
            torch.testing.assert_close(other[name], expected[name], rtol=0, atol=1e-10)
