"""Configurations of Hydra and of LightningCLI: build what they name, but no Trainer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipe import PipelineStrategy
from lightning_pipe.cli.python_path import find_packages, look_in

_KEYS = ("model", "data", "strategy", "trainer")

Parts = tuple[Any, Any, dict[str, Any], dict[str, Any]]
"""Module, data or None, options of PipelineStrategy, options of Trainer without the strategy."""


def read_configuration(path: Path, overrides: Sequence[str]) -> Parts:
    """Build what a configuration names, but no Trainer.

    Args:
        path: YAML file, of Hydra (``_target_``) or of LightningCLI (``class_path``).
        overrides: Words ``key=value``, as Hydra or LightningCLI takes them.

    Raises:
        MisconfigurationException: It is neither, or does not go together.
    """
    if not path.is_file():
        raise MisconfigurationException(f"There is no file {path}.")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise MisconfigurationException(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise MisconfigurationException(f"{path} has no keys; expected {', '.join(_KEYS)}.")
    path = path.resolve()
    for directory in (path.parent.parent, path.parent, Path.cwd()):
        look_in(directory)
    if "defaults" in content or any(_values_of("_target_", content)):
        return _from_hydra(path, overrides)
    if any(_values_of("class_path", content)):
        return _from_lightning_cli(path, content, overrides)
    raise MisconfigurationException(
        f"{path} names no class: its keys are {', '.join(map(str, content))}; expected a `model` "
        "with `_target_` (Hydra) or `class_path` (LightningCLI)."
    )


def _from_hydra(path: Path, overrides: Sequence[str]) -> Parts:
    """Compose a configuration as ``hydra.main`` does."""
    from hydra.errors import HydraException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _composed(path, overrides) as config:
            if config.get("model") is None:
                given = ", ".join(str(key) for key in config if key != "hydra")
                raise MisconfigurationException(
                    f"{path} has no `model`, only {given}; expected model, data, trainer and "
                    "strategy, each with its `_target_`."
                )
            targets = _values_of("_target_", OmegaConf.to_container(config))
            find_packages(map(str, targets), path.parent.parent)
            data, trainer = config.get("data"), config.get("trainer") or {}
            return (
                instantiate(config.model),
                None if data is None else instantiate(data),
                _chosen(trainer.get("strategy") or config.get("strategy")),
                _built_options(trainer),
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise MisconfigurationException(f"{path}: {error}") from error


def _chosen(strategy: Any) -> dict[str, Any]:
    """Give the options of PipelineStrategy, from Hydra's part of a configuration."""
    if strategy is None or isinstance(strategy, str):
        return _registered(strategy or "")
    return _built_options(strategy) if _is_pipeline(strategy.get("_target_")) else {}


def _built_options(part: Any) -> dict[str, Any]:
    """Build the arguments of something that Hydra would build."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    options = {}
    for key in part:
        if not key.startswith("_") and key != "strategy":
            value = part[key]
            is_more = OmegaConf.is_config(value)
            options[key] = instantiate(value, _convert_="all") if is_more else value
    return options


def _values_of(name: str, content: Any) -> Iterator[Any]:
    """Give all values under a key, at any depth."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key == name:
                yield value
            yield from _values_of(name, value)
    elif isinstance(content, list):
        for value in content:
            yield from _values_of(name, value)


@contextmanager
def _composed(path: Path, overrides: Sequence[str]) -> Iterator[Any]:
    """Give the configuration; inside, ``${hydra:...}`` means what it means in a run."""
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict, read_write

    singleton: Any = HydraConfig.instance()
    before = singleton.cfg
    with initialize_config_dir(str(path.parent), version_base=None):
        config = compose(path.stem, list(overrides), return_hydra_config=True)
    try:
        with read_write(config), open_dict(config):
            config.hydra.runtime.cwd = str(Path.cwd())
            config.hydra.job.name = path.stem
            singleton.cfg = config
            config.hydra.runtime.output_dir = str(Path(config.hydra.run.dir).absolute())
            yield config
    finally:
        singleton.cfg = before


def _is_pipeline(name: Any) -> bool:
    """Tell whether a dotted name is that of PipelineStrategy."""
    return str(name) in (
        f"{PipelineStrategy.__module__}.{PipelineStrategy.__qualname__}",
        "lightning_pipe.PipelineStrategy",
    )


def _from_lightning_cli(path: Path, content: dict[str, Any], overrides: Sequence[str]) -> Parts:
    """Let LightningCLI read its configuration, and build all but the Trainer."""
    from lightning.pytorch.cli import LightningCLI

    class OnlyModel(LightningCLI):
        def instantiate_trainer(self, **_: Any) -> Any:
            """Leave it to the caller."""

    for word in overrides:
        if "=" not in word:
            raise MisconfigurationException(f"{word!r} is not understood: expected key=value.")
    if "fit" in content:
        raise MisconfigurationException(
            f"{path} has settings of subcommands (`fit:`): give a file with those of one of them, "
            f"as `python your_script.py fit --config {path} --print_config` writes it."
        )
    paths = map(str, _values_of("class_path", content))  # Lightning's own go without a module
    find_packages([name for name in paths if "." in name], path.parent.parent)
    args = [f"--config={path}", *(f"--{word}" for word in overrides)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*args parameter is intended")  # sys.argv is ours
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            cli = OnlyModel(
                subclass_mode_model=True,
                subclass_mode_data=True,
                run=False,
                args=args,
                seed_everything_default=False,
                save_config_callback=None,
                parser_kwargs={"exit_on_error": False},
            )
        except ArgumentError as error:
            raise MisconfigurationException(f"{path}: {error}") from error
    given, built = cli.config.trainer, cli.config_init.trainer
    options = _unusual(built.as_dict(), cli.trainer_class)
    options.pop("strategy", None)
    if str(options.get("devices", "")).isdigit():
        options["devices"] = int(options["devices"])  # words are strings where these are allowed
    return cli.model, cli.datamodule, _strategy_options(given.strategy), options


def _strategy_options(strategy: Any) -> dict[str, Any]:
    """Give the options of PipelineStrategy, named by its class or by one of its short names."""
    if isinstance(strategy, str):
        return _registered(strategy)
    if not _is_pipeline(getattr(strategy, "class_path", None)):
        return {}
    return _unusual(strategy.init_args.as_dict(), PipelineStrategy)


def _registered(name: str) -> dict[str, Any]:
    """Give the options that a short name such as ``pipe_gpipe`` stands for."""
    strategy = StrategyRegistry.get(name) if name.startswith("pipe_") else None
    if not isinstance(strategy, PipelineStrategy):
        return {}
    return _unusual(vars(strategy._settings), PipelineStrategy)


def _unusual(options: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Leave out what is the default."""
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    return {name: value for name, value in options.items() if value != defaults.get(name)}
