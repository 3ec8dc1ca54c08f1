"""One ordinary checkpoint from many ranks, and each rank's part of one.

A rank holds the layers that it does not own on the meta device, under their usual names. So a
rank's checkpoint has everything in its place, with meta tensors for what others own, and the whole
one is the union.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

Path = tuple[Any, ...]


def consolidate(checkpoint: dict[str, Any]) -> None:
    """Complete rank 0's checkpoint with what the other ranks own. Collective.

    Args:
        checkpoint: This rank's; rank 0's is changed in place: tensors on the meta device are
            replaced wherever they are, optimizer states of other ranks' parameters are added.
    """
    missing: list[Any] = [[path for path, _ in _meta_tensors(checkpoint)]]
    dist.broadcast_object_list(missing, src=0)
    mine = None
    if dist.get_rank() != 0:
        mine = _found(checkpoint, missing[0]), _optimizer_states(checkpoint)
    for tensors, states in _gather(mine):
        for path, tensor in tensors.items():
            _set(checkpoint, path, tensor)
        for optimizer, state in zip(checkpoint.get("optimizer_states", []), states, strict=False):
            for index, values in state.items():
                optimizer["state"].setdefault(index, values)
    for optimizer in checkpoint.get("optimizer_states", []):
        optimizer["state"] = dict(sorted(optimizer["state"].items(), key=_in_order))


def own_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The part of an optimizer's state that belongs to parameters that this rank owns.

    Args:
        state: As the optimizer gives it. Adagrad, for one, has a state for absent parameters too.
        optimizer: Which has all parameters, those of other ranks on the meta device.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    others = {k for k, p in zip(keys, _parameters(optimizer), strict=False) if p.is_meta}
    return {**state, "state": {k: s for k, s in state["state"].items() if k not in others}}


def by_names(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's state by the names of the parameters instead of their numbers.

    torch loads one like the other: it looks at the order of the parameters in the groups.
    """
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    keys = [key for group in state["param_groups"] for key in group["params"]]
    names = {
        key: known.get(id(parameter), f"unnamed.{key}")
        for key, parameter in zip(keys, _parameters(optimizer), strict=False)
    }
    groups = [{**g, "params": [names[key] for key in g["params"]]} for g in state["param_groups"]]
    values = {names.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gather(mine: Any) -> Iterator[Any]:
    """On rank 0, what each other rank gave, one at a time; elsewhere give ``mine``."""
    if dist.get_rank() != 0:
        dist.send_object_list([mine], dst=0)
        return
    for rank in range(1, dist.get_world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank)
        yield received[0]


def _meta_tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(tree, Tensor):
        if tree.is_meta:
            yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _meta_tensors(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _meta_tensors(value, (*path, index))


def _found(checkpoint: Mapping[str, Any], paths: Sequence[Path]) -> dict[Path, Tensor]:
    """What this rank has, of what is missing."""
    found = {}
    for path in paths:
        value: Any = checkpoint
        for key in path:
            value = value[key]
        if not value.is_meta:
            found[path] = value.detach().cpu()
    return found


def _set(tree: Any, path: Path, tensor: Tensor) -> Any:
    """Replace what is at a path, in place but for tuples, and return the tree."""
    if not path:
        return tensor
    key, *rest = path
    value = _set(tree[key], tuple(rest), tensor)
    if not isinstance(tree, tuple):
        tree[key] = value
        return tree
    items = [*tree[:key], value, *tree[key + 1 :]]
    return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)


def _in_order(state: tuple[Any, Any]) -> tuple[bool, Any]:
    """Numbers of parameters come first, then whatever else an optimizer may keep."""
    return not isinstance(state[0], int), state[0]


def _optimizer_states(checkpoint: Mapping[str, Any]) -> list[dict[int, Any]]:
    return [optimizer["state"] for optimizer in checkpoint.get("optimizer_states", [])]
