"""What autograd can hold in the place of a tensor that it saves for a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Saved:
    """Stands for a tensor."""

    def tensor(self) -> Tensor:
        """What it saved."""
        raise NotImplementedError


class Staying(Saved):
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        """See :class:`Saved`.

        Raises:
            RuntimeError: It has changed since.
        """
        if self._tensor._version != self._version:
            raise changed_in_place(f"a tensor of shape {tuple(self._tensor.shape)}")
        return self._tensor


class Wrapper(Saved):
    """A tensor made of tensors, as ``DTensor`` is."""

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Saved]) -> None:
        names, self._context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        self._inner = {
            # Torch 2.13 names others than tensors, too: a mesh of devices.
            name: pack(part) if isinstance(part, Tensor) else part
            for name, part in inner.items()
        }
        self._type, self._shape, self._stride = type(tensor), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """See :class:`Saved`."""
        inner = {
            name: part.tensor() if isinstance(part, Saved) else part
            for name, part in self._inner.items()
        }
        whole: Tensor = self._type.__tensor_unflatten__(
            inner, self._context, self._shape, self._stride
        )
        return whole


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is made of tensors that can be saved one by one."""
    return is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided


def unpack(saved: Saved) -> Tensor:
    """Give autograd what it saved."""
    return saved.tensor()


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The tensors that a tensor is made of; mostly itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif isinstance(tensor, Tensor) and tensor.layout is torch.strided:
        yield tensor


def storage_name(tensor: Tensor) -> StorageWeakRef:
    """Names a storage; no later one is taken for it, for as long as the name is kept."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def changed_in_place(what: str) -> RuntimeError:
    """The error of autograd's own check, which hooks switch off."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} was saved for backward and changed afterwards, in its stage's forward "
        "or before the next. Use the operation that is not in place."
    )
