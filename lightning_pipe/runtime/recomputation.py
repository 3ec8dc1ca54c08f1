"""Activation checkpointing: layers run again in their backward, and nobody notices.

The second run draws the same random numbers, since layers start their streams themselves, and finds
the buffers as the first run found them. What it does to them is dropped: running statistics, as
BatchNorm has them, are those of the first run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_pipe.runtime.activation_partition import ActivationPartition

_Buffers = dict[str, Tensor | None]
"""Of one module, by name."""

_Whole = tuple[torch.Size, bool]
"""Of a tensor that was cut: its shape, and whether it needs a gradient."""


class Recomputation:
    """Keeps, of a run of some layers, what enters them, and runs them again in backward.

    Args:
        layers: The ones that will run.
        around_again: A context for each second run.
        partition: Shares what is kept with other ranks, if there are some that have the same.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        around_again: Callable[[], AbstractContextManager[Any]] = nullcontext,
        partition: ActivationPartition | None = None,
    ) -> None:
        self._partition, self._checked = partition, False
        self._modules = [m for layer in layers for m in layer.modules() if m._buffers]
        self._changing = set(self._modules)  # their buffers; the first run shows which
        self._around_again = around_again

    def run(self, function: Callable[..., Any], shared: tuple[Any, ...], *args: Any) -> Any:
        """Call a function now, and again in its backward instead of keeping what it computes.

        It works on copies, or a layer that begins in place, as ``ReLU(inplace=True)``, would spoil
        what is kept. Precision plugins change torch's default dtype for the step, but not for
        backward: it is kept.

        Args:
            function: Is given ``shared``, then ``args``.
            shared: What others keep anyway, as the batch; it is kept as it is.
            args: Trees. Autograd keeps their tensors, so that its hooks get them; of those that
                are shared with other ranks, this one's part.
        """
        dtype = torch.get_default_dtype()
        before: dict[nn.Module, _Buffers] = {}
        leaves, structure = pytree.tree_flatten(args, is_leaf=_is_size)
        kept, wholes = self._cut(leaves)
        first = [leaves]  # the first run has them whole, with their history
        del leaves

        def again(shared: tuple[Any, ...], *kept: Any) -> Any:
            leaves = first.pop() if first else self._gather(kept, wholes)
            copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            del leaves
            shared = pytree.tree_map_only(Tensor, Tensor.clone, shared)
            outside = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return function(*shared, *pytree.tree_unflatten(copies, structure))
            finally:
                torch.set_default_dtype(outside)

        return checkpoint(
            again,
            shared,
            *kept,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (self._first(before), self._second(before)),
        )

    def _cut(self, leaves: Sequence[Any]) -> tuple[list[Any], list[_Whole | None]]:
        """What is kept of some leaves, and for each that is cut what it is cut from."""
        partition = self._partition
        kept, wholes = list(leaves), list[_Whole | None]([None] * len(leaves))
        if partition is None:
            return kept, wholes
        for index, leaf in enumerate(leaves):
            if partition.takes(leaf):
                if not self._checked:
                    partition.check(leaf)
                kept[index], wholes[index] = partition.cut(leaf), (leaf.shape, leaf.requires_grad)
        self._checked |= any(wholes)  # what layers return does not change its kind
        return kept, wholes

    def _gather(self, kept: Sequence[Any], wholes: Sequence[_Whole | None]) -> list[Any]:
        """The leaves; those that were cut need a gradient as before, for an equal graph."""
        leaves = list(kept)
        for index, whole in enumerate(wholes):
            if whole is not None:
                assert self._partition is not None
                shape, needs_gradient = whole
                leaf = self._partition.gather(kept[index], shape)
                leaves[index] = leaf.requires_grad_(needs_gradient)
        return leaves

    @contextmanager
    def _first(self, before: dict[nn.Module, _Buffers]) -> Iterator[None]:
        """Note the buffers as they are before a run, as copies where runs change them.

        A change of one of a module's stands for all: BatchNorm's kernels do not tell of theirs.
        Where a module changes buffers in place that it has left alone so far, it is too late for
        what is in flight: its second run finds them changed.
        """
        found = {module: (dict(module._buffers), _edits(module)) for module in self._modules}
        for module, (buffers, _) in found.items():
            before[module] = _copies(buffers) if module in self._changing else buffers
        yield
        changed: set[nn.Module] = set()
        for module, (buffers, edits) in found.items():
            same = all(module._buffers.get(name) is buffer for name, buffer in buffers.items())
            if not same or _edits(module) != edits:
                changed.add(module)
        for module in changed - self._changing:
            before[module] = _copies(before[module])
        if len(self._changing) == len(self._modules):
            self._changing = changed
        self._changing |= changed

    @contextmanager
    def _second(self, before: dict[nn.Module, _Buffers]) -> Iterator[None]:
        """Let a run find the buffers as the first one did, and leave them as they are now."""
        now = {module: dict(module._buffers) for module in before}  # other runs may have followed
        for module, buffers in before.items():
            module._buffers.update(_copies(buffers) if module in self._changing else buffers)
        try:
            with self._around_again():
                yield
        finally:
            for module, buffers in now.items():
                module._buffers.update(buffers)


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.Size)  # to torch a tuple, and comes out as one


def _copies(buffers: _Buffers) -> _Buffers:
    return {n: None if tensor is None else tensor.detach().clone() for n, tensor in buffers.items()}


def _edits(module: nn.Module) -> list[int]:
    """How often each buffer was changed in place."""
    buffers = [tensor for tensor in module._buffers.values() if tensor is not None]
    return [0 if tensor.is_inference() else tensor._version for tensor in buffers]
