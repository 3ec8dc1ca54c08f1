"""What a user names on the command line: Python names, and both kinds of configuration."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml  # type: ignore[import-untyped]
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pipe.cli.target import Target, load_target

ROOT = Path(__file__).parents[2]
PROJECT = """
import lightning as L
from torch import nn

class Model(L.LightningModule):
    def __init__(self, width: int = 4, rate: float = 0.1):
        super().__init__()
        self.width, self.rate = width, rate
        self.net = nn.Sequential(nn.Linear(width, width))

class Data(L.LightningDataModule):
    def __init__(self, size: int = 2):
        super().__init__()
        self.size = size

def pair(width=8):
    return Model(width), Data()

def batches(size=3):
    return [size] * 2

ready = Model(16)
number = 3

class Inside:
    Model = Model

def broken():
    return nn.Linear(1, 1)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user's with one module, of another name in each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{tmp_path.name}.py").write_text(PROJECT)
    return tmp_path


def load(project: Path, name: str, *words: str, data: str | None = None) -> Target:
    file = f"{project / project.name}.py"
    return load_target(f"{file}:{name}", words, data and f"{file}:{data}")


# ------------------------------------------------------------------------------------ Python names


@pytest.mark.parametrize(
    ("name", "words", "width"),
    [
        ("Model", [], 4),
        ("Model", ["model.width=6"], 6),
        ("pair", [], 8),
        ("pair", ["model.width=6"], 6),
        ("ready", [], 16),
        ("Inside.Model", [], 4),
    ],
)
def test_classes_functions_and_modules(
    project: Path, name: str, words: list[str], width: int
) -> None:
    target = load(project, name, *words)
    assert target.module.width == width
    assert isinstance(target.data, L.LightningDataModule) == (name == "pair")


def test_words_of_all_groups(project: Path) -> None:
    words = ["model.rate=3e-3", "data.size=5", "strategy.partition=[1,2]", "trainer.precision=bf16"]
    target = load(project, "Model", *words, data="Data")
    assert target.module.rate == 3e-3
    assert target.data.size == 5
    assert target.strategy_options == {"partition": [1, 2]}
    assert target.trainer_options == {"precision": "bf16"}


def test_data_from_a_function(project: Path) -> None:
    assert load(project, "Model", "data.size=7", data="batches").data == [7, 7]


def test_a_module_by_its_name(project: Path) -> None:
    """It is found in the working directory, and is the same as by its path."""
    target = load_target(f"{project.name}:Model")
    assert type(target.module) is type(load(project, "Model").module)
    assert type(target.module).__module__ == project.name


def test_files_of_the_same_name(project: Path) -> None:
    other = project / "other" / f"{project.name}.py"
    other.parent.mkdir()
    other.write_text(PROJECT.replace("width: int = 4", "width: int = 5"))
    assert load(project, "Model").module.width == 4
    assert load_target(f"{other}:Model").module.width == 5


@pytest.mark.parametrize(
    ("name", "words", "data", "says"),
    [
        ("Modle", [], None, "has no 'Modle'. Did you mean 'Model'?"),
        ("number", [], None, "gives a builtins.int; expected a lightning.pytorch.LightningModule"),
        ("broken", [], None, "gives a torch.nn.modules.linear.Linear; expected"),
        ("Model", ["model.widht=3"], None, "'widht'. It takes width, rate; give model.name=value"),
        ("Model", ["width=3"], None, "'width=3' is not understood: expected key=value"),
        ("Model", ["model.width"], None, "'model.width' is not understood"),
        ("Model", ["model.width=[3"], None, "is no YAML"),
        ("Model", ["data.size=3"], None, "data.size changes nothing: no data is named"),
        ("pair", ["data.size=3"], None, "data.size changes nothing"),
        ("pair", [], "Data", "has returned data as well"),
        ("ready", ["model.width=3"], None, "model.width changes nothing"),
        ("Model", [], "number", "The data are a int; expected a LightningDataModule"),
    ],
)
def test_errors(project: Path, name: str, words: list[str], data: str | None, says: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        load(project, name, *words, data=data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_module:Model", "There is no Python module 'no_such_module'"),
        ("nowhere.py:Model", "There is no file"),
        ("nowhere.yaml", "There is no file"),
        ("json", "'json' is not understood: expected package.module:Name"),
        ("json:", "'json:' is not understood"),
    ],
)
def test_what_is_not_there(project: Path, target: str, says: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        load_target(target)
    assert says in str(caught.value)


def test_an_error_of_the_users_module_is_his(project: Path) -> None:
    (project / "bad.py").write_text("import no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_target("bad.py:Model")


# ------------------------------------------------------------------------------------------- Hydra


def test_the_configuration_of_the_examples(project: Path) -> None:
    """Words reach what refers to them; nothing is left behind, neither files nor Hydra's state."""
    words = ["model.width=16", "model.context=32", "strategy=gpipe", "strategy.num_microbatches=2"]
    target = load_target(str(ROOT / "conf" / "train.yaml"), words)
    assert target.module.hparams == {"context": 32, "width": 16, "depth": 4, "heads": 4}
    assert target.data.context == 32
    assert target.strategy_options["schedule"] == "gpipe"
    assert target.strategy_options["num_microbatches"] == 2
    assert target.strategy_options["timeout"] == timedelta(minutes=30)
    assert target.trainer_options["gradient_clip_val"] == 1.0
    assert "strategy" not in target.trainer_options
    assert target.trainer_options["default_root_dir"].startswith(str(project / "outputs"))
    assert not (project / "outputs").exists()
    assert HydraConfig.instance().cfg is None
    assert not GlobalHydra.instance().is_initialized()


def hydra_file(project: Path, **keys: Any) -> str:
    """A configuration in the project's ``conf``, the module in its ``src``."""
    for name in ("conf", "src"):
        (project / name).mkdir()
    (project / f"{project.name}.py").rename(project / "src" / f"{project.name}.py")
    path = project / "conf" / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"_target_": f"{project.name}.Model"}, **keys}))
    return str(path)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("pipe_interleaved", {"schedule": "interleaved", "stages_per_rank": 2}),
        ("auto", {}),
        (
            {"_target_": "lightning_pipe.PipelineStrategy", "schedule": "naive"},
            {"schedule": "naive"},
        ),
        ({"_target_": "lightning.pytorch.strategies.DDPStrategy"}, {}),
    ],
)
def test_strategies_within_the_trainer(project: Path, strategy: Any, options: Any) -> None:
    """The module is found in a directory next to that of the configuration."""
    path = hydra_file(project, trainer={"strategy": strategy, "max_epochs": 3})
    target = load_target(path, ["+model.width=2"])
    assert target.module.width == 2
    assert target.data is None
    assert target.strategy_options == options
    assert target.trainer_options == {"max_epochs": 3}


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model=null", "has no `model`"),
        ("model.widht=3", "widht"),
        ("+model.widht=3", "widht"),
        ("model._target_=lightning.Trainer", "gives a lightning.pytorch.trainer.trainer.Trainer"),
        ("model._target_=no_such_module.Model", "there are none there"),
    ],
)
def test_errors_of_hydra(project: Path, word: str, says: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        load_target(hydra_file(project), [word])
    assert says in str(caught.value)


def test_a_module_that_is_in_two_places(project: Path) -> None:
    path = hydra_file(project)
    (project / "lib").mkdir()
    (project / "lib" / f"{project.name}.py").write_text(PROJECT)
    with pytest.raises(MisconfigurationException, match="there are several in .*PYTHONPATH"):
        load_target(path)


def test_a_configuration_names_its_data_itself(project: Path) -> None:
    with pytest.raises(MisconfigurationException, match="which names its data itself"):
        load_target(hydra_file(project), data="json:loads")


# ------------------------------------------------------------------------------------ LightningCLI


def cli_file(project: Path, **trainer: Any) -> str:
    config = {
        "seed_everything": 1,
        "trainer": trainer,
        "model": {"class_path": f"{project.name}.Model", "init_args": {"width": 6}},
        "data": {"class_path": f"{project.name}.Data"},
    }
    path = project / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_a_configuration_of_lightning(project: Path) -> None:
    strategy = {
        "class_path": "lightning_pipe.PipelineStrategy",
        "init_args": {"schedule": "gpipe", "num_microbatches": 4, "timeout": "0:05:00"},
    }
    path = cli_file(project, devices=2, precision="64-true", strategy=strategy)
    words = [
        "model.rate=0.5",
        "data.size=9",
        "trainer.devices=4",
        "trainer.strategy.partition=time",
    ]
    target = load_target(path, words)
    assert target.module.width == 6
    assert target.module.rate == 0.5
    assert target.data.size == 9
    assert target.strategy_options == {
        "schedule": "gpipe",
        "num_microbatches": 4,
        "timeout": timedelta(minutes=5),
        "partition": "time",
    }
    assert target.trainer_options == {"devices": 4, "precision": "64-true"}


@pytest.mark.parametrize(
    ("strategy", "options"), [("pipe_gpipe", {"schedule": "gpipe"}), ("ddp", {})]
)
def test_short_names_of_strategies(project: Path, strategy: str, options: Any) -> None:
    assert load_target(cli_file(project, strategy=strategy)).strategy_options == options


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model.widht=3", "'widht' is not accepted"),
        ("model.width", "'model.width' is not understood"),
        ("modell.width=3", "modell"),
    ],
)
def test_errors_of_lightning(project: Path, word: str, says: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        load_target(cli_file(project), [word])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {width: 3}", "names no class: its keys are model; expected a `model`"),
        ("3", "has no keys"),
        ("a: [", "is no YAML"),
        ("fit: {model: {class_path: a.B}}", "settings of subcommands"),
    ],
)
def test_other_files(project: Path, text: str, says: str) -> None:
    (project / "other.yaml").write_text(text)
    with pytest.raises(MisconfigurationException) as caught:
        load_target("other.yaml")
    assert says in str(caught.value)
