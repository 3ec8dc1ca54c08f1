"""A pipeline of processes trains to the weights that plain Lightning finds on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torchmetrics import Accuracy

from .lit import (
    CLASSES,
    Classifier,
    Options,
    assert_equal_weights,
    loader,
    numbers,
    trainer,
    weights,
)
from .ranks import Ranks

CLIP_BY_NORM = {"gradient_clip_val": 0.05}
CLIP_BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Metered(Classifier):
    """Logs losses, and a metric in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("twice_train_loss", 2 * loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.model(x), y)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", self.loss(batch))


def fit(pipeline: Options | None, options: Options) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train, and return weights and logged values."""
    L.seed_everything(3, verbose=False)
    module = Metered()
    run = trainer(pipeline, **options)
    run.fit(module, loader(shuffle=True), loader(20, batch_size=9, seed=1))
    return weights(module), numbers(run.callback_metrics)


@pytest.mark.parametrize(
    ("size", "pipeline", "options"),
    [
        (2, {"schedule": "naive"}, {"accumulate_grad_batches": 3}),
        (2, {"schedule": "gpipe", "num_microbatches": 3}, {"accumulate_grad_batches": 2}),
        (
            4,
            {"schedule": "gpipe", "num_microbatches": 8, "activation_checkpointing": "layer"},
            CLIP_BY_NORM,
        ),
        (
            2,
            {"schedule": "1f1b", "num_microbatches": 5, "activation_checkpointing": "stage"},
            {"accumulate_grad_batches": 3} | CLIP_BY_NORM,
        ),
        (
            3,
            {"schedule": "1f1b", "num_microbatches": 4, "partition": [1, 5, 2]},
            {"accumulate_grad_batches": 2} | CLIP_BY_VALUE,
        ),
        (4, {"schedule": "1f1b", "partition": "uniform"}, CLIP_BY_NORM),
        (
            2,
            {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4},
            {"accumulate_grad_batches": 2} | CLIP_BY_NORM,
        ),
        (  # the short batch of 5 samples makes 5 micro-batches, which `interleaved` cannot take
            2,
            {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 10,
             "activation_checkpointing": "stage"},
            {},
        ),
        (3, {"schedule": "zero_bubble", "num_microbatches": 5}, {"accumulate_grad_batches": 2}),
        (  # the last stage is on rank 0; 5 samples make 5 micro-batches, and 4 would be too few
            3,
            {"schedule": "zero_bubble", "stages_per_rank": 2, "num_microbatches": 8},
            CLIP_BY_NORM,
        ),
        (
            2,
            {"schedule": "zero_bubble", "stages_per_rank": 2},
            {"accumulate_grad_batches": 2},
        ),
    ],
    ids=lambda value: None if isinstance(value, int) else "-".join(map(str, value.values())),
)  # fmt: skip
def test_weights_and_logs_equal_one_device(
    ranks: Ranks, size: int, pipeline: Options, options: Options
) -> None:
    expected_weights, expected_logs = fit(None, options)

    results = ranks.run(size, fit, pipeline, options)

    assert_equal_weights(results[0][0], expected_weights)  # rank 0 has them all after fit
    for rank, (_, logs) in enumerate(results):
        assert logs == pytest.approx(expected_logs, rel=0, abs=1e-10), f"rank {rank}"


@pytest.mark.parametrize("clip", [CLIP_BY_NORM, CLIP_BY_VALUE], ids=["norm", "value"])
def test_limits_of_the_cases_clip(clip: Options) -> None:
    """Else clipping over all stages would go untested."""
    free, _ = fit(None, {})
    clipped, _ = fit(None, clip)
    assert (free["model.0.weight"] - clipped["model.0.weight"]).abs().max() > 1e-4
