"""Every configuration can be instantiated, and says what the code says."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
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
    fixed = {"weight_stashing", "vertical_sync", "data_parallel_size", "tensor_parallel_size"}
    fixed |= {"process_group_backend", "start_method", "accelerator", "parallel_devices"}
    fixed |= {"cluster_environment", "checkpoint_io", "precision_plugin"}
    assert config == {name: p.default for name, p in parameters.items() if name not in fixed}


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
