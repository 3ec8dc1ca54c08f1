"""What a stage's activations in flight take on a device, with and without offload.

On CUDA torch says how much memory was allocated; elsewhere only the gradients are to be had.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.runtime.activation_offload import ActivationOffload
from lightning_pipe.runtime.host_copies import HostCopies
from lightning_pipe.runtime.stage import Checkpointing, Stage
from lightning_pipe.schedule.instructions import Backward, Forward


class Run(NamedTuple):
    """What forwards of all micro-batches, then their backwards, came to."""

    peak_bytes: int  # on the device, above what was there before; 0 elsewhere than on CUDA
    host_bytes: int  # most in host memory
    seconds: float
    gradients: list[Tensor]


def f_then_b(
    device: torch.device,
    copies: HostCopies | None,
    checkpointing: Checkpointing = "none",
    count: int = 8,
    width: int = 1024,
    rows: int = 4096,
    depth: int = 4,
) -> Run:
    """Run one stage as GPipe does: all forwards, then all backwards.

    Args:
        device: Where.
        copies: To host memory; without, nothing is offloaded.
        checkpointing: See :class:`Stage`.
        count: Micro-batches.
        width: Of each layer.
        rows: Of each micro-batch.
        depth: Layers.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()).to(device) for _ in range(depth)]
    inputs = torch.randn(rows, width).to(device)
    offload = None if copies is None else ActivationOffload(copies)
    stage = Stage(0, 2, layers, checkpointing=checkpointing, offload=offload)
    order: list[Any] = [Forward(0, i) for i in range(count)] + [
        Backward(0, i) for i in range(count)
    ]
    outputs: dict[int, Tensor] = {}
    clock = _Clock(device)
    for step, following in zip(order, [*order[1:], None], strict=True):
        if offload is not None:
            offload.look_ahead(step, following)
        if isinstance(step, Forward):
            entering = inputs * (1 + step.microbatch)  # memory of its own
            outputs[step.microbatch] = stage.forward((entering,), {}, 0, step.microbatch).mean()
            del entering
        else:
            outputs.pop(step.microbatch).backward()
    peak, seconds = clock.read()
    gradients = [p.grad.cpu() for layer in layers for p in layer.parameters()]
    return Run(peak, offload.peak_host_bytes if offload else 0, seconds, gradients)


class _Clock:
    """Of a device: its memory and its time."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if not self._is_cuda:
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def read(self) -> tuple[int, float]:
        if not self._is_cuda:
            return 0, 0.0
        self._end.record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self._before
        return peak, self._start.elapsed_time(self._end) / 1000
