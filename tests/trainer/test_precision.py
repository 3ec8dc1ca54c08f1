"""Every precision of the Trainer; stages exchange what autocast computes in."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lit import WIDTH, Classifier, Options, loader, numbers, trainer, weights
from .ranks import Ranks


class Notes(nn.Module):
    """Notes the dtypes of what enters a stage, and of the gradient that leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.dtype)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.seen.add(gradient.dtype))
        return x


class Noted(Classifier):
    """A linear layer ends the first stage, and a note begins the second."""

    def __init__(self) -> None:
        super().__init__()
        del self.log_temperature  # which pipedream refuses
        self.model.insert(3, nn.Linear(WIDTH, WIDTH))
        self.model.insert(4, Notes())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam's eps is 0 in float16

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def train(pipeline: Options | None, options: Options) -> Any:
    L.seed_everything(9, verbose=False)
    module = Noted()
    run = trainer(pipeline, max_epochs=3, **options)
    run.fit(module, loader(), loader(20, seed=1))
    notes = next(child for child in module.modules() if isinstance(child, Notes))
    return weights(module), numbers(run.callback_metrics), notes.seen


@pytest.mark.parametrize(
    ("precision", "stored", "sent", "tolerance"),
    [
        ("64-true", torch.float64, torch.float64, 1e-10),
        ("32-true", torch.float32, torch.float32, 1e-4),
        ("bf16-mixed", torch.float32, torch.bfloat16, 5e-2),
        ("bf16-true", torch.bfloat16, torch.bfloat16, 5e-2),
        ("16-true", torch.float16, torch.float16, 2e-2),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_precision(
    ranks: Ranks,
    schedule: str,
    precision: str,
    stored: torch.dtype,
    sent: torch.dtype,
    tolerance: float,
) -> None:
    options = {"precision": precision, "gradient_clip_val": 1.0}
    _, expected, _ = train(None, options)

    pipeline = {"schedule": schedule, "num_microbatches": 4, "partition": [4, 6]}
    results = ranks.run(2, train, pipeline, options)

    assert {tensor.dtype for tensor in results[0][0].values()} == {stored}
    assert results[1][2] == {sent}
    for rank, (_, logs, _) in enumerate(results):
        if schedule == "pipedream":  # its weights are others
            assert logs["val_loss"] < 1.5, f"rank {rank}"
        else:
            assert logs == pytest.approx(expected, rel=tolerance), f"rank {rank}"
