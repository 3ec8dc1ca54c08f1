"""What travels between stages: trees of tensors, described by a spec that both ends know.

An activation is whatever a layer returns: a tensor, or tuples, lists, dicts and registered
dataclasses of tensors, None, numbers, strings. Its tensors travel as they are. Structure, shapes
and dtypes are its :class:`Spec`, agreed on once (see ``mailbox.py``); other leaves than tensors
travel with every activation that has some.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

_ANCHOR = torch.empty((), requires_grad=True)  # makes autograd record an entrance; never changes
_TRAVELLING_LEAVES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class Spec:
    """The structure of a tree, and each leaf: a tensor, None, or something else."""

    structure: pytree.TreeSpec
    leaves: tuple[TensorSpec | str | None, ...]

    @cached_property
    def tensors(self) -> list[TensorSpec]:
        """The tensors among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @cached_property
    def requires_grad(self) -> bool:
        """Whether a gradient comes back for any of the tensors."""
        return any(tensor.requires_grad for tensor in self.tensors)

    @cached_property
    def floating_bytes(self) -> int:
        """Bytes of the tensors for which gradients could come back."""
        floating = [t for t in self.tensors if t.dtype.is_floating_point or t.dtype.is_complex]
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in floating)

    @cached_property
    def has_constants(self) -> bool:
        """Whether leaves other than tensors and None travel along."""
        return any(isinstance(leaf, str) for leaf in self.leaves)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a tree of the same structure: torch's own type may differ between versions."""
        skeleton = pytree.tree_unflatten([0] * len(self.leaves), self.structure)
        return _spec_like, (skeleton, self.leaves)

    def __str__(self) -> str:
        shown = [
            f"{leaf.dtype}{list(leaf.shape)}{' with gradient' if leaf.requires_grad else ''}"
            if isinstance(leaf, TensorSpec)
            else str(leaf)
            for leaf in self.leaves
        ]
        return ", ".join(shown) or "nothing"


def _spec_like(skeleton: Any, leaves: tuple[TensorSpec | str | None, ...]) -> Spec:
    return Spec(pytree.tree_structure(skeleton), leaves)


def flatten(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    leaves: list[Any] = pytree.tree_leaves(tree, is_leaf=_is_size)
    return leaves


def disassemble(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of a tree, and its spec.

    Raises:
        MisconfigurationException: A leaf cannot be sent to another stage.
    """
    leaves, structure = pytree.tree_flatten(tree, is_leaf=_is_size)
    return leaves, Spec(structure, tuple(map(_describe, leaves)))


def assemble(tensors: list[Tensor | None], constants: list[Any], spec: Spec) -> Any:
    """The tree, from its tensors and the leaves that are not tensors."""
    next_tensor, next_constant = iter(tensors), iter(constants)
    leaves = [
        next(next_tensor)
        if isinstance(leaf, TensorSpec)
        else None
        if leaf is None
        else next(next_constant)
        for leaf in spec.leaves
    ]
    return pytree.tree_unflatten(leaves, spec.structure)


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.Size)  # to torch a tuple, and comes out as one


def _describe(leaf: Any) -> TensorSpec | str | None:
    if isinstance(leaf, DTensor):
        raise MisconfigurationException(
            f"A stage returned a DTensor with placements {leaf.placements} on {leaf.device_mesh}, "
            "but stages exchange plain tensors: what each tensor-parallel rank has. Let the layer "
            "return one: `output_layouts=Replicate()` and `use_local_output=True` in the style "
            "that parallelises its last module, or `.full_tensor()` or `.to_local()`."
        )
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_meta:
            where = "on the meta device" if leaf.is_meta else f"of layout {leaf.layout}"
            raise MisconfigurationException(
                f"A stage returned a tensor {where}, which cannot be sent to the next stage. "
                "Return dense tensors (`.to_dense()`), or cut the model at another layer."
            )
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if leaf is None:
        return None
    if isinstance(leaf, _TRAVELLING_LEAVES):
        return type(leaf).__name__
    raise MisconfigurationException(
        f"A stage returned an object of type {type(leaf).__module__}.{type(leaf).__qualname__}, "
        "which cannot be sent to the next stage. Return tensors, None, numbers or strings in "
        "tuples, lists, dicts or named tuples (a dataclass: register it with "
        "`torch.utils._pytree.register_dataclass`), or cut the model at another layer."
    )


class Entrance:
    """Where an activation enters a stage, and where the gradient for it comes out.

    The tensors that a stage starts from have no history here, but are no leaves either, so that
    a layer may work on them in place as it may on one device.
    """

    __slots__ = ("gradients", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(tensors)

    def is_at(self, node: Node) -> bool:
        """Whether a node of a graph is the one through which gradients come out here."""
        return getattr(node, "entrance", None) is self

    def enter(self) -> list[Tensor]:
        """The tensors, which require gradients now; :attr:`gradients` is filled by backward."""
        entered: tuple[Tensor, ...] = _Enter.apply(_ANCHOR, self)  # type: ignore[no-untyped-call]
        return list(entered)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entrance: Entrance) -> tuple[Tensor, ...]:
        ctx.entrance = entrance
        ctx.set_materialize_grads(False)
        tensors, entrance.tensors = entrance.tensors, []
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.entrance.gradients = gradients
        return None, None
