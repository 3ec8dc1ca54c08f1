"""What is different where a deferred tensor is a DTensor: this rank has a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate

from lightning_pipe.partition.operators import filled_tensors


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: all, or its part of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dtensor_like(tensor: Tensor, local: Tensor) -> Tensor:
    """The tensor itself, or a DTensor like another one."""
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def draws_part(function: OpOverload, args: Sequence[Any]) -> bool:
    """Tell whether random numbers are to fill this rank's part of a tensor."""
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    return is_random and isinstance(args[0], DTensor) and bool(filled_tensors(function, args[:1]))


def draw_whole(
    function: OpOverload, tensor: DTensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Fill this rank's part with what one device would draw there; else all parts were equal."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    function(whole, *args, **kwargs)
    mesh, copies = tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim
    drawn = DTensor.from_local(whole, mesh, copies, run_check=False)
    tensor._local_tensor.copy_(drawn.redistribute(placements=tensor.placements)._local_tensor)
    return tensor
