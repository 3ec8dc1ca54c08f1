"""Give one module other methods, without touching its class, its name or its state.

Two places need it: a layer that lives on another rank, and the pipelined module while it runs as a
pipeline. Both must stay the modules they were for everybody else: `isinstance`, `repr`,
ModelSummary, `deepcopy` and `pickle`. A bound method put on the instance would not do: `deepcopy`
and `pickle` follow it to whatever object it is bound to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

# `forward` set on the instance hides the class's, so it would hide the mixin's as well. It waits
# under this name.
_HIDDEN_FORWARD = "_forward_before_class_swap"


class _SwappedMeta(type):
    """Metaclass of swapped classes: calling one builds an ordinary module.

    `nn.Sequential` slices itself by calling `self.__class__`. A slice of a swapped module is not
    the swapped module, so it gets the original class.
    """

    swap_original: type[nn.Module]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.swap_original(*args, **kwargs)


class _Swapped(metaclass=_SwappedMeta):
    """Base of all swapped classes; stands between the mixin and the original class."""

    # Long names: a user's module may have its own `mixin`, and a parametrization has an `original`.
    swap_mixin: type

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Stop here: a user's own `__init_subclass__` (a registry) must not see our classes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe the instance by mixin and original class: its own class has no name."""
        swapped = type(self)
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        if function is swapped:
            function = swapped.swap_original
        args = tuple(swapped.swap_original if arg is swapped else arg for arg in args)
        return (_rebuild, (swapped.swap_mixin, function, args), *rest)


def _rebuild(mixin: type, function: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = function(*args)
    swap_class(module, mixin)
    return module


@functools.cache
def _swapped_class(mixin: type, original: type) -> type[nn.Module]:
    metaclass: type = _SwappedMeta
    if not issubclass(_SwappedMeta, type(original)):  # e.g. a layer that is an abc.ABC
        metaclass = type("_SwappedMeta", (_SwappedMeta, type(original)), {})
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "swap_original": original,
        "swap_mixin": mixin,
    }
    swapped: type[nn.Module] = metaclass(original.__name__, (mixin, _Swapped, original), namespace)
    return swapped


def swap_class(module: nn.Module, mixin: type) -> None:
    """Put the methods of `mixin` in front of those of the module's own class.

    Args:
        module: the module to change; its attributes, parameters and hooks stay as they are.
        mixin: a class that can be imported by name (so that the module can be pickled). Its methods
            come first in the method resolution order and may call `super()`.

    Raises:
        RuntimeError: if the module's class is already swapped with another mixin.
    """
    if isinstance(module, _Swapped):
        if type(module).swap_mixin is mixin:
            return
        first = type(module).swap_mixin.__name__
        raise RuntimeError(
            f"a {type(module).__name__} already has the methods of {first}, it cannot get those"
            f" of {mixin.__name__} as well: call restore_class first"
        )
    if hasattr(mixin, "forward") and "forward" in vars(module):
        vars(module)[_HIDDEN_FORWARD] = vars(module).pop("forward")
    original: type = type(module)
    object.__setattr__(module, "__class__", _swapped_class(mixin, original))


def restore_class(module: nn.Module) -> None:
    """Undo `swap_class`; a module whose class is not swapped stays as it is."""
    if not isinstance(module, _Swapped):
        return
    object.__setattr__(module, "__class__", original_class(module))
    if _HIDDEN_FORWARD in vars(module):
        vars(module)["forward"] = vars(module).pop(_HIDDEN_FORWARD)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the user gave the module."""
    return type(module).swap_original if isinstance(module, _Swapped) else type(module)


def class_name(module: nn.Module) -> str:
    """Return the name of the class that the user gave the module, for messages."""
    return original_class(module).__name__


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the user's `forward`, bound to the module.

    It is the one on the instance if there is one, else the class's. For a module that
    `torch.compile` wrapped it is that of the module inside.
    """
    inner = module._modules.get("_orig_mod")
    if inner is not None:
        return original_forward(inner)
    attributes = vars(module)
    own: Callable[..., Any] | None = attributes.get(_HIDDEN_FORWARD, attributes.get("forward"))
    return own if own is not None else MethodType(original_class(module).forward, module)
