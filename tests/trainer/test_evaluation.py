"""Validation, test, prediction and calls of the model see what they would see on one device."""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import AUROC, Accuracy

from .lit import CLASSES, FEATURES, Classifier, Options, loader, numbers, trainer
from .ranks import Ranks

PROBE = torch.linspace(-1, 1, 5 * FEATURES, dtype=torch.float64).view(5, FEATURES)


class Observed(Classifier):
    """Keeps all that its user could see of an evaluation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)
        self.auroc = AUROC("multiclass", num_classes=CLASSES)  # its state is a list of all outputs
        self.seen: list[Any] = []

    def evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        out = self.model(x)
        self.seen.append((batch_idx, dataloader_idx, out))
        self.accuracy(out, y)
        self.auroc.update(out.softmax(-1), y)
        self.log("loss", F.cross_entropy(out, y), on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy)
        self.log("largest", out.max(), reduce_fx="max")
        return out

    validation_step = test_step = evaluation_step

    def on_validation_epoch_end(self) -> None:
        self.log("auroc", self.auroc)
        self.seen.append(self.model(PROBE))

    def on_test_epoch_end(self) -> None:
        self.log("auroc", self.auroc)

    def on_train_epoch_end(self) -> None:
        self.eval()
        self.seen.append(self.model(PROBE))  # as one samples from a language model
        self.train()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.model(batch[0]).argmax(-1)


# Batches of 9, 9, 2 and of 3: other sizes than in training, and fewer samples than micro-batches.
def evaluation_loaders() -> list[DataLoader[Any]]:
    return [loader(20, batch_size=9, seed=1), loader(3, batch_size=3, seed=2)]


def evaluate(pipeline: Options, train: bool) -> dict[str, Any]:
    """Evaluate in all ways, after training with validation if wanted; return what was seen."""
    L.seed_everything(5, verbose=False)
    module = Observed(dropout=0.0 if train else 0.5)  # evaluation must not apply it
    run = trainer(pipeline)
    seen: dict[str, Any] = {}
    if train:
        run.fit(module, loader(), evaluation_loaders())
        seen["metrics of fit"] = numbers(run.callback_metrics)
    seen["validate"] = run.validate(module, evaluation_loaders(), verbose=False)
    seen["metrics of validate"] = numbers(run.callback_metrics)
    seen["test"] = run.test(module, evaluation_loaders(), verbose=False)
    seen["predict"] = run.predict(module, evaluation_loaders())
    seen["steps"] = module.seen
    return seen


@pytest.mark.parametrize("train", [False, True], ids=["before fit", "in and after fit"])
@pytest.mark.parametrize(
    ("size", "pipeline"),
    [
        (2, {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}),
        (4, {"schedule": "1f1b", "num_microbatches": 4}),
        (3, {"schedule": "zero_bubble", "stages_per_rank": 2, "num_microbatches": 5}),
    ],
    ids=["interleaved on 2", "1f1b on 4", "there and back on 3"],
)
def test_every_rank_sees_what_one_device_sees(
    ranks: Ranks, size: int, pipeline: Options, train: bool
) -> None:
    expected = evaluate(None, train)

    for rank, seen in enumerate(ranks.run(size, evaluate, pipeline, train)):
        for what in expected:
            assert_close(seen[what], expected[what], f"rank {rank}, {what}")


def assert_close(actual: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def evaluate_on_last(pipeline: Options) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module = Observed()
    run = trainer(pipeline)
    run.fit(module, loader(), evaluation_loaders())
    seen = {"fit": numbers(run.callback_metrics)}
    seen["validate"] = run.validate(module, evaluation_loaders(), verbose=False)
    seen["metrics"] = numbers(run.callback_metrics)
    seen["test"] = run.test(module, evaluation_loaders(), verbose=False)
    seen["outputs"] = [entry[2] for entry in module.seen if isinstance(entry, tuple)]
    seen["probes"] = [entry for entry in module.seen if isinstance(entry, Tensor)]
    seen["predict"] = run.predict(module, evaluation_loaders())
    return seen


@pytest.mark.parametrize(
    ("pipeline", "last"),
    [
        ({"num_microbatches": 4}, 2),
        ({"schedule": "zero_bubble", "stages_per_rank": 2, "num_microbatches": 5}, 0),
    ],
    ids=["1f1b", "there and back"],
)
def test_outputs_on_the_last_rank_only(ranks: Ranks, pipeline: Options, last: int) -> None:
    """Logs and metrics still arrive everywhere; outputs do not. Calls outside steps answer all."""
    expected = evaluate_on_last(None)

    results = ranks.run(3, evaluate_on_last, {**pipeline, "evaluation_outputs": "last"})

    for rank, seen in enumerate(results):
        for what in ("fit", "validate", "metrics", "test", "probes"):
            assert_close(seen[what], expected[what], f"rank {rank}, {what}")
    assert_close(results.pop(last), expected, "rank of the last stage")
    for seen in results:
        assert seen["outputs"] == []
        assert seen["predict"] == [[None] * len(batches) for batches in expected["predict"]]


def count_batches(pipeline: Options) -> list[tuple[int, int]]:
    """The number and size of each batch that a validation step sees."""
    module = Observed()
    run = trainer(pipeline, num_sanity_val_steps=1, limit_val_batches=2, max_epochs=1)
    run.fit(module, loader(), loader(50, batch_size=10))
    return [(e[0], len(e[2])) for e in module.seen if isinstance(e, tuple)]


def test_limits_count_batches_not_microbatches(ranks: Ranks) -> None:
    sanity_check, after_training = [(0, 10)], [(0, 10), (1, 10)]

    for seen in ranks.run(2, count_batches, {"num_microbatches": 5}):
        assert seen == sanity_check + after_training


class Nap(nn.Module):
    """A layer that sleeps in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP_S)
        return self.linear(x)


NAP_S, NUM_STAGES, NUM_MICROBATCHES, NUM_BATCHES = 0.03, 4, 8, 3


class Sleeper(L.LightningModule):
    """Four layers that sleep; times its validation steps, and its validation."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Nap() for _ in range(NUM_STAGES)))
        self.step_times: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        start = time.perf_counter()
        try:
            self.model(batch[0])
        finally:
            self.step_times.append(time.perf_counter() - start)

    def on_validation_epoch_start(self) -> None:
        self.start = time.perf_counter()

    def on_validation_epoch_end(self) -> None:
        self.time = time.perf_counter() - self.start


def sleep(outputs: str) -> tuple[list[float], float]:
    module = Sleeper()
    run = trainer({"num_microbatches": NUM_MICROBATCHES, "evaluation_outputs": outputs})
    run.validate(module, loader(NUM_BATCHES * 16), verbose=False)
    return module.step_times, module.time


def test_microbatches_overlap(ranks: Ranks) -> None:
    """A batch takes m+p-1 naps."""
    ideal = (NUM_MICROBATCHES + NUM_STAGES - 1) * NAP_S

    times, _ = ranks.run(NUM_STAGES, sleep, "all")[0]

    assert statistics.median(times) < 1.15 * ideal


def test_batches_overlap_where_outputs_stay(ranks: Ranks) -> None:
    """The pipeline is filled once, not once for each batch, which would take 33 naps."""
    ideal = (NUM_BATCHES * NUM_MICROBATCHES + NUM_STAGES - 1) * NAP_S

    _, duration = ranks.run(NUM_STAGES, sleep, "last")[-1]

    assert duration < 1.15 * ideal
