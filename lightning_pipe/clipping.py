"""Gradient clipping by the norm over all stages, all parts of layers, and all replicas' parts."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_pipe.runtime.groups import Group
from lightning_pipe.runtime.reduction import local_part


def clip_over(
    precision: Precision,
    group: Group,
    copies: Callable[[Tensor], int],
    device: torch.device,
) -> Callable[[Optimizer, float], None]:
    """A ``clip_grad_by_norm`` for a precision plugin, over the gradients of several ranks.

    Each rank counts its part of a gradient once for all ranks that have the same part.

    Args:
        precision: The plugin.
        group: The ranks.
        copies: How many of them have a gradient of a parameter, whole or in parts.
        device: Of the gradients.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        squares = torch.zeros((), dtype=torch.float64, device=device)
        parts = []
        for parameter in precision.main_params(optimizer):
            if parameter.grad is not None:
                gradient = whole_terms(parameter.grad)
                parts.append(local_part(parameter.grad))
                square = torch.linalg.vector_norm(local_part(gradient)).double() ** 2
                squares += square * num_parts(gradient) / copies(parameter)
        group.sum(squares).wait()
        factor = (clip_val / (squares.sqrt() + 1e-6)).clamp(max=1.0)  # as torch does
        with torch.no_grad():
            for part in parts:
                part.mul_(factor.to(part.dtype))

    return clip_grad_by_norm


def num_parts(tensor: Tensor) -> int:
    """Into how many parts a tensor is divided, each on a rank of its own."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return prod(
        mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()  # torch has more than one way to cut
    )


def whole_terms(gradient: Tensor) -> Tensor:
    """A gradient of which no rank has only a summand."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return gradient
    placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=placements)
