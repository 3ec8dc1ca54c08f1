"""Every argument of `Trainer` does in a pipeline what it does on one device.

The run's events, losses, logged values and weights are compared with plain Lightning's.
"""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import CombinedLoader
from steps import Spy, Steps, assert_same, load, outcome
from torch import Tensor, nn
from torch.nn import functional as F
from trainer.lit import WIDTH, Options
from trainer.lit import trainer as make_trainer
from trainer.ranks import Ranks

Seen = Callable[[L.Trainer, Any, Path], Any]
"""Looks at something else that a flag brings about."""


def nothing(*_: Any) -> None:
    pass


@dataclass
class Case:
    """One way to set some arguments.

    Attributes:
        options: Of the Trainer, which may depend on a directory.
        runs: Which of its methods are called.
        module: What is trained.
        sees: Something else that must be equal; on rank 0 alone, as files are.
        pipeline: Arguments of PipelineStrategy beyond the default.
        asynchronous: Whether it also runs with 'pipedream'.
    """

    options: Options | Callable[[Path], Options]
    runs: tuple[str, ...] = ("fit",)
    module: type[Steps] = Steps
    sees: Seen = nothing
    pipeline: Options | None = None
    asynchronous: bool = False


ALL = ("fit", "validate", "test", "predict")


# ------------------------------------------------------------------------------- modules and data


class SeveralLoaders(Steps):
    """Three loaders in validation, two in test and prediction, of unequal length."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    test_step = validation_step

    def val_dataloader(self) -> Any:
        return [load(36, seed=1), load(5, seed=2), load(17, seed=3)]

    def test_dataloader(self) -> Any:
        return [load(5, seed=4), load(36, seed=5)]

    predict_dataloader = test_dataloader


class Combined(Steps):
    """Batches of two loaders at once."""

    mode: Any = "max_size_cycle"

    def train_dataloader(self) -> Any:
        return CombinedLoader({"a": load(40, seed=1), "b": [load(74, seed=2)]}, self.mode)

    def loss(self, batch: Any) -> Tensor:
        if not isinstance(batch, dict):
            return super().loss(batch)
        parts = [part for part in (batch["a"], batch["b"][0]) if part is not None]
        out = self.model(torch.cat([x for x, _ in parts]))
        return F.cross_entropy(out, torch.cat([y for _, y in parts]))


def combined(mode: str) -> type[Steps]:
    return type(f"Combined{mode}", (Combined,), {"mode": mode})


class CombinedEvaluation(Combined):
    """Both loaders at once in validation, too."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    test_dataloader = val_dataloader


class Reloads(Steps):
    """Each loader that is made has other data."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return load(74, seed=self.made)


class Shuffled(Steps):
    def train_dataloader(self) -> Any:
        return load(74, shuffle=True)


class Normalized(Steps):
    """Has a BatchNorm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(3, nn.BatchNorm1d(WIDTH))


class StopsEarly(Steps):
    """Wants to stop in the third batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 3:
            self.trainer.should_stop = True


class NotesModes(Steps):
    """Keeps under which mode of autograd its steps run."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: set[tuple[str, bool]] = set()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.modes.add((self.trainer.state.fn or "", torch.is_grad_enabled()))
        return super().validation_step(batch, batch_idx)

    test_step = validation_step


class Scheduled(Steps):
    """Its learning rate changes with every step, and is logged."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


# -------------------------------------------------------------------------------- what else is seen


def csv_rows(run: L.Trainer, module: Any, directory: Path) -> Any:
    (file,) = directory.rglob("metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return [{name: f"{float(v):.8f}" for name, v in row.items() if v} for row in rows]


def files(run: L.Trainer, module: Any, directory: Path) -> Any:
    """Names without what depends on time and process."""
    names = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted("events" if "tfevents" in name.name else str(name) for name in names)


def profiled(run: L.Trainer, module: Any, directory: Path) -> Any:
    """How often each action was measured, but for those of a strategy's own."""
    profiler: Any = getattr(run, "profiler")  # noqa: B009 (untyped in Trainer)
    profiler.describe()
    actions = getattr(profiler, "recorded_durations", None) or profiler.profiled_actions
    times = {name: len(v) if isinstance(v, list) else 1 for name, v in actions.items()}
    own = ("[Strategy]", "[LightningModule]Steps.optimizer")
    return {name: count for name, count in times.items() if not name.startswith(own)}


def profiled_steps(run: L.Trainer, module: Any, directory: Path) -> Any:
    """Which steps the profiler of PyTorch has seen."""
    steps = "training_step", "validation_step", "optimizer_step"
    names = {event.key for event in run.profiler.function_events}  # type: ignore[attr-defined]
    return [any(step in name for name in names) for step in steps]


def saved(run: L.Trainer, module: Any, directory: Path) -> Any:
    return run.strategy.checkpoint_io.saved  # type: ignore[attr-defined]


class CountingIO(TorchCheckpointIO):
    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


def async_io(directory: Path) -> Options:
    return {
        "plugins": [AsyncCheckpointIO(CountingIO())],
        "enable_checkpointing": True,
        "default_root_dir": directory,
    }


def loggers(directory: Path) -> Options:
    return {"logger": [CSVLogger(directory), TensorBoardLogger(directory, "tensorboard")]}


LIMITS = "train", "val", "test", "predict"
CASES: dict[str, Case] = {
    "fast_dev_run=True": Case({"fast_dev_run": True}, ALL),
    "fast_dev_run=3": Case({"fast_dev_run": 3}, asynchronous=True),
    "overfit_batches=2": Case({"overfit_batches": 2}, module=Shuffled, asynchronous=True),
    "overfit_batches=0.5": Case({"overfit_batches": 0.5}),
    "limits=2": Case({f"limit_{what}_batches": 2 for what in LIMITS}, ALL, asynchronous=True),
    "limits=0.7": Case({f"limit_{what}_batches": 0.7 for what in LIMITS}, ALL),
    "limits=0": Case({"limit_val_batches": 0, "limit_test_batches": 0}, ("fit", "test")),
    "limit_train_batches=0": Case({"limit_train_batches": 0}),
    "val_check_interval=2": Case({"val_check_interval": 2}, asynchronous=True),
    "val_check_interval=0.5": Case({"val_check_interval": 0.5}),
    "val_check_interval=4, across epochs": Case(
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3},
        asynchronous=True,
    ),
    "check_val_every_n_epoch=2": Case(
        {"check_val_every_n_epoch": 2, "max_epochs": 4}, asynchronous=True
    ),
    "num_sanity_val_steps=1": Case({"num_sanity_val_steps": 1}, module=SeveralLoaders),
    "num_sanity_val_steps=-1": Case({"num_sanity_val_steps": -1}, asynchronous=True),
    "max_steps": Case({"max_steps": 7, "max_epochs": -1}, asynchronous=True),
    "max_epochs": Case({"max_epochs": 1}),
    "min_steps": Case({"min_steps": 7, "max_epochs": 3}, module=StopsEarly, asynchronous=True),
    "min_epochs": Case({"min_epochs": 2, "max_epochs": 3}, module=StopsEarly, asynchronous=True),
    "neither min_steps nor min_epochs": Case({"max_epochs": 3}, module=StopsEarly),
    "max_time, over": Case({"max_time": timedelta(0)}, asynchronous=True),
    "max_time, far": Case({"max_time": {"days": 1}}),
    "detect_anomaly": Case({"detect_anomaly": True}, asynchronous=True),
    "inference_mode=False": Case(
        {"inference_mode": False}, ALL, NotesModes, lambda run, module, _: module.modes
    ),
    "inference_mode=True": Case(
        {"inference_mode": True}, ALL, NotesModes, lambda run, module, _: module.modes
    ),
    "reload_dataloaders_every_n_epochs=1": Case(
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
        module=Reloads,
        sees=lambda run, module, _: module.made,
        asynchronous=True,
    ),
    "reload_dataloaders_every_n_epochs=2": Case(
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3},
        module=Reloads,
        sees=lambda run, module, _: module.made,
    ),
    "several loaders": Case({}, ALL, SeveralLoaders, asynchronous=True),
    **{
        f"CombinedLoader, {mode}": Case(
            {}, module=combined(mode), pipeline={"num_microbatches": 1}, asynchronous=True
        )
        for mode in ("min_size", "max_size", "max_size_cycle")
    },
    "CombinedLoader in evaluation": Case(
        {}, ("fit", "test"), CombinedEvaluation, pipeline={"num_microbatches": 1}
    ),
    "profiler='simple'": Case({"profiler": "simple"}, ALL, sees=profiled),
    "profiler='advanced'": Case({"profiler": "advanced"}, sees=profiled),
    "profiler='pytorch'": Case(
        lambda directory: {
            "profiler": PyTorchProfiler(directory, export_to_chrome=False, schedule=None)
        },
        sees=profiled_steps,
    ),
    "barebones": Case({"barebones": True, "log_every_n_steps": None, "num_sanity_val_steps": None}),
    "benchmark": Case({"benchmark": True}),
    "deterministic=True": Case({"deterministic": True}, asynchronous=True),
    "deterministic='warn'": Case({"deterministic": "warn"}),
    "enable_*=True": Case(
        lambda directory: {
            "enable_checkpointing": True,
            "enable_progress_bar": True,
            "enable_model_summary": True,
            "default_root_dir": directory,
        },
        ALL,
        sees=files,
        asynchronous=True,
    ),
    "logger=True": Case(
        lambda directory: {"logger": True, "default_root_dir": directory}, sees=files
    ),
    "log_every_n_steps=3": Case(
        lambda directory: {"logger": CSVLogger(directory), "log_every_n_steps": 3}, sees=csv_rows
    ),
    "several loggers": Case(loggers, ALL, Scheduled, csv_rows),
    "enable_autolog_hparams=False": Case(
        lambda directory: {**loggers(directory), "enable_autolog_hparams": False}, sees=files
    ),
    "enable_autolog_hparams=True": Case(loggers, sees=files),
    "gradient_clip_val": Case({"gradient_clip_val": 0.05}, asynchronous=True),
    "gradient_clip_algorithm='value'": Case(
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, asynchronous=True
    ),
    "accumulate_grad_batches=3": Case({"accumulate_grad_batches": 3}),
    "use_distributed_sampler=True": Case({"use_distributed_sampler": True}, module=Shuffled),
    "use_distributed_sampler=False": Case({"use_distributed_sampler": False}, module=Shuffled),
    "sync_batchnorm": Case(
        {"sync_batchnorm": True}, module=Normalized, pipeline={"num_microbatches": 1}
    ),
    "plugins, a CheckpointIO": Case(
        lambda directory: {
            "plugins": [CountingIO()],
            "enable_checkpointing": True,
            "default_root_dir": directory,
        },
        sees=saved,
    ),
    "plugins, AsyncCheckpointIO": Case(async_io, sees=files),
    "model_registry": Case(lambda d: {"model_registry": "name", "default_root_dir": d}, sees=files),
    "accelerator='auto'": Case({"accelerator": "auto"}),
}


def run_case(pipeline: Options | None, name: str, directory: Path) -> dict[str, Any]:
    """Do what a case says; return what came out."""
    case = CASES[name]
    L.seed_everything(7, verbose=False)
    directory = directory / name.replace(" ", "")
    options = case.options if isinstance(case.options, dict) else case.options(directory)
    spy, module = Spy(), case.module()
    barebones = options.get("barebones", False)
    quiet = {"enable_progress_bar": None, "enable_model_summary": None} if barebones else {}
    where = None if pipeline is None else {**(case.pipeline or {}), **pipeline}
    try:
        run = make_trainer(where, callbacks=[spy], **{**quiet, **options})
        results = [getattr(run, what)(module) for what in case.runs]
    finally:
        torch.use_deterministic_algorithms(False)
    seen = case.sees(run, module, directory) if run.global_rank == 0 else None
    return {**outcome(run, module, spy), "results": results, "seen": seen}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_does_what_one_device_does(ranks: Ranks, tmp_path: Path, name: str) -> None:
    expected = run_case(None, name, tmp_path / "one")

    for rank, actual in enumerate(ranks.run(2, run_case, {}, name, tmp_path / "two")):
        theirs = {**expected, "seen": expected["seen"] if rank == 0 else None}
        assert_same(actual, theirs, rank)


ASYNCHRONOUS = {"schedule": "pipedream"}


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.asynchronous is True]
)
def test_an_asynchronous_schedule_makes_the_same_steps(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """Its losses come later, and are others."""
    expected = run_case(None, name, tmp_path / "one")

    results = ranks.run(2, run_case, ASYNCHRONOUS, name, tmp_path / "two")

    for rank, actual in enumerate(results):
        assert actual["events"] == expected["events"], f"rank {rank}"
        assert actual["metrics"].keys() == expected["metrics"].keys(), f"rank {rank}"
        for metric, value in actual["metrics"].items():
            assert 0 < value < 2, f"rank {rank}, {metric}"


# ---------------------------------------------------------------------------------------- refusals


def say(pipeline: Options | None, options: Options, module: type[Steps] = Steps) -> str:
    """What a rank says to arguments that cannot be."""
    try:
        make_trainer(pipeline, **options).fit(module())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class TrainsSequentially(Combined):
    mode = "sequential"


REFUSED: dict[str, tuple[Options, Options, str]] = {
    "accumulate_grad_batches": (
        ASYNCHRONOUS,
        {"accumulate_grad_batches": 3},
        "accumulate_grad_batches=3 with an asynchronous schedule.*Leave it at 1",
    ),
    "profiler='pytorch'": (
        {},
        {"profiler": "pytorch"},
        r"schedule.*PyTorchProfiler\(schedule=None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(ranks: Ranks, name: str) -> None:
    pipeline, options, says = REFUSED[name]
    for rank, message in enumerate(ranks.run(2, say, pipeline, options)):
        assert re.match(f"(?s)MisconfigurationException: .*{says}", message), f"rank {rank}"


OWN_ERRORS: dict[str, tuple[Options, type[Steps]]] = {
    "CombinedLoader, sequential": ({}, TrainsSequentially),
}


@pytest.mark.parametrize("name", OWN_ERRORS)
def test_lightning_refuses_it_as_on_one_device(ranks: Ranks, name: str) -> None:
    """It is no mode for training."""
    options, module = OWN_ERRORS[name]
    expected = say(None, options, module)
    assert "Error: " in expected
    for message in ranks.run(2, say, {}, options, module):
        assert message.splitlines()[0] == expected.splitlines()[0]


# --------------------------------------------------------------------------------------- precision

PRECISIONS = sorted(
    {str(value) for kind in get_args(_PRECISION_INPUT) for value in get_args(kind)} - {"None"}
)
# How far a loss may be from one device's, in which sums are of another order.
TOLERANCE = {"64": 1e-10, "32": 1e-5, "16": 2e-2, "bf16": 5e-2}


def train_in(pipeline: Options | None, precision: str) -> Any:
    L.seed_everything(7, verbose=False)
    spy, module = Spy(), Scheduled()
    try:
        run = make_trainer(pipeline, precision=precision, callbacks=[spy])
    except ModuleNotFoundError as error:
        return str(error).split()[0]
    run.fit(module)
    return spy.losses, str(module.model[0].weight.dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_precision(ranks: Ranks, precision: str) -> None:
    expected = train_in(None, precision)

    for rank, actual in enumerate(ranks.run(2, train_in, {}, precision)):
        if isinstance(expected, str):
            assert actual == expected
            continue
        assert actual[1] == expected[1]
        tolerance = TOLERANCE[precision.split("-")[0]]
        assert actual[0] == pytest.approx(expected[0], rel=0, abs=tolerance), f"rank {rank}"


# ---------------------------------------------------------------------------------------- the table

ELSEWHERE = "tests/trainer"
ARGUMENTS: dict[str, str] = {
    "accelerator": "accelerator='auto'",
    "strategy": ELSEWHERE,
    "devices": ELSEWHERE,
    "num_nodes": ELSEWHERE,
    "precision": "test_each_precision",
    "logger": "several loggers",
    "callbacks": "test_callbacks",
    "fast_dev_run": "fast_dev_run=3",
    "max_epochs": "max_epochs",
    "min_epochs": "min_epochs",
    "max_steps": "max_steps",
    "min_steps": "min_steps",
    "max_time": "max_time, over",
    "limit_train_batches": "limits=2",
    "limit_val_batches": "limits=2",
    "limit_test_batches": "limits=2",
    "limit_predict_batches": "limits=2",
    "overfit_batches": "overfit_batches=2",
    "val_check_interval": "val_check_interval=2",
    "check_val_every_n_epoch": "check_val_every_n_epoch=2",
    "num_sanity_val_steps": "num_sanity_val_steps=-1",
    "log_every_n_steps": "log_every_n_steps=3",
    "enable_checkpointing": "enable_*=True",
    "enable_progress_bar": "enable_*=True",
    "enable_model_summary": "enable_*=True",
    "accumulate_grad_batches": "accumulate_grad_batches=3",
    "gradient_clip_val": "gradient_clip_val",
    "gradient_clip_algorithm": "gradient_clip_algorithm='value'",
    "deterministic": "deterministic=True",
    "benchmark": "benchmark",
    "inference_mode": "inference_mode=True",
    "use_distributed_sampler": "use_distributed_sampler=True",
    "profiler": "profiler='simple'",
    "detect_anomaly": "detect_anomaly",
    "barebones": "barebones",
    "plugins": "plugins, a CheckpointIO",
    "sync_batchnorm": "sync_batchnorm",
    "reload_dataloaders_every_n_epochs": "reload_dataloaders_every_n_epochs=1",
    "default_root_dir": "enable_*=True",
    "enable_autolog_hparams": "enable_autolog_hparams=True",
    "model_registry": "model_registry",
}


def test_the_table_has_every_argument() -> None:
    """One that a new version of Lightning brings needs a case."""
    assert set(inspect.signature(L.Trainer.__init__).parameters) - {"self"} == ARGUMENTS.keys()
    known = {*CASES, *OWN_ERRORS, ELSEWHERE, "test_callbacks", *globals()}
    assert set(ARGUMENTS.values()) <= known
