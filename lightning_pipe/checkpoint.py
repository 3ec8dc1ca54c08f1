"""One ordinary checkpoint from many ranks, and each rank's part of one.

A rank holds the layers that it does not own on the meta device, under their usual names. So a
rank's checkpoint has everything in its place, with meta tensors for what others own, and the whole
one is the union.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.partition import is_absent, present

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
        optimizer["state"] = dict(sorted(optimizer["state"].items()))


def own_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The part of a whole optimizer state that belongs to parameters that this rank owns."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    owned = {i for i, p in zip(indices, parameters, strict=False) if not p.is_meta}
    return {**state, "state": {i: s for i, s in state["state"].items() if i in owned}}


def collect_layers(layers: Mapping[str, nn.Module]) -> None:
    """Give rank 0 the weights of all layers, in place. Collective.

    Args:
        layers: All layers by name; a rank sends those that are not absent on it.
    """
    mine = None
    if dist.get_rank() != 0:
        mine = {n: _tensors(layer) for n, layer in layers.items() if not is_absent(layer)}
    memo: dict[int, Tensor] = {}
    for given in _gather(mine):
        for name, tensors in given.items():
            if is_absent(layers[name]):
                present(layers[name], "cpu", memo)
                _fill(layers[name], tensors)


def fetch_layers(layers: Mapping[str, nn.Module], owned: Sequence[str]) -> None:
    """Give each rank, from rank 0, the layers that it owns but that are absent on it. Collective.

    They are after a run with another partition, or with fewer stages.
    """
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, [name for name in owned if is_absent(layers[name])])
    for rank, names in enumerate(wanted):
        if not names or rank == 0:
            continue
        if dist.get_rank() == 0:
            dist.send_object_list([{name: _tensors(layers[name]) for name in names}], dst=rank)
        elif dist.get_rank() == rank:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=0)
            memo: dict[int, Tensor] = {}
            for name, tensors in received[0].items():
                present(layers[name], "cpu", memo)
                _fill(layers[name], tensors)


def _gather(mine: Any) -> Iterator[Any]:
    """On rank 0, what each other rank gave, one at a time; elsewhere give ``mine``."""
    if dist.get_rank() != 0:
        dist.send_object_list([mine], dst=0)
        return
    for rank in range(1, dist.get_world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank)
        yield received[0]


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, also those that no state dict holds."""
    named = [
        *layer.named_parameters(remove_duplicate=False),
        *layer.named_buffers(remove_duplicate=False),
    ]
    return {name: tensor.detach().cpu() for name, tensor in named}


def _fill(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, mine in [
            *layer.named_parameters(remove_duplicate=False),
            *layer.named_buffers(remove_duplicate=False),
        ]:
            if mine.dtype != tensors[name].dtype:
                mine.data = mine.data.to(tensors[name].dtype)
            mine.copy_(tensors[name])


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


def _set(checkpoint: Any, path: Path, tensor: Tensor) -> None:
    *parents, last = path
    for key in parents:
        checkpoint = checkpoint[key]
    checkpoint[last] = tensor


def _optimizer_states(checkpoint: Mapping[str, Any]) -> list[dict[int, Any]]:
    return [optimizer["state"] for optimizer in checkpoint.get("optimizer_states", [])]
