"""DTensors in checkpoints: written whole, as plain tensors, and cut again where they are loaded.

So a checkpoint says nothing of how layers were cut, and one device can continue it, or other
numbers of tensor-parallel ranks, or of replicas that divide parameters among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_pipe.checkpoint.tensors import KeyPath, with_tensors


def gathered(tree: Any) -> Any:
    """The tree with whole, plain tensors for its DTensors. Collective over their meshes.

    All ranks of a mesh must have its DTensors in the same order.

    Args:
        tree: With DTensors on the meta device for what is absent.

    Returns:
        The tree; what a DTensor was is on the CPU of the first rank of its mesh, and on the meta
        device on the others, where it would be in memory once more.
    """

    def plain(_: KeyPath, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if not tensor.is_meta:
            with torch.no_grad():
                whole: Tensor = tensor.full_tensor()  # one at a time
            if not any(tensor.device_mesh.get_coordinate() or ()):
                return whole.cpu()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return with_tensors(tree, plain)


def distributed_like(tree: Any, like: Mapping[str, Any]) -> Any:
    """A state dict with plain tensors, cut as the DTensors of another are. No rank waits.

    Args:
        tree: By name. A tensor of another shape is left as it is: who loads it will say so.
        like: By name: tensors, and whatever else there is.
    """

    def cut(path: KeyPath, tensor: Tensor) -> Tensor:
        return cut_like(tensor, like.get(path[0]))

    return with_tensors(tree, cut)


def states_like(state: Mapping[str, Any], parameters: Mapping[Any, Tensor]) -> dict[str, Any]:
    """An optimizer's state, where a tensor of its parameter's shape is cut like that. No waits.

    Args:
        state: As `Optimizer.load_state_dict` takes it.
        parameters: By their keys in the state.
    """

    def cut(path: KeyPath, tensor: Tensor) -> Tensor:
        return cut_like(tensor, parameters.get(path[0]))

    return {**state, "state": with_tensors(state["state"], cut)}


def cut_like(tensor: Tensor, like: Any) -> Tensor:
    """This rank's part of a whole tensor, as a DTensor, if `like` is one of the same shape."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor) or tensor.shape != like.shape:
        return tensor
    if like.is_meta:  # absent
        return like
    mesh = like.device_mesh
    copies = [Replicate()] * mesh.ndim
    everywhere = DTensor.from_local(tensor.detach(), mesh, copies, run_check=False)
    return everywhere.redistribute(placements=like.placements)  # takes a part, and copies that
