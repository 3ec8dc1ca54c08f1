"""PipelineStrategy from a command line and from YAML, by its dotted name or a short one."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_pipe
from lightning_pipe import PipelineStrategy

from .lit import Classifier, Samples, trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse's users
STRATEGY = "--trainer.strategy=lightning_pipe.PipelineStrategy"
OF_THE_TRAINER = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
}
OPTIONS = set(inspect.signature(PipelineStrategy).parameters) - OF_THE_TRAINER


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process of the tests."""
    monkeypatch.setattr("sys.argv", ["app.py"])


def command(*arguments: str) -> LightningCLI:
    """What a user's ``LightningCLI(Model, Data)`` makes of a command line."""
    args = ["--trainer.accelerator=cpu", "--trainer.devices=2", *arguments]
    return LightningCLI(Classifier, Samples, run=False, args=args, seed_everything_default=False)


def printed(*arguments: str) -> str:
    """What a command line prints that only asks."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        LightningCLI(Classifier, Samples, run=False, args=list(arguments))
    assert not ended.value.code
    return output.getvalue()


def test_yaml_and_overrides(tmp_path: Path) -> None:
    """Every kind of option: a number, a choice, a list, a flag, a time."""
    written = {
        "class_path": "lightning_pipe.PipelineStrategy",
        "init_args": {
            "schedule": "gpipe",
            "num_microbatches": 8,
            "partition": [3, 5],
            "activation_checkpointing": "stage",
            "timeout": "0:05:00",
            "start_method": "spawn",
        },
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": written}}))

    strategy = command(
        f"--config={config}",
        "--trainer.strategy.num_microbatches=auto",
        "--trainer.strategy.pipeline_parallel_size=2",
        "--trainer.strategy.deferred_batchnorm=true",
    ).trainer.strategy

    assert isinstance(strategy, PipelineStrategy)
    settings = strategy._settings
    assert (settings.schedule, settings.num_microbatches) == ("gpipe", "auto")
    assert tuple(settings.partition) == (3, 5)
    assert (settings.activation_checkpointing, settings.deferred_batchnorm) == ("stage", True)
    assert (strategy._timeout, strategy._start_method) == (timedelta(minutes=5), "spawn")
    assert strategy._sizes == (2, 1, 1)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("num_microbatches=many", "num_microbatches"),
        ("activation_checkpointing=some", "activation_checkpointing"),
        ("timeout=soon", "timeout"),
        ("find_unused_parameters=true", "find_unused_parameters"),
        ("schedule=ringbolt", "ringbolt"),
    ],
)
def test_what_is_refused(argument: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, Exception)) as refused:
        command(STRATEGY, f"--trainer.strategy.{argument}")
    assert reason in f"{capsys.readouterr().err} {refused.value}"


def test_help_says_what_every_option_does() -> None:
    """With the docstring's words, types and defaults, and nothing that is not an option."""
    text = printed("--trainer.strategy.help=lightning_pipe.PipelineStrategy")

    shown = set(re.findall(r"--trainer\.strategy\.(?:init_args\.)?(\w+)", text)) - {"help"}
    assert shown == OPTIONS | OF_THE_TRAINER
    words = plain(text)
    documented = plain(inspect.getdoc(PipelineStrategy) or "")
    for option in OPTIONS:
        said = documented.split(f" {option}: ")[1][:30]
        assert said in words, option
    assert "{none,stage,layer}" in words
    assert "{popen,fork,spawn}" in words


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def test_print_config_can_be_used_as_it_is(tmp_path: Path) -> None:
    text = printed(STRATEGY, "--trainer.strategy.timeout=0:00:30", "--print_config")

    options = yaml.safe_load(text)["trainer"]["strategy"]["init_args"]
    assert set(options) == OPTIONS | OF_THE_TRAINER
    assert options["timeout"] == "0:00:30"
    config = tmp_path / "config.yaml"
    config.write_text(text)
    strategy = command(f"--config={config}").trainer.strategy
    assert isinstance(strategy, PipelineStrategy)
    assert strategy._timeout == timedelta(seconds=30)


NAMES = {
    "pipe_naive": ("naive", 1),
    "pipe_gpipe": ("gpipe", 1),
    "pipe_1f1b": ("1f1b", 1),
    "pipe_interleaved": ("interleaved", 2),
    "pipe_zero_bubble": ("zero_bubble", 1),
    "pipe_pipedream": ("pipedream", 1),
    "pipe_pipedream_2bw": ("pipedream_2bw", 1),
}


def test_names() -> None:
    """All that there are, for a Trainer and for a command line."""
    assert all(getattr(lightning_pipe, name) for name in lightning_pipe.__all__)
    registered = {n for n in StrategyRegistry.available_strategies() if n.startswith("pipe_")}
    assert registered == set(NAMES)
    for name, (schedule, stages_per_rank) in NAMES.items():
        options: dict[str, Any] = {"strategy": name, "devices": 2}
        for made in (trainer(None, **options), command(f"--trainer.strategy={name}").trainer):
            assert isinstance(made.strategy, PipelineStrategy)
            settings = made.strategy._settings
            assert (settings.schedule, settings.stages_per_rank) == (schedule, stages_per_rank)
