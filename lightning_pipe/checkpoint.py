"""One ordinary checkpoint from many ranks, and each rank's part of one.

A rank holds the layers that it does not own on the meta device, under their usual names. So a
rank's checkpoint has everything in its place, with meta tensors for what others own, and the whole
one is the union.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
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
        optimizer["state"] = dict(sorted(optimizer["state"].items()))


def own_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The part of a whole optimizer state that belongs to parameters that this rank owns."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    owned = {i for i, p in zip(indices, parameters, strict=False) if not p.is_meta}
    return {**state, "state": {i: s for i, s in state["state"].items() if i in owned}}


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


def _set(checkpoint: Any, path: Path, tensor: Tensor) -> None:
    *parents, last = path
    for key in parents:
        checkpoint = checkpoint[key]
    checkpoint[last] = tensor


def _optimizer_states(checkpoint: Mapping[str, Any]) -> list[dict[int, Any]]:
    return [optimizer["state"] for optimizer in checkpoint.get("optimizer_states", [])]
