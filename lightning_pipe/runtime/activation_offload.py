"""Activations in flight wait for their backward in host memory (the P_a+cpu of ZeRO-R).

What autograd saves in a stage's forward - with activation checkpointing what is kept for the second
run - leaves for host memory, and is back on the device when the backward reads it. The program says
when: the copy back starts one forward or backward early, so that it runs beside that one, and where
the backward follows its forward at once, nothing leaves. On the device lies then, at most, what two
micro-batches keep, not as many as are in flight.

What leaves is a *block*: the bytes from a tensor's first element to its last, or, where there are
gaps between its elements (a slice of columns), its whole storage. All that autograd saves of a
block, transposes and slices too, shares one copy, and comes back with its strides.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipe.runtime.host_copies import HostCopies
from lightning_pipe.runtime.saved_tensors import (
    Saved,
    Staying,
    Wrapper,
    changed_in_place,
    is_wrapper,
    parts_of,
    storage_name,
    unpack,
)
from lightning_pipe.schedule.instructions import Backward, BackwardInput, BackwardWeight, Compute

Key = tuple[int, int]
"""A stage and a micro-batch."""

MIN_BYTES = 1 << 16
"""Of a storage that leaves: a copy of less costs more time than its memory is worth."""

_LEAVING = 4
"""Blocks of a running forward that may be on their way at a time. Computation waits for the oldest
before there are more, or a forward could not free any memory before it ends: the host tells the
device everything long before the device has done it."""


class ActivationOffload:
    """Moves what the forwards of one rank save to host memory, and back.

    Args:
        copies: Between the device and its host.
        min_bytes: Storages with fewer stay.

    Attributes:
        host_bytes: Now in host memory.
        peak_host_bytes: Most at a time.
    """

    def __init__(self, copies: HostCopies, min_bytes: int = MIN_BYTES) -> None:
        self._copies, self._min_bytes = copies, min_bytes
        self._saving: Key | None = None  # whose forward is next, if what it saves shall leave
        self._away: dict[Key, list[weakref.ref[_Block]]] = {}  # autograd holds the blocks
        self._leaving: deque[_Departure] = deque()
        self._met: dict[tuple[StorageWeakRef, int, int, int], _Block] = {}  # in this forward
        self._weights: set[StorageWeakRef] = set()  # of its layers
        self.host_bytes = self.peak_host_bytes = 0

    def look_ahead(self, now: Compute, following: Compute | None) -> None:
        """Prepare for the next two computations of a rank.

        Args:
            now: Runs as soon as this returns.
            following: Runs after it; ``None`` if that is not known yet.
        """
        self._let_leave(0)
        reads = [_key(step) for step in (now, following) if _is_backward(step)]
        for key, references in list(self._away.items()):
            blocks = [block for reference in references if (block := reference()) is not None]
            if not blocks:
                del self._away[key]
            elif key not in reads:
                for block in blocks:
                    block.device = None
        for key in reads:
            for reference in reversed(self._away.get(key, ())):  # as backward will read them
                block = reference()
                if block is not None and block.device is None:
                    self._bring(block)
        # A first part of a backward may follow at once, too, but the second is long in coming.
        at_once = isinstance(following, Backward) and _key(following) == _key(now)
        self._saving = None if at_once or _is_backward(now) else _key(now)

    def saving(self, layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Inside, the forward that was announced runs these layers."""
        if self._saving is None:
            return nullcontext()
        return self._saved_away(self._saving, layers)

    @contextmanager
    def _saved_away(self, key: Key, layers: Iterable[nn.Module]) -> Iterator[None]:
        self._away[key] = []
        self._weights = {
            storage_name(part)
            for layer in layers
            for tensor in (*layer.parameters(), *layer.buffers())
            for part in parts_of(tensor)
        }
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._met, self._weights, self._saving = {}, set(), None

    def _pack(self, tensor: Tensor) -> Saved:
        """Take what autograd wants to save."""
        if is_wrapper(tensor):
            return Wrapper(tensor, self._pack)
        if not self._leaves(tensor):
            return Staying(tensor)
        first, end = _extent(tensor)
        name = storage_name(tensor), first, end, tensor._version
        block = self._met.get(name)
        if block is None:
            block = self._met[name] = self._send(tensor, first, end)
        return _Away(
            self, block, tensor, int(tensor.storage_offset()) - first // tensor.element_size()
        )

    def _leaves(self, tensor: Tensor) -> bool:
        """Whether a tensor is to leave: a large activation on the device."""
        return (
            tensor.device.type == self._copies.device_type
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())  # their bytes are not their values
            and tensor.numel() > 0
            and tensor.untyped_storage().nbytes() >= self._min_bytes
            and storage_name(tensor) not in self._weights
        )

    def _send(self, tensor: Tensor, first: int, end: int) -> _Block:
        with torch.no_grad():
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            source.set_(tensor.untyped_storage(), first, (end - first,), (1,))
            host, left = self._copies.to_host(source)
        block = _Block(host, left, self)
        assert self._saving is not None
        self._away[self._saving].append(weakref.ref(block))
        self._leaving.append(_Departure(block, tensor, tensor._version))
        self._let_leave(_LEAVING)
        return block

    def _let_leave(self, most: int) -> None:
        """Free the device's memory of what leaves, until no more than ``most`` are on their way."""
        while len(self._leaving) > most:
            departure = self._leaving.popleft()
            self._copies.wait(departure.block.left)
            # The copy may have seen some of it. Without a copy it would be as much of an error.
            departure.block.spoiled = departure.tensor._version != departure.version

    def _bring(self, block: _Block) -> Tensor:
        block.device, block.came = self._copies.to_device(block.host, block.left)
        return block.device

    def read(self, block: _Block) -> Tensor:
        """The bytes of a block, on the device."""
        if block.spoiled:
            raise changed_in_place("a tensor")
        device = block.device
        if device is None:  # nobody has foreseen it
            device = self._bring(block)
        self._copies.wait(block.came)
        return device


class _Block:
    """Bytes in host memory, for as long as autograd holds something that was saved of them."""

    def __init__(self, host: Tensor, left: Any, owner: ActivationOffload) -> None:
        self.host, self.left = host, left  # the ticket of the copy there
        self.device: Tensor | None = None
        self.came: Any = None  # the ticket of the copy back
        self.spoiled = False
        self._owner = owner
        owner.host_bytes += host.nbytes
        owner.peak_host_bytes = max(owner.peak_host_bytes, owner.host_bytes)

    def __del__(self) -> None:
        self._owner.host_bytes -= self.host.nbytes


@dataclass
class _Departure:
    """A block on its way to the host, and what must not be freed before it has arrived."""

    block: _Block
    tensor: Tensor
    version: int


class _Away(Saved):
    """A view of a block."""

    def __init__(
        self, offload: ActivationOffload, block: _Block, tensor: Tensor, offset: int
    ) -> None:
        self._offload, self._block = offload, block
        self._dtype, self._offset = tensor.dtype, offset
        self._shape, self._stride = tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """See :class:`Saved`."""
        block = self._offload.read(self._block)
        with torch.no_grad():
            view = torch.empty(0, dtype=self._dtype, device=block.device)
            return view.set_(block.untyped_storage(), self._offset, self._shape, self._stride)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that leave for a tensor: its own, or all if there are gaps."""
    span = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        span += (length - 1) * stride
    if span > tensor.numel():
        return 0, int(tensor.untyped_storage().nbytes())
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + span * tensor.element_size()


def _is_backward(step: Compute | None) -> bool:
    return isinstance(step, Backward | BackwardInput | BackwardWeight)


def _key(step: Any) -> Key:
    return step.stage, step.microbatch
