"""A layer that lives on another rank: it keeps its names and its place, but has no memory.

Parameter order, state-dict keys, the indices of an optimizer's parameters and ModelSummary stay
those of the whole model. The tensors are on the meta device, where torch's own `Module._apply`
would fail (`.cpu()` of a meta tensor raises) or silently allocate (`to_empty`). So every module of
such a layer gets methods that keep it where it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_pipe.partition.class_swap import original_class, restore_class, swap_class

# The name of the layer, in the module's `__dict__`: it survives `deepcopy` and `pickle`.
_LAYER_NAME = "_absent_layer_name"


class AbsentLayer(nn.Module):
    """Methods of each module of a layer that lives on another rank (a mixin for `swap_class`)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run.

        Raises:
            MisconfigurationException: Always; it names the layer.
        """
        raise MisconfigurationException(
            f"layer {vars(self).get(_LAYER_NAME, '?')!r} lives on another rank of the pipeline:"
            " call the pipelined module as a whole, which runs its layers where they are. Only one"
            " rank can call a layer by itself."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AbsentLayer:
        """Follow a change of dtype, but stay on the meta device.

        The tensor objects stay the same: optimizers hold them.
        """
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for _, tensor in own_tensors(self):
            if not tensor.is_meta:  # tied to something that this rank has, and moved with that
                continue
            with torch.no_grad():
                dtype = fn(torch.empty(0, dtype=tensor.dtype, device="cpu")).dtype
                if dtype != tensor.dtype:
                    _change_dtype(tensor, dtype)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Check names and shapes as usual and load nothing, with `assign=True` neither."""
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        with warnings.catch_warnings():  # torch warns once per tensor that nothing is loaded
            warnings.filterwarnings("ignore", message=".*which is a no-op")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


def is_absent(layer: nn.Module) -> bool:
    """Tell whether the layer lives on another rank."""
    return isinstance(layer, AbsentLayer)


def has_deferred(module: nn.Module | None) -> bool:
    """Tell whether a tensor has no memory although its module lives here."""
    modules = [] if module is None else list(module.modules())
    return any(t.is_meta for m in modules if not is_absent(m) for _, t in own_tensors(m))


def absent(
    layer: nn.Module,
    name: str,
    keep: Collection[int] = frozenset(),
    memo: dict[int, Tensor] | None = None,
) -> None:
    """Free the memory of a layer that lives on another rank, in place.

    Its parameters and buffers, those of its submodules included, move to the meta device; type,
    attributes, `requires_grad`, dtype and strides stay. They stay the same objects, so that what
    else holds them (a list, a tied layer) follows. Where torch cannot exchange the storage of an
    object (something has a weak reference to it, as an `nn.LSTM` has to its weights), a new object
    takes its place.

    Args:
        layer: The layer; nothing happens if it is absent already.
        name: Its qualified name, for the error of whoever calls it.
        keep: Ids of the modules and tensors that this rank needs, and that stay as they are
            although this layer has them too.
        memo: New tensors by the id of the old one. Pass the same dict for all layers, so that ties
            between them survive.

    Raises:
        MisconfigurationException: If the layer holds a `ScriptModule`, whose tensors Python cannot
            replace.
    """
    memo = {} if memo is None else memo
    modules = [m for m in layer.modules() if id(m) not in keep and not is_absent(m)]
    scripted = next((m for m in modules if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise MisconfigurationException(
            f"Layer {name!r} holds a {original_class(scripted).__name__}, which cannot be left on"
            " another rank: pass the Python module instead of a scripted one."
        )
    for module in modules:
        for attribute, tensor in list(own_tensors(module)):
            # Whatever is on the meta device already is done, so only tensors that lived from the
            # start are looked up: the memo cannot mistake a new object for a freed one with the
            # same id.
            if not tensor.is_meta and id(tensor) not in keep:
                _exchange(module, attribute, tensor, torch.device("meta"), memo)
        swap_class(module, AbsentLayer)
        vars(module)[_LAYER_NAME] = name


def present(
    layer: nn.Module, device: torch.device | str, memo: dict[int, Tensor] | None = None
) -> None:
    """Undo `absent`: give the layer its class back and uninitialized memory on `device`.

    The caller fills parameters and *all* buffers: those that are not persistent are in no state
    dict.

    Args:
        layer: The layer; nothing happens if it is not absent.
        device: Where to allocate.
        memo: New tensors by the id of the old one; pass the same dict for all layers.
    """
    memo = {} if memo is None else memo
    for module in [m for m in layer.modules() if is_absent(m)]:
        restore_class(module)
        vars(module).pop(_LAYER_NAME, None)
        for attribute, tensor in list(own_tensors(module)):
            if tensor.is_meta:
                _exchange(module, attribute, tensor, torch.device(device), memo)


def empty_twin(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor of that device and dtype, in everything else like `tensor`."""
    dtype = tensor.dtype if dtype is None else dtype
    with torch.no_grad():
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            data = torch.empty_like(tensor.detach(), dtype=dtype, device=device)
        else:
            data = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)
    return twin_with(tensor, data)


def twin_with(tensor: Tensor, data: Tensor) -> Tensor:
    """Return a tensor with this data, in everything else like `tensor`."""
    if not isinstance(tensor, nn.Parameter):
        return data.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    if is_traceable_wrapper_subclass(tensor):
        twin: Tensor = nn.Parameter(data, tensor.requires_grad)
    else:  # not `type(tensor)(...)`: a subclass of Parameter may have any constructor
        twin = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, those of its submodules not included."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _change_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    if is_traceable_wrapper_subclass(tensor):  # `.data =` would leave a DTensor's local part behind
        twin = empty_twin(tensor, torch.device("meta"), dtype)
        torch.utils.swap_tensors(tensor, twin)
    else:
        tensor.data = tensor.data.to(dtype)


def _exchange(
    module: nn.Module, name: str, tensor: Tensor, device: torch.device, memo: dict[int, Tensor]
) -> None:
    twin = memo.get(id(tensor))
    if twin is None:
        twin = empty_twin(tensor, device)
    exchange(module, name, tensor, twin, memo)


def exchange(
    module: nn.Module, name: str, tensor: Tensor, twin: Tensor, memo: dict[int, Tensor]
) -> None:
    """Let a parameter or buffer become what `twin` is, in place if torch can.

    Args:
        module: The one that has it.
        name: The attribute's.
        tensor: The old one.
        twin: The new one, of the same class.
        memo: New tensors by the id of the old one, where it could not be done in place.
    """
    if id(tensor) not in memo:
        try:
            torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]
        except RuntimeError:
            memo[id(tensor)] = twin
        else:
            return
    # Not `_parameters[name] = twin`: an nn.LSTM keeps a second list, up to date by `__setattr__`.
    setattr(module, name, memo[id(tensor)])
