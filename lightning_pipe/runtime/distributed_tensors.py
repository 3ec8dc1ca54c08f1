"""What DTensors need where a stage meets the rest of the step: its output, and the user's loss.

Layers that ranks share by tensor parallelism have DTensors for parameters; what enters and leaves
a stage are plain tensors. A model may only end in a DTensor: scores that each rank has of some
classes, to which the step applies a loss under ``loss_parallel()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lightning_pipe.runtime.payload import flatten


def whole(tensor: Tensor) -> Tensor:
    """The tensor; of a DTensor the values of all ranks together. Collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_parallel_if_it_was(loss: Tensor, output: Any) -> Tensor:
    """Let the backward of a loss run under ``loss_parallel()`` if its forward did.

    torch wants both under the context, but the step that opened it has returned long before.

    Args:
        loss: Of a step.
        output: Of the step's pipelined call.

    Returns:
        The same loss.
    """
    cut = [t for t in flatten(output) if isinstance(t, DTensor) and _is_cut(t)]
    if not cut or loss.grad_fn is None or _handles_losses():
        return loss
    if not _ran_in_parallel(loss.grad_fn, {t.grad_fn for t in cut if t.grad_fn is not None}):
        return loss
    parallel: Tensor = _InParallel.apply(loss)  # type: ignore[no-untyped-call]
    return parallel


class _InParallel(torch.autograd.Function):
    """What its backward begins lasts to the end of the whole backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        until_the_end = ExitStack()
        until_the_end.enter_context(loss_parallel())
        Variable._execution_engine.queue_callback(until_the_end.close)
        return gradient


def _is_cut(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def _handles_losses() -> bool:
    """Whether ``loss_parallel()`` is open around all this, and must stay so."""
    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    return torch.ops.aten.nll_loss_forward.default in handlers


def _ran_in_parallel(root: Node, ends: Iterable[Node]) -> bool:
    """Whether a graph has a loss of classes that are cut: otherwise torch gathers them before."""
    seen, stack = set(ends), [root]
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name().startswith("NllLoss"):
            scores = node._saved_self
            classes = 1 if scores.dim() > 1 else 0
            if isinstance(scores, DTensor) and any(p.is_shard(classes) for p in scores.placements):
                return True
        stack += [child for child, _ in node.next_functions if child is not None]
    return False
