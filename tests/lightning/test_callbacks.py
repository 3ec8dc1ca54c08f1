"""Every callback that Lightning exports does in a pipeline what it does on one device."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import math
import os
import re
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from rich import reconfigure
from steps import Spy, Steps, assert_same, outcome
from torch import Tensor, nn
from trainer.lit import Options
from trainer.lit import trainer as make_trainer
from trainer.ranks import Ranks

# --------------------------------------------------------------------------------- what is trained


class Shown(Steps):
    """Has a value in the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class Spikes(Steps):
    """Its loss jumps in the fourth batch, or is not a number there."""

    jump = 1e3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (self.jump if batch_idx == 3 else 1.0)


class NotANumber(Spikes):
    """Says in its second epoch that its loss is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Steps.training_step(self, batch, batch_idx)
        self.log("checked", loss * (math.nan if self.current_epoch == 1 else 1.0), on_epoch=True)
        return loss


class Backbone(Steps):
    """Has what `BackboneFinetuning` looks for."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(self.model.children())
        self.backbone, self.head = nn.Sequential(*layers[:5]), nn.Sequential(*layers[5:])
        del self.model

    def configure_pipeline(self) -> list[nn.Module]:
        return [*self.backbone, *self.head]

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.backbone(x))
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Scheduled(Steps):
    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if "bias" in n], "name": "biases"},
            {"params": [p for n, p in named.items() if "bias" not in n], "name": "weights"},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Tuned(Steps):
    """Has a learning rate to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Finetuning(callbacks.BaseFinetuning):
    """Trains the first layers from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.05)


class Writer(callbacks.BasePredictionWriter):
    """Keeps what it is to write."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.kept: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        indices, batch, *numbers = args
        self.kept.append([prediction, indices, batch, *numbers])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.kept.append([predictions, indices])


class OwnBar(callbacks.ProgressBar):
    """The base class, with what it gives to show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def disable(self) -> None:
        pass

    def enable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        metrics = [f"{name} {value:.8f}" for name, value in bar_metrics(self, trainer, module)]
        self.shown.append((metrics, self.total_train_batches, args[-1]))


class TextBar(callbacks.TQDMProgressBar):
    """Writes into a string; without the time that things take."""

    def __init__(self) -> None:
        super().__init__()
        self.text = io.StringIO()

    def init_train_tqdm(self) -> Any:
        return self._told(super().init_train_tqdm())

    def init_validation_tqdm(self) -> Any:
        return self._told(super().init_validation_tqdm())

    def _told(self, bar: Any) -> Any:
        bar.fp = self.text
        bar.bar_format = "{desc}{n_fmt}/{total_fmt}{postfix}\n"
        return bar


class RichText(callbacks.RichProgressBar):
    """Draws when time has passed; what it would draw is kept after every batch."""

    def __init__(self) -> None:
        self.text, self.drawn = io.StringIO(), list[Any]()
        super().__init__(console_kwargs={"file": self.text, "force_terminal": True, "width": 200})

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        if self.progress is None:  # on ranks other than 0
            return
        bar: Any = self.train_progress_bar
        metrics = {name: f"{value:.8f}" for name, value in bar_metrics(self, trainer, module)}
        self.drawn.append((bar.description, bar.completed, bar.total, metrics))


def bar_metrics(bar: Any, trainer: Any, module: Any) -> list[tuple[str, float]]:
    metrics = bar.get_metrics(trainer, module)
    return [(name, float(value)) for name, value in metrics.items() if name != "v_num"]


# -------------------------------------------------------------------------------- what is looked at


def text_of(run: L.Trainer, module: Any, bar: Any, _: Any) -> Any:
    """What a bar has written, without times."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", bar.text.getvalue())
    text = re.sub(r"[\d.]+(it/s|s/it)|\d+:\d\d:\d\d|\S*━\S*|•|[╸╺]", "", text)
    lines = [" ".join(line.split()) for line in text.replace("\r", "\n").splitlines()]
    return sorted({line for line in lines if "5/5" in line or "3/3" in line})


def rows(run: L.Trainer, module: Any, callback: Any, directory: Path) -> Any:
    """What a CSVLogger has, without values of a clock or of the machine."""
    (file,) = directory.rglob("metrics.csv")
    with file.open() as lines:
        return [{k: shown(k, v) for k, v in row.items()} for row in csv.DictReader(lines)]


def shown(name: str, value: str) -> str:
    if re.search("Stats|time|per_sec", name) or not value:
        return "some" if value else ""
    return f"{float(value):.8f}"


def files(run: L.Trainer, module: Any, callback: Any, directory: Path) -> Any:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def kept(run: L.Trainer, module: Any, writer: Writer, _: Any) -> Any:
    return repr(writer.kept)


def best(run: L.Trainer, module: Any, checkpoint: Any, directory: Path) -> Any:
    score = f"{float(checkpoint.best_model_score):.8f}"
    return Path(checkpoint.best_model_path).name, score, files(run, module, checkpoint, directory)


@dataclass
class Case:
    """A callback and what to look at.

    Attributes:
        callback: Makes it.
        module: What is trained.
        options: Of the Trainer.
        runs: Which of its methods are called.
        sees: What must be equal beyond events, losses, logged values and weights; on rank 0.
        everywhere: Whether it must be equal on all ranks.
    """

    callback: Callable[[Path], Callback]
    module: type[Steps] = Steps
    options: Options | Callable[[Path], Options] | None = None
    runs: tuple[str, ...] = ("fit",)
    sees: Callable[..., Any] = lambda *_: None
    everywhere: bool = False


def to_csv(directory: Path) -> Options:
    return {"logger": CSVLogger(directory)}


CASES: dict[str, Case] = {
    "EarlyStopping, validation": Case(
        lambda _: callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.05),
        options={"max_epochs": 8},
        sees=lambda run, module, stopping, _: stopping.stopped_epoch,
        everywhere=True,
    ),
    "EarlyStopping, training": Case(
        lambda _: callbacks.EarlyStopping("train_loss_epoch", patience=0, min_delta=0.05),
        options={"max_epochs": 8},
        sees=lambda run, module, stopping, _: stopping.stopped_epoch,
        everywhere=True,
    ),
    "EarlyStopping, check_finite": Case(
        lambda _: callbacks.EarlyStopping("checked_epoch", check_finite=True),
        NotANumber,
        {"max_epochs": 4},
        sees=lambda run, module, stopping, _: stopping.stopped_epoch,
        everywhere=True,
    ),
    "EarlyStopping, stopping_threshold": Case(
        lambda _: callbacks.EarlyStopping("val_loss", stopping_threshold=1.0),
        options={"max_epochs": 8},
        sees=lambda run, module, stopping, _: stopping.stopped_epoch,
        everywhere=True,
    ),
    "ModelCheckpoint": Case(
        lambda directory: callbacks.ModelCheckpoint(
            directory, "{step}-{train_loss_step:.6f}", "train_loss_step", save_top_k=2,
            every_n_train_steps=2, save_last=True,
        ),
        sees=best,
    ),
    "Checkpoint": Case(lambda _: callbacks.Checkpoint()),
    "LearningRateMonitor": Case(
        lambda _: callbacks.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
        Scheduled,
        to_csv,
        sees=rows,
    ),
    "DeviceStatsMonitor": Case(
        lambda _: callbacks.DeviceStatsMonitor(cpu_stats=True), options=to_csv, sees=rows
    ),
    "ThroughputMonitor": Case(
        lambda _: callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=4),
        options=to_csv,
        sees=rows,
    ),
    "GradientAccumulationScheduler": Case(
        lambda _: callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
        options={"max_epochs": 3},
    ),
    "Timer, by epochs": Case(
        lambda _: callbacks.Timer(timedelta(0), interval="epoch"), options={"max_epochs": 4}
    ),
    "Timer": Case(lambda _: callbacks.Timer(timedelta(0)), options={"max_epochs": 4}),
    "LambdaCallback": Case(
        lambda _: callbacks.LambdaCallback(
            on_before_optimizer_step=lambda trainer, module, optimizer: optimizer.param_groups[
                0
            ].update(lr=0.01 / (1 + trainer.global_step))
        )
    ),
    "BaseFinetuning": Case(lambda _: Finetuning(), Backbone, {"max_epochs": 3}),
    "BackboneFinetuning": Case(
        lambda _: callbacks.BackboneFinetuning(1, lambda epoch: 1.5, 0.5),
        Backbone,
        {"max_epochs": 4},
    ),
    "BasePredictionWriter, batch": Case(
        lambda _: Writer("batch"), runs=("predict",), sees=kept, everywhere=True
    ),
    "BasePredictionWriter, epoch": Case(
        lambda _: Writer("epoch"), runs=("predict",), sees=kept, everywhere=True
    ),
    "ProgressBar": Case(
        lambda _: OwnBar(),
        Shown,
        options={"enable_progress_bar": None},
        sees=lambda run, module, bar, _: bar.shown,
        everywhere=True,
    ),
    "TQDMProgressBar": Case(
        lambda _: TextBar(), Shown, {"enable_progress_bar": None}, sees=text_of
    ),
    "RichProgressBar": Case(
        lambda _: RichText(),
        Shown,
        options={"enable_progress_bar": None},
        sees=lambda run, module, bar, _: (bar.drawn, "5/5" in bar.text.getvalue()),
    ),
    "StochasticWeightAveraging": Case(
        lambda _: callbacks.StochasticWeightAveraging(0.01, 1), options={"max_epochs": 4}
    ),
    "WeightAveraging": Case(lambda _: callbacks.WeightAveraging()),
    "EMAWeightAveraging": Case(lambda _: callbacks.EMAWeightAveraging(decay=0.9)),
    "LearningRateFinder": Case(
        lambda _: callbacks.LearningRateFinder(num_training_steps=30),
        Tuned,
        lambda directory: {"default_root_dir": directory},
        sees=lambda run, module, finder, _: (module.lr, finder.optimal_lr.results["lr"]),
        everywhere=True,
    ),
    "OnExceptionCheckpoint": Case(
        lambda directory: callbacks.OnExceptionCheckpoint(directory), sees=files
    ),
    "SpikeDetection": Case(
        lambda directory: callbacks.SpikeDetection(exclude_batches_path=directory)
    ),
}  # fmt: skip


def run_case(pipeline: Options | None, name: str, directory: Path) -> dict[str, Any]:
    """Do what a case says; return what came out."""
    case = CASES[name]
    L.seed_everything(7, verbose=False)
    options = case.options(directory) if callable(case.options) else case.options or {}
    spy, module, callback = Spy(), case.module(), case.callback(directory)
    run = make_trainer(
        pipeline, callbacks=[callback, spy], **{"enable_checkpointing": None, **options}
    )
    results = [getattr(run, what)(module) for what in case.runs]
    seen = case.sees(run, module, callback, directory)
    seen = seen if case.everywhere or run.global_rank == 0 else None
    return {**outcome(run, module, spy), "results": results, "seen": seen}


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_it_does_on_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    expected = run_case(None, name, tmp_path / "one")

    for rank, actual in enumerate(ranks.run(2, run_case, {}, name, tmp_path / "two")):
        seen = expected["seen"] if rank == 0 or CASES[name].everywhere else None
        assert_same(actual, {**expected, "seen": seen}, rank)


# --------------------------------------------------------------------------------------- summaries


def summarize(pipeline: Options | None, rich: bool) -> str:
    """The text that a summary prints."""
    kind = callbacks.RichModelSummary if rich else callbacks.ModelSummary
    run = make_trainer(pipeline, callbacks=[kind(max_depth=-1)], max_steps=1)
    lines: list[str] = []
    log = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    level, handler = log.level, logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    printed = io.StringIO()
    reconfigure(file=printed, width=120)
    try:
        run.fit(Steps())
    finally:
        reconfigure()
        log.removeHandler(handler)
        log.setLevel(level)
    return printed.getvalue() if rich else "\n".join(lines)


@pytest.mark.parametrize("rich", [False, True])
def test_the_summary_is_of_the_whole_model(ranks: Ranks, rich: bool) -> None:
    """On rank 0."""
    expected = summarize(None, rich)
    assert "model.2.0" in expected
    assert "110" in expected  # parameters of a layer

    first, second = ranks.run(2, summarize, {}, rich)

    assert first == expected
    assert "model.2.0" not in second


# ---------------------------------------------------------------------------------- what ends a run


def spike(pipeline: Options | None, directory: Path, jump: float) -> str:
    Spikes.jump = jump
    detection = callbacks.SpikeDetection(warmup=2, exclude_batches_path=directory)
    try:
        make_trainer(pipeline, callbacks=[detection]).fit(Spikes())
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"


@pytest.mark.parametrize("jump", [1e3, math.nan])
def test_a_spike_ends_all_ranks(ranks: Ranks, tmp_path: Path, jump: float) -> None:
    expected = spike(None, tmp_path / "one", jump)
    assert expected == "TrainingSpikeException: Training spike detected in batch 3"

    assert ranks.run(2, spike, {}, tmp_path / "two", jump) == [expected] * 2
    files = [tmp_path / name / "skip_batches.json" for name in ("one", "two")]
    assert files[0].read_text() == files[1].read_text()


class Ends(Callback):
    """Lets rank 1 fail, or receive SIGTERM, in the third batch; keeps what it is told."""

    def __init__(self, signalled: bool) -> None:
        self._signalled = signalled
        self.told = ""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            if not self._signalled:
                raise RuntimeError("this rank is done")
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.told = type(exception).__name__


def end(pipeline: Options | None, directory: Path, signalled: bool) -> tuple[str, list[str]]:
    """What the callback was told, and the warnings."""
    ends = Ends(signalled)
    saving = callbacks.OnExceptionCheckpoint(directory)
    run = make_trainer(pipeline, callbacks=[saving, ends], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(BaseException):
            run.fit(Steps())
    return ends.told, [str(w.message) for w in caught if "not written" in str(w.message)]


def test_on_exception_checkpoint_after_a_failure(ranks: Ranks, tmp_path: Path) -> None:
    """A whole file would need the layers of the rank that failed."""
    (first, warned), (second, _) = ranks.run(2, end, {}, tmp_path, False)

    assert (first, second) == ("PeerLostError", "RuntimeError")
    assert "a rank of the pipeline has failed" in warned[0]
    assert not list(tmp_path.iterdir())


def test_on_exception_checkpoint_after_sigterm(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(2, end, {}, tmp_path, True)

    assert results == [("SIGTERMException", [])] * 2
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert 3 <= saved["global_step"] <= 5
    Steps().load_state_dict(saved["state_dict"])


def resume_timer(directory: Path) -> tuple[float, float, float]:
    """Elapsed when saved; where the resumed timer begins; where it ends."""
    for epochs, ckpt_path in (1, None), (2, directory / "saved.ckpt"):
        timer = callbacks.Timer(timedelta(days=1))
        saving = callbacks.ModelCheckpoint(directory, "saved", enable_version_counter=False)
        run = make_trainer(
            {}, callbacks=[timer, saving], enable_checkpointing=True, max_epochs=epochs
        )
        run.fit(Steps(), ckpt_path=ckpt_path, weights_only=False)
        if ckpt_path is None:
            states = torch.load(directory / "saved.ckpt", weights_only=False)["callbacks"]
            elapsed = states["Timer"]["time_elapsed"]["train"]
    return elapsed, timer._offset, timer.time_elapsed()


def test_a_timer_goes_on_after_resuming(ranks: Ranks, tmp_path: Path) -> None:
    for elapsed, begins, ends in ranks.run(2, resume_timer, tmp_path):
        assert 0 < elapsed == begins < ends


# ---------------------------------------------------------------------------------------- the table

REFUSED: dict[str, tuple[Callable[[], Callback], str]] = {
    "BatchSizeFinder": (callbacks.BatchSizeFinder, "runs out.*Choose the batch size yourself"),
    "ModelPruning": (
        lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5),
        "those of its own stages.*without a pipeline",
    ),
}


def say(name: str) -> str:
    try:
        make_trainer({}, callbacks=[REFUSED[name][0]()]).fit(Steps())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(ranks: Ranks, name: str) -> None:
    for message in ranks.run(2, say, name):
        assert re.match(f"(?s)MisconfigurationException: {name} .*{REFUSED[name][1]}", message)


def test_every_callback_of_lightning_is_tried() -> None:
    """One that a new version brings needs a case."""
    tried = {name.split(",")[0] for name in CASES} | REFUSED.keys()
    with_tests = {"ModelSummary", "RichModelSummary", "Callback"}  # the last one in test_hooks.py
    assert set(callbacks.__all__) == tried | with_tests
