"""Gradient clipping by the norm over all stages."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


def clip_over_pipeline(
    precision: Precision,
    all_reduce: Callable[[Tensor], None],
    rank: int,
    shared: Collection[int],
    device: torch.device,
) -> Callable[[Optimizer, float], None]:
    """A ``clip_grad_by_norm`` for a precision plugin, over the gradients of all stages.

    Args:
        precision: The plugin.
        all_reduce: Sums a tensor over the pipeline, in place.
        rank: Of the pipeline; rank 0 counts the shared parameters.
        shared: ids of the parameters that all ranks hold, with equal gradients.
        device: Of the gradients.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for p in precision.main_params(optimizer) if p.grad is not None]
        counted = [p for p in parameters if rank == 0 or id(p) not in shared]
        own = get_total_norm([p.grad for p in counted if p.grad is not None]).to(device)
        square = own.double() ** 2
        all_reduce(square)
        clip_grads_with_norm_(parameters, clip_val, square.sqrt())

    return clip_grad_by_norm
