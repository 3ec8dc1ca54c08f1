"""A copy of a module that runs without memory, trainer and hooks, as the user wrote it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningDataModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.partition.absent import empty_twin
from lightning_pipe.partition.class_swap import restore_class

_META = torch.device("meta")
# Copying these would cost memory, or fail where one holds a process; a forward only reads them.
_SHARED_TYPES = (Dataset, DataLoader, LightningDataModule)


class MetaCopy:
    """Copies a module without its memory.

    Attributes:
        module: the copy, each module in it with its original class, in the mode (training or not)
            of the original.
        layers: the copies of the layers, in order.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Copy `module`, which contains `layers`; both stay as they are."""
        memo: dict[int, Any] = {}
        for part in module.modules():
            for name, value in vars(part).items():
                memo.update(_replacements(name, value))
        self.module = copy.deepcopy(module, memo)
        self.layers: list[nn.Module] = [memo[id(layer)] for layer in layers]
        for part in self.module.modules():
            restore_class(part)
            if isinstance(part, _DeviceDtypeModuleMixin):
                part._device = _META  # what `self.device` answers in a LightningModule

    def arguments(self, arguments: Any) -> Any:
        """Move tensors to the meta device; one tensor in two places stays one tensor."""
        memo: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            return memo.setdefault(id(tensor), empty_twin(tensor, _META))

        return apply_to_collection(arguments, Tensor, move)


def _replacements(name: str, value: Any) -> Iterator[tuple[int, Any]]:
    """Yield what `deepcopy` shall put in the place of an attribute's value, by id."""
    other = list(left_out(name, value))
    yield from other
    if not other:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield id(leaf), _twin(leaf)


def _twin(tensor: Tensor) -> Tensor:
    """An empty one; of a DTensor a whole one, as hooks give a layer DTensors for its input."""
    if not isinstance(tensor, DTensor):
        return empty_twin(tensor, _META)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole


def left_out(name: str, value: Any) -> Iterator[tuple[int, Any]]:
    """Yield what stands in a copy for an attribute's value that is not to be copied, by id."""
    if name.endswith("_trainer") or isinstance(value, Trainer):
        # LightningModule's own `__getstate__` drops its trainer, but not one under another name.
        yield id(value), None
    elif name in ("_fabric", "_device_mesh") or isinstance(value, _SHARED_TYPES):
        yield id(value), value
    elif "_hooks" in name and isinstance(value, dict):
        # A user's hook is not copied with the module: it would write meta tensors into the user's
        # own objects.
        yield id(value), OrderedDict()
