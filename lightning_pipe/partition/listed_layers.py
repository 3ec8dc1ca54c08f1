"""Check what a user's `configure_pipeline` returned, and find the module that runs those layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pipe.partition.class_swap import class_name, original_class


def checked_list(root: nn.Module, returned: object) -> tuple[nn.Module, ...]:
    """Return the layers that `root.configure_pipeline()` returned.

    Raises:
        MisconfigurationException: if these are not different submodules of `root`, at least one,
            none inside another.
    """
    given = f"{class_name(root)}.configure_pipeline() returned"
    if not isinstance(returned, Iterable):
        raise MisconfigurationException(
            f"{given} a {type(returned).__name__}; expected a list of modules, e.g. `[self.embed,"
            " *self.blocks]`."
        )
    names = {id(module): name for name, module in root.named_modules()}
    layers: list[nn.Module] = []
    places: dict[int, int] = {}
    for place, entry in enumerate(returned):
        if not isinstance(entry, nn.Module):
            problem = (
                f"a {type(entry).__name__}; return modules only: wrap a function in an nn.Module"
            )
        elif entry is root:
            problem = "the module itself; return its layers"
        elif id(entry) not in names:
            problem = (
                f"a {class_name(entry)} that is not a submodule of {class_name(root)}; assign it"
                " to `self` in `__init__` and return that object, so that it is trained, moved and"
                " saved with the model"
            )
        elif id(entry) in places:
            problem = (
                f"{names[id(entry)]!r}, the same object as entry {places[id(entry)]}; each layer"
                " has one place in the pipeline: create a second module"
            )
        else:
            places[id(entry)] = place
            layers.append(entry)
            continue
        raise MisconfigurationException(f"{given} as entry {place} {problem}.")
    if not layers:
        raise MisconfigurationException(f"{given} no layers; expected at least one per stage.")
    _refuse_nested(given, layers, names)
    return tuple(layers)


def _refuse_nested(given: str, layers: Sequence[nn.Module], names: dict[int, str]) -> None:
    ids = {id(layer) for layer in layers}
    for layer in layers:
        for inner in layer.modules():
            if inner is not layer and id(inner) in ids:
                raise MisconfigurationException(
                    f"{given} {names[id(layer)]!r} and also {names[id(inner)]!r}, which is a part"
                    " of it; return one of the two."
                )


def lowest_container(root: nn.Module, layers: Sequence[nn.Module]) -> tuple[str, nn.Module]:
    """Return the deepest module that can be called and holds all layers, and its name."""
    wanted = {id(layer) for layer in layers}
    lowest = ("", root)
    for name, module in root.named_modules():  # a parent comes before its children
        # An nn.ModuleList cannot be called.
        can_be_called = original_class(module).forward is not nn.Module.forward
        if can_be_called and wanted <= {id(m) for m in module.modules() if m is not module}:
            lowest = (name, module)
    return lowest
