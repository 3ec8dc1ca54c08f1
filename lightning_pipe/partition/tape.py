"""What was to be done to tensors, and doing it later, as far as it is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from lightning_pipe.partition.freed_memory import FreedMemory
from lightning_pipe.partition.operators import is_collective, wait_for

_KEPT_BYTES = 2**24  # of what is freed while tensors are recorded or made


@dataclass(frozen=True)
class View:
    """A deferred tensor: the number of its storage, and how it lies there (in elements)."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    is_conj: bool
    is_neg: bool


@dataclass
class Constant:
    """A tensor with values that an operation has read."""

    tensor: Tensor


@dataclass(frozen=True)
class Operation:
    """What was to be done.

    Attributes:
        function: Of torch.
        arguments: Positional and keyword ones, with a `View` or `Constant` for each tensor.
        outputs: Tensors with storage of their own among the leaves of what it returned, by index.
        reads: Storages whose values it needs.
        writes: Storages that it changes or makes.
        overwrites: Storages of whose old values nothing is left.
        default_dtype: When it was recorded.
        random: The generator that it draws from, and its state before.
    """

    function: OpOverload
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: dict[int, View]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    default_dtype: torch.dtype
    random: tuple[Generator, Tensor] | None


class Tape:
    """Operations on tensors without memory, which are on the meta device, in order.

    Attributes:
        is_running: Whether operations are being done.
        freed: Counts the memory that recording and doing them has freed.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        # By the address of the storage, which is kept alive so that no other gets its address.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        self.is_running = False
        self.freed = FreedMemory(limit=_KEPT_BYTES)

    def add(self, operation: Operation) -> None:
        """Append an operation."""
        self._operations.append(operation)

    def register(self, tensor: Tensor, device: torch.device) -> None:
        """Note that a tensor's storage is going to be on `device`."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage, device

    def is_deferred(self, tensor: Tensor) -> bool:
        """Tell whether the tensor was left without values by what is recorded here."""
        if not tensor.is_meta or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._storages

    def device(self, tensor: Tensor) -> torch.device:
        """Tell where a deferred tensor is going to be."""
        return self._storages[tensor.untyped_storage()._cdata][1]

    def values(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Make deferred tensors as they would be by now.

        Returns:
            As many tensors, which share memory where the deferred ones do. What else it takes to
            make them is freed as soon as nothing needs it any more.
        """
        views = [self.view(tensor) for tensor in tensors]
        storages = self._replay({view.storage for view in views})
        return [self._on(storages, view) for view in views]

    def view(self, tensor: Tensor) -> View:
        """Describe a deferred tensor."""
        return View(
            tensor.untyped_storage()._cdata,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _replay(self, wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        """Do again what the wanted storages depend on, and nothing else.

        Each storage is freed once nothing else needs it.
        """
        last_uses = self._needed(wanted)
        storages: dict[int, torch.UntypedStorage] = {}
        default_dtype, was_running = torch.get_default_dtype(), self.is_running
        self.is_running = True  # this may be called from within the recording
        try:
            with torch.no_grad():
                for operation, done_with in last_uses:
                    self._do(operation, storages)
                    for key in done_with - wanted:
                        self.freed.add(storages.pop(key).nbytes())
                for key in wanted:
                    self._storage(storages, key)
        finally:
            self.is_running = was_running
            torch.set_default_dtype(default_dtype)
        return storages

    def _needed(self, wanted: set[int]) -> list[tuple[Operation, set[int]]]:
        """The operations to be done, with the storages that none after each of them uses."""
        needed, used = set(wanted), set[int]()
        found = []
        for operation in reversed(self._operations):
            if operation.writes & needed:
                made = {view.storage for view in operation.outputs.values()}
                needed = (needed - made - operation.overwrites) | operation.reads
                uses = operation.reads | operation.writes
                found.append((operation, set(uses - used)))
                used |= uses
        return found[::-1]

    def _do(self, operation: Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def given(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return self._on(storages, leaf)
            return leaf.tensor if isinstance(leaf, Constant) else leaf

        args, kwargs = tree_map(given, operation.arguments)
        torch.set_default_dtype(operation.default_dtype)
        if operation.random is None:
            returned = operation.function(*args, **kwargs)
        else:
            generator, state = operation.random
            now = generator.get_state()
            generator.set_state(state)
            try:
                returned = operation.function(*args, **kwargs)
            finally:
                generator.set_state(now)
        if is_collective(operation.function):
            wait_for(returned)
        leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        for index, view in operation.outputs.items():
            if view.storage in storages:  # a second output that shares memory with another one
                continue
            made = leaves[index]
            if made.stride() != view.stride or made.storage_offset() != view.offset:
                storages[view.storage] = self._storage({}, view.storage)
                self._on(storages, view).copy_(made)
            else:
                storages[view.storage] = made.untyped_storage()

    def _storage(self, storages: dict[int, torch.UntypedStorage], key: int) -> torch.UntypedStorage:
        """The storage; a new one where the first operation of the replay will fill it."""
        if key not in storages:
            without_memory, device = self._storages[key]
            size = without_memory.nbytes()
            storages[key] = torch.UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
        return storages[key]

    def _on(self, storages: dict[int, torch.UntypedStorage], view: View) -> Tensor:
        storage = self._storage(storages, view.storage)
        tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
        tensor.set_(storage, view.offset, view.size, view.stride)
        if view.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if view.is_neg else tensor
