"""Every configuration can be instantiated, and says what the code says."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

from lightning_pipe import PipelineStrategy

CONF = Path(__file__).parents[2] / "conf"
STRATEGIES = sorted(path.stem for path in (CONF / "strategy").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def train_config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("train", ["trainer.default_root_dir=outputs", *overrides])


@pytest.mark.parametrize("name", STRATEGIES)
def test_shipped_strategy(name: str) -> None:
    with initialize_config_module("lightning_pipe.conf", version_base=None):
        config = compose(f"strategy/{name}").strategy
    strategy = instantiate(config)
    assert isinstance(strategy, Strategy)
    assert isinstance(strategy, PipelineStrategy) == (name != "single")


def test_strategy_names_all_options_with_their_defaults() -> None:
    config = instantiate(train_config().strategy, _target_="builtins.dict", _convert_="all")
    parameters = inspect.signature(PipelineStrategy).parameters
    # Options that have a single valid value so far, and what the Trainer sets.
    fixed = {"process_group_backend"}
    fixed |= {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"}
    fixed |= {"precision_plugin"}
    assert config == {name: p.default for name, p in parameters.items() if name not in fixed}


@pytest.mark.parametrize(
    ("overrides", "stashing", "sync"),
    [
        ([], True, False),
        (["strategy.vertical_sync=true"], True, True),
        (["strategy.weight_stashing=false"], False, False),
    ],
)
def test_pipedream_overrides(overrides: list[str], stashing: bool, sync: bool) -> None:
    settings = instantiate(train_config("strategy=pipedream", *overrides).strategy)._settings
    assert settings.schedule == "pipedream"
    assert (settings.weight_stashing, settings.vertical_sync) == (stashing, sync)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["strategy=pipedream", "strategy.weight_stashing=false", "strategy.vertical_sync=true"],
            "vertical_sync=True needs weight_stashing=True",
        ),
        (["strategy=gpipe", "strategy.vertical_sync=true"], "has no effect"),
        (["strategy=pipedream_2bw", "strategy.weight_stashing=false"], "has no effect"),
    ],
)
def test_overrides_that_are_refused(overrides: list[str], reason: str) -> None:
    config = train_config(*overrides)
    with pytest.raises(InstantiationException, match=reason):
        instantiate(config.strategy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # how Lightning uses jsonargparse
def test_pipedream_on_the_command_line_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["app.py", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    arguments += ["--trainer.strategy=lightning_pipe.PipelineStrategy"]
    arguments += ["--trainer.strategy.schedule=pipedream", "--trainer.strategy.vertical_sync=true"]
    monkeypatch.setattr("sys.argv", arguments)
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, PipelineStrategy)
    assert (strategy._settings.schedule, strategy._settings.vertical_sync) == ("pipedream", True)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_short_name(name: str) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=f"pipe_{name}").strategy
    assert isinstance(strategy, PipelineStrategy)
    assert strategy._settings.schedule == name


@pytest.mark.parametrize("name", [path.stem for path in (CONF / "model").glob("*.yaml")])
def test_model(name: str, examples: Path) -> None:
    model = instantiate(train_config(f"model={name}").model)
    assert isinstance(model, LightningModule)
    assert model.configure_optimizers()


@pytest.mark.parametrize("name", [path.stem for path in (CONF / "data").glob("*.yaml")])
def test_data(name: str, examples: Path) -> None:
    data = instantiate(train_config(f"data={name}").data)
    assert isinstance(data, LightningDataModule)


@pytest.mark.parametrize("name", [path.stem for path in (CONF / "trainer").glob("*.yaml")])
def test_trainer(name: str) -> None:
    trainer = instantiate(train_config(f"trainer={name}").trainer)
    assert isinstance(trainer, Trainer)
    assert trainer.num_devices == 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment(name: str, examples: Path) -> None:
    config = train_config(f"experiment={name}")
    assert isinstance(instantiate(config.model), LightningModule)
    assert isinstance(instantiate(config.data), LightningDataModule)
    trainer = instantiate(config.trainer)
    assert type(trainer.strategy).__name__ in config.strategy._target_


def test_every_group_has_a_default() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        choices = compose("train", return_hydra_config=True).hydra.runtime.choices
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert groups == {name for name in choices if "/" not in name}
