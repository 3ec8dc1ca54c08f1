"""Bytes that go from a device to host memory and come back, while the device computes."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

_ON_CPU = "LIGHTNING_PIPE_CPU_OFFLOAD"  # variable of the environment: copy there too, for a trial


class HostCopies(Protocol):
    """Copies between the memory of a device and that of its host.

    A copy is only *begun* by a call, which gives a ticket with what will hold the copy.

    Attributes:
        device_type: Of the device, ``"cuda"`` for one.
    """

    device_type: str

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy bytes to the host.

        Args:
            source: One-dimensional, contiguous; stays as it is until the ticket was waited for.
        """
        ...

    def to_device(self, host: Tensor, after: Any) -> tuple[Tensor, Any]:
        """Begin to copy bytes back, once those have arrived whose ticket is ``after``."""
        ...

    def wait(self, ticket: Any) -> None:
        """Let what the device is told to compute from now on come after a copy."""
        ...


class CudaCopies:
    """Copies through pinned memory, on a stream for each direction: the host never waits.

    Both directions run at once, and beside computation: a GPU has an engine for each.

    Args:
        device: The GPU.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._coming = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, source: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """See :class:`HostCopies`. Torch keeps pinned memory that is freed for the next copy."""
        self._leaving.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._leaving):
            host.copy_(source, non_blocking=True)
            return host, self._leaving.record_event()

    def to_device(self, host: Tensor, after: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """See :class:`HostCopies`.

        The memory is the computing stream's, which may still use it for what was freed: the copy
        comes after what was told so far. If it is freed without a wait, the copy may be running.
        """
        target = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._coming.wait_stream(torch.cuda.current_stream(self._device))
        self._coming.wait_event(after)
        target.record_stream(self._coming)
        with torch.cuda.stream(self._coming):
            target.copy_(host, non_blocking=True)
            return target, self._coming.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        """See :class:`HostCopies`."""
        torch.cuda.current_stream(self._device).wait_event(ticket)


class PlainCopies:
    """Copies within the memory of the host, at once: what is measured and tested without a GPU."""

    device_type = "cpu"

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        """See :class:`HostCopies`."""
        return source.clone(), None

    def to_device(self, host: Tensor, after: Any) -> tuple[Tensor, Any]:
        """See :class:`HostCopies`."""
        return host.clone(), None

    def wait(self, ticket: Any) -> None:
        """See :class:`HostCopies`."""


def host_copies(device: torch.device) -> HostCopies:
    """The copies for a device.

    Raises:
        MisconfigurationException: Its memory is the host's.
    """
    if device.type == "cuda":
        return CudaCopies(device)
    if device.type == "cpu" and os.environ.get(_ON_CPU, "") not in ("", "0"):
        return PlainCopies()
    raise MisconfigurationException(
        f"PipelineStrategy(activation_offload=True) was given on device {str(device)!r}, whose "
        "tensors are in host memory already: there is nothing to be saved. Leave it out, or use "
        f"accelerator='cuda'. (To try it without a GPU, set {_ON_CPU}=1: it copies, for nothing.)"
    )
