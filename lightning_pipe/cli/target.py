"""What a user names on the command line: a module with its data, by Python name or by config file.

- ``package.module:Name`` or ``path/to/file.py:Name``: a LightningModule class, a function that
  returns a module or a pair (module, data), or a module;
- ``conf/train.yaml``: a Hydra configuration with ``_target_``, or one of LightningCLI with
  ``class_path``, whose keys are model, data, trainer and, with Hydra, strategy.

Words such as ``model.width=64`` change the arguments of whatever is built, for all of them alike.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml  # type: ignore[import-untyped]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_pipe.cli.configuration import read_configuration
from lightning_pipe.cli.python_path import look_in

_KEYS = ("model", "data", "strategy", "trainer")
_FORMS = (
    "expected package.module:Name, path/to/file.py:Name, or the YAML file of a Hydra or "
    "LightningCLI configuration"
)


@dataclass(frozen=True)
class Target:
    """What is to be trained.

    Attributes:
        module: The user's, just built.
        data: A datamodule, a dataloader, or None where the module has its own or none is named.
        strategy_options: Arguments of PipelineStrategy that were given.
        trainer_options: Arguments of Trainer that were given, but for the strategy.
    """

    module: LightningModule
    data: Any = None
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    trainer_options: Mapping[str, Any] = field(default_factory=dict)


def load_target(target: str, overrides: Sequence[str] = (), data: str | None = None) -> Target:
    """Build what a user names.

    Args:
        target: As above.
        overrides: Words ``key=value`` that change it; keys begin with model, data, strategy or
            trainer. For a Hydra configuration whatever Hydra takes.
        data: Where the data is, if `target` is a Python name that has none: the Python name of a
            LightningDataModule class, of a function that returns one or a dataloader, or of one
            of these.

    Raises:
        MisconfigurationException: There is no such thing, or it is none of these.
    """
    if target.endswith((".yaml", ".yml")):
        if data is not None:
            raise MisconfigurationException(
                f"--data={data} with the configuration {target}, which names its data itself: "
                "change the key `data` there, or by a word such as data.batch_size=8."
            )
        module, loaded, strategy, trainer = read_configuration(Path(target), overrides)
        return Target(
            _checked(module, f"`model` of {target}"), _checked_data(loaded), strategy, trainer
        )
    options = _options(overrides)
    module = _built(target, options["model"], "model")
    if isinstance(module, tuple) and len(module) == 2:
        if data is not None:
            raise MisconfigurationException(
                f"--data={data} with {target}, which has returned data as well: give one of them."
            )
        module, loaded = module
        _refuse_unused(options["data"], "data", f"{target} has made the data itself")
    elif data is not None:
        loaded = _built(data, options["data"], "data")
    else:
        loaded = None
        _refuse_unused(options["data"], "data", "no data is named: give --data")
    return Target(
        _checked(module, target), _checked_data(loaded), options["strategy"], options["trainer"]
    )


def _checked(module: Any, target: str) -> LightningModule:
    if isinstance(module, LightningModule):
        return module
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    raise MisconfigurationException(
        f"{target} gives a {kind}; expected a lightning.pytorch.LightningModule, its class, or a "
        "function that returns one or a pair (module, data)."
    )


def _checked_data(data: Any) -> Any:
    if data is None or isinstance(data, LightningDataModule) or hasattr(data, "__iter__"):
        return data
    raise MisconfigurationException(
        f"The data are a {type(data).__qualname__}; expected a LightningDataModule or a dataloader."
    )


def _options(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sort words ``model.width=64`` by their first part."""
    options: dict[str, dict[str, Any]] = {key: {} for key in _KEYS}
    for word in overrides:
        key, equals, value = word.partition("=")
        group, dot, name = key.partition(".")
        if not equals or not dot or group not in options or not name.isidentifier():
            raise MisconfigurationException(
                f"{word!r} is not understood: expected key=value, with a key such as "
                "model.width, data.batch_size, strategy.schedule or trainer.precision."
            )
        try:
            options[group][name] = _value(value)
        except yaml.YAMLError as error:
            raise MisconfigurationException(f"{word!r}: the value is no YAML: {error}") from error
    return options


def _value(text: str) -> Any:
    """Read a value as Hydra would: YAML, in which 1e-3 is a number too."""
    value = yaml.safe_load(text)
    if isinstance(value, str) and any(map(str.isdigit, value)):
        with suppress(ValueError):
            return float(value)
    return value


def _built(target: str, keywords: Mapping[str, Any], group: str) -> Any:
    """Find what a name means, and call it if it is a class or a function."""
    found = _find(target)
    if not inspect.isclass(found) and not inspect.isroutine(found):
        _refuse_unused(keywords, group, f"{target} is built already")
        return found
    signature = inspect.signature(found)
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise MisconfigurationException(
            f"{target} cannot be called with {dict(keywords)}: {error}. It takes "
            f"{', '.join(signature.parameters) or 'nothing'}; give {group}.name=value."
        ) from error
    return found(**keywords)


def _refuse_unused(keywords: Mapping[str, Any], group: str, reason: str) -> None:
    if keywords:
        words = ", ".join(f"{group}.{name}" for name in keywords)
        raise MisconfigurationException(f"{words} changes nothing: {reason}.")


def _find(target: str) -> Any:
    """Import what ``module:Name`` names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise MisconfigurationException(f"{target!r} is not understood: {_FORMS}.")
    module = _from_path(Path(place)) if place.endswith(".py") else _by_name(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, vars(found), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise MisconfigurationException(f"{place} has no {name!r}.{hint}")
        found = getattr(found, part)
    return found


def _by_name(name: str) -> ModuleType:
    look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, but something that it imports is not
        raise MisconfigurationException(
            f"There is no Python module {error.name!r} in {Path.cwd()} nor where Python looks "
            f"(PYTHONPATH); {_FORMS}."
        ) from error


def _from_path(path: Path) -> ModuleType:
    """Import a file, as the module that it would be for the scripts next to it."""
    path = path.resolve()
    if not path.is_file():
        raise MisconfigurationException(f"There is no file {path}.")
    look_in(path.parent)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None:
        name = f"{name}_of_the_command_line"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
