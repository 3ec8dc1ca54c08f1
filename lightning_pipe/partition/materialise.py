"""Give the modules that this rank needs their deferred tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_pipe.partition.absent import exchange, is_absent, own_tensors, twin_with
from lightning_pipe.partition.class_swap import class_name
from lightning_pipe.partition.deferred import DeferredTensors


def materialise(root: nn.Module, deferred: DeferredTensors) -> None:
    """Make the deferred tensors of all modules in `root` but those of absent layers, in place.

    These are parameters, buffers, and tensors in attributes, also in lists, tuples and dicts. They
    stay the same objects where torch can exchange what is in them, and tied ones stay tied.

    Args:
        root: The model, after `shard`.
        deferred: What recorded how it was built.

    Raises:
        MisconfigurationException: If a `ScriptModule`, whose tensors Python cannot replace, is
            among them.
    """
    modules = [module for module in root.modules() if not is_absent(module)]
    old = _deferred_tensors(modules, deferred)  # alive to the end: no id will be another tensor's
    values = deferred.values(old)
    twins = {id(t): twin_with(t, data) for t, data in zip(old, values, strict=True)}
    del values
    memo: dict[int, Tensor] = {}
    for module in root.modules():  # an absent layer may hold one that is tied to one of these
        for name, tensor in list(own_tensors(module)):
            if id(tensor) in twins and deferred.is_deferred(tensor):
                exchange(module, name, tensor, twins[id(tensor)], memo)

    def made(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and deferred.is_deferred(leaf):
            return memo.get(id(leaf), twins.get(id(leaf), leaf))
        return leaf

    for module in modules:
        for attribute, value in _attributes(module).items():
            if any(made(leaf) is not leaf for leaf in tree_leaves(value)):
                vars(module)[attribute] = tree_map(made, value)


def _deferred_tensors(modules: Sequence[nn.Module], deferred: DeferredTensors) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for module in modules:
        tensors = [tensor for tensor in _all_tensors(module) if deferred.is_deferred(tensor)]
        if tensors and isinstance(module, torch.jit.ScriptModule):
            raise MisconfigurationException(
                f"configure_model builds a {class_name(module)} with parameters, which a pipeline "
                "cannot build layer by layer: build the Python module there instead of a scripted "
                "one, or build it in `__init__`."
            )
        found.update((id(tensor), tensor) for tensor in tensors)
    return list(found.values())


def _all_tensors(module: nn.Module) -> list[Tensor]:
    leaves = [leaf for value in _attributes(module).values() for leaf in tree_leaves(value)]
    owned = [tensor for _, tensor in own_tensors(module)]
    return [*owned, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    }
