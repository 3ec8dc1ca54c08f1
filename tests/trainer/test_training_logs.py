"""What a training step logs on the last stage alone arrives on all ranks, as on one device."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import AUROC, Accuracy, MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassF1Score

from .lit import CLASSES, Classifier, Options, loader, numbers, trainer
from .ranks import Ranks


class Talkative(Classifier):
    """Logs in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)
        self.auroc = AUROC("multiclass", num_classes=CLASSES)  # its state is a list
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.largest = MaxMetric()  # it cannot be merged (full_state_update)
        self.collection = MetricCollection(
            {"recall": Accuracy("multiclass", num_classes=CLASSES, average="macro"),
             "f1": MulticlassF1Score(CLASSES)},
            prefix="of_all/",
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("samples", float(len(y)), reduce_fx="sum", on_epoch=True)
        self.seen.update(y)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        out = self.model(x)
        loss = F.cross_entropy(out, y)
        hits = (out.argmax(-1) == y).sum()

        self.log("step", loss)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("unlogged", loss, logger=False, prog_bar=True)
        self.log("number", float(batch_idx) + 0.5, on_epoch=True)
        self.log("weighed", loss, batch_size=3 * len(y), on_epoch=True)
        self.log("hits", hits, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("highest", out.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("lowest", out.min(), reduce_fx=torch.min, on_step=True, on_epoch=True)
        self.log("twice", loss, on_epoch=True)
        self.log("twice", loss, on_epoch=True)
        self.log_dict({"a": loss, "b": loss * 2}, on_epoch=True)

        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.auroc(out.softmax(-1), y)  # of logits each *update* guesses whether they are some
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        # Aggregators round what they get to float32 in some steps, and in others not, so whole
        # numbers.
        self.mean.update((out * 100).round())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.largest.update((out * 1000).round())
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.collection(out, y)
        self.log_dict(self.collection, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("learning_rate", optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss_at_end", outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", self.current_epoch + 0.25)


class ProgressBar(Callback):
    """Keeps what a progress bar would show."""

    def __init__(self) -> None:
        self.shown: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.shown.append(numbers(trainer.progress_bar_metrics))


def talk(pipeline: Options | None, directory: Path) -> tuple[Any, Any, Any]:
    """Train; return callback metrics, the last step's logged metrics, and the progress bar's."""
    L.seed_everything(2, verbose=False)
    bar = ProgressBar()
    run = trainer(
        pipeline,
        max_epochs=3,
        callbacks=[bar],
        logger=[CSVLogger(directory, "csv", 0), TensorBoardLogger(directory, "tensorboard", 0)],
    )
    run.fit(Talkative(), loader())
    return numbers(run.callback_metrics), numbers(run.logged_metrics), bar.shown


def read_csv(directory: Path) -> list[dict[str, float]]:
    with (directory / "csv" / "version_0" / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def read_tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard" / "version_0"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize(
    ("size", "pipeline"),
    [
        (2, {"schedule": "1f1b", "num_microbatches": 5}),
        (4, {"schedule": "gpipe", "num_microbatches": 8}),
        (2, {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 4}),
        (2, {"schedule": "zero_bubble", "stages_per_rank": 2, "num_microbatches": 4}),
    ],
    ids=["1f1b", "gpipe", "interleaved", "there and back"],
)
def test_every_value_arrives(ranks: Ranks, tmp_path: Path, size: int, pipeline: Options) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    expected = talk(None, one)

    results = ranks.run(size, talk, pipeline, many)

    for rank, actual in enumerate(results):
        assert_close(actual, expected, f"rank {rank}")
    assert_close(read_csv(many), read_csv(one), "CSVLogger")
    assert_close(read_tensorboard(many), read_tensorboard(one), "TensorBoardLogger", 1e-6)


def assert_close(actual: Any, expected: Any, what: str, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


class Monitored(Classifier):
    """Learns too fast, so that it stops early and its learning rate is reduced."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss_epoch"},
        }


class LearningRates(Callback):
    """Keeps the learning rate of every epoch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def monitor(pipeline: Options | None, directory: Path) -> dict[str, Any]:
    L.seed_everything(4, verbose=False)
    rates = LearningRates()
    checkpoint = ModelCheckpoint(directory, monitor="val_loss", filename="{epoch}-{val_loss:.8f}")
    stopping = EarlyStopping("val_loss", patience=2)
    callbacks = [rates, checkpoint, stopping]
    run = trainer(pipeline, max_epochs=20, enable_checkpointing=True, callbacks=callbacks)
    run.fit(Monitored(), loader(), loader(20, seed=1))
    return {
        "learning rates": rates.rates,
        "stopped in epoch": stopping.stopped_epoch,
        "best": Path(checkpoint.best_model_path).name,
    }


def test_callbacks_that_monitor(ranks: Ranks, tmp_path: Path) -> None:
    """On every rank: else ranks stop or save in different epochs, and wait for each other."""
    expected = monitor(None, tmp_path / "one")
    assert 0 < expected["stopped in epoch"] < 19
    assert len(set(expected["learning rates"])) > 1

    for rank, actual in enumerate(ranks.run(2, monitor, {}, tmp_path / "many")):
        assert actual == expected, f"rank {rank}"
    files = [path.name for path in (tmp_path / "many").iterdir()]
    assert files == [expected["best"]]
