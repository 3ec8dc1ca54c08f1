"""Layers move from the ranks that have them to those that need them.

They do after a run, where rank 0 gets the whole model back, and before one with another partition.
Ranks that share a layer have parts of its DTensors; a part moves to the rank that needs the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_pipe.partition import is_absent, present
from lightning_pipe.runtime.reduction import local_part

Part = frozenset[tuple[Any, ...]]
"""Which part of a layer: places of a rank in the meshes of DTensors. None, if it has all."""


def held_layers(layers: Mapping[str, nn.Module]) -> list[dict[str, Part]]:
    """Tell which layers each rank has in memory, and which part of each, by rank. Collective."""
    held: list[Any] = [None] * dist.get_world_size()
    mine = {name: _part(layer) for name, layer in layers.items() if _is_held(layer)}
    dist.all_gather_object(held, mine)
    return held


def collect_layers(layers: Mapping[str, nn.Module]) -> None:
    """Give rank 0 all layers, in place. Collective.

    Args:
        layers: All layers by name.
    """
    fetch_layers(layers, list(layers) if dist.get_rank() == 0 else [], held_layers(layers))


def fetch_layers(
    layers: Mapping[str, nn.Module], wanted: Collection[str], held: Sequence[Mapping[str, Part]]
) -> None:
    """Give each rank the layers that it wants but that are absent on it, in place. Collective.

    Each comes from the first rank that has it (the same part of it), one at a time: nothing is in
    memory twice but for one layer's tensor that is on its way.

    Args:
        layers: All layers by name.
        wanted: Names of the layers that this rank wants.
        held: What `held_layers` gave.

    Raises:
        RuntimeError: A layer that is wanted is on no rank, after a run that failed.
    """
    missing: list[Any] = [None] * dist.get_world_size()
    mine = {
        name: (list(_missing(layer)), _part(layer))
        for name, layer in layers.items()
        if name in wanted and is_absent(layer)
    }
    dist.all_gather_object(missing, mine)
    memo: dict[int, Tensor] = {}
    for name, layer in layers.items():
        for rank, tensors in enumerate(missing):
            if name not in tensors:
                continue
            names, part = tensors[name]
            source = next((r for r, parts in enumerate(held) if parts.get(name) == part), None)
            if source is None:
                raise RuntimeError(
                    f"No rank has layer {name!r} any more: a process that had it has failed. Build "
                    "the module again, and load its last checkpoint."
                )
            if dist.get_rank() == source:
                _send(layer, names, rank)
            elif dist.get_rank() == rank:
                present(layer, "cpu", memo)
                _receive(layer, source)


def _is_held(layer: nn.Module) -> bool:
    return not is_absent(layer) and not any(True for _ in _missing(layer))


def _part(layer: nn.Module) -> Part:
    meshes = [t.device_mesh for t in _tensors(layer).values() if isinstance(t, DTensor)]
    return frozenset(
        (mesh.mesh_dim_names, *(mesh.get_coordinate() or ())) for mesh in dict.fromkeys(meshes)
    )


def _missing(layer: nn.Module) -> Iterator[str]:
    return (name for name, tensor in _tensors(layer).items() if tensor.is_meta)


def _send(layer: nn.Module, names: Sequence[str], rank: int) -> None:
    tensors = {name: local_part(tensor) for name, tensor in _tensors(layer).items()}
    header = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    dist.send_object_list([header], dst=rank)
    for name in names:
        if tensors[name].numel():
            dist.send(_as_bytes(tensors[name].detach().cpu().contiguous()), dst=rank)


def _receive(layer: nn.Module, rank: int) -> None:
    received: list[Any] = [None]
    dist.recv_object_list(received, src=rank)
    tensors = _tensors(layer)
    for name, (dtype, shape) in received[0].items():
        given = torch.empty(shape, dtype=dtype)
        if given.numel():
            dist.recv(_as_bytes(given), src=rank)
        mine = tensors[name]
        if mine.is_meta:
            _replace_attribute(layer, name, given)
            continue
        with torch.no_grad():
            if mine.dtype != dtype and not isinstance(mine, DTensor):
                mine.data = mine.data.to(dtype)
            local_part(mine).copy_(given)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as a type that any backend sends."""
    return tensor.view(-1).view(torch.uint8)


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, also those that no state dict holds, and tensors in attributes."""
    named = {
        **dict(layer.named_parameters(remove_duplicate=False)),
        **dict(layer.named_buffers(remove_duplicate=False)),
    }
    known = {id(tensor) for tensor in named.values()}
    for prefix, module in layer.named_modules():
        for attribute, value in vars(module).items():
            for index, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, Tensor) and id(leaf) not in known:
                    named[f"{prefix}:{attribute}:{index}"] = leaf
    return named


def _replace_attribute(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor where `_tensors` has found one of that name in an attribute."""
    prefix, attribute, index = name.split(":")
    module = layer.get_submodule(prefix)
    value = vars(module)[attribute]
    old = tree_leaves(value)[int(index)]
    vars(module)[attribute] = tree_map(lambda leaf: tensor if leaf is old else leaf, value)
