"""What torch's operations do to the tensors that they are called with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

_C10D: Any = torch._C._distributed_c10d
# What they fill does not matter to them, nor how many random numbers they draw.
_FILLS = {
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "zero_", "fill_", "copy_"),
}
# Their results are Python's, or as large as the values say.
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operations whose schema does not say that they change these arguments.
_CHANGED_SILENTLY = {
    **{
        name: ("running_mean", "running_var")
        for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    },
    "scatter_": ("output_tensors",),  # those of `torch.distributed`
    **{name: ("tensors",) for name in ("broadcast_", "allreduce_")},
}


def base_name(function: OpOverload) -> str:
    """Return an operation's name without namespace and overload."""
    return str(function.overloadpacket.__name__)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, each as often as it stands there."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@cache
def gives_values(function: OpOverload) -> bool:
    """Tell whether what it returns says something about the values in its arguments."""
    returns_tensors = all("Tensor" in str(result.type) for result in function._schema.returns)
    return bool(_VALUE_TAGS & set(function.tags)) or not returns_tensors


def is_collective(function: OpOverload) -> bool:
    """Tell whether processes run it together, in place: what `torch.distributed` calls."""
    return function.namespace == "c10d"


def done_work() -> Any:
    """Return what a collective operation returns to be waited for, when there is nothing to do."""
    done = torch.futures.Future[None]()
    done.set_result(None)
    return _C10D._create_work_from_future(done).boxed()


def wait_for(returned: Any) -> None:
    """Wait for a collective operation that returned this."""
    for leaf in tree_leaves(returned):
        if isinstance(leaf, torch.ScriptObject):
            _C10D.Work.unbox(leaf).wait()


def written_tensors(
    function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    values = [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in _written_arguments(function)
    ]
    return tensors_in(values)


def filled_tensors(function: OpOverload, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the argument of whose old values nothing is left, if there is one.

    Args:
        function: The operation.
        tensors: What it is called with, see `tensors_in`.
    """
    reads = any(tensor is tensors[0] for tensor in tensors[1:])  # ``w.copy_(w)``
    return tensors[:1] if base_name(function) in _FILLS and not reads else ()


@cache
def _written_arguments(function: OpOverload) -> list[tuple[int, str]]:
    silently = _CHANGED_SILENTLY.get(base_name(function), ())
    return [
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in silently
    ]
