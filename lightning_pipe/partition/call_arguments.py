"""With what the pipelined module is called: its layers are measured on that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_pipe.partition.class_swap import class_name, original_forward
from lightning_pipe.partition.layers import PipelinedLayers


def call_arguments(
    root: LightningModule, found: PipelinedLayers, batch: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Find out what the pipelined module is called with.

    Args:
        root: The user's module.
        found: Its layers.
        batch: Of the training; without it the module's ``example_input_array`` is taken.

    Returns:
        Positional and keyword arguments, and the number of samples in them.

    Raises:
        MisconfigurationException: There is neither; or the step does not call the module.
    """
    if batch is None:
        args, kwargs = _example(root)
        if found.module is not root and _has_forward(root):
            args, kwargs = _captured(root, found, lambda: root(*args, **kwargs))
    else:
        args, kwargs = training_call(root, found, batch)
    sizes = [leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if has_samples(leaf)]
    if not sizes:
        raise MisconfigurationException(
            f"The pipelined module of {class_name(root)} is called without any tensor, but its "
            "layers are to be measured on one."
        )
    return args, kwargs, sizes[0]


def training_call(
    root: LightningModule, found: PipelinedLayers, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run a training step up to the pipelined call, whose arguments are given.

    Args:
        root: The user's module.
        found: Its layers.
        batch: Of the training.

    Raises:
        MisconfigurationException: The step does not call the module.
    """
    step = root.training_step
    index = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
    return _captured(root, found, lambda: step(batch, *index))


def _has_forward(root: LightningModule) -> bool:
    """Whether the module itself can be called; else an example is one for its layers."""
    return getattr(original_forward(root), "__func__", None) is not LightningModule.forward


class _Called(BaseException):
    """Leaves the user's step at the pipelined call."""


def _captured(
    root: LightningModule, found: PipelinedLayers, run: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run something of the user's up to the pipelined call."""
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments.append((args, kwargs))
        raise _Called

    with (
        isolate_rng(),
        replaced(found.module, "forward", forward),
        replaced(root, "log", lambda *_, **__: None),
    ):
        try:
            run()
        except _Called:
            return arguments[0]
    raise MisconfigurationException(
        f"{class_name(root)} did not call its pipelined module {found.name!r}. Call it once in "
        "training_step (name another with PipelineStrategy(module=...) if it is the wrong one)."
    )


@contextmanager
def replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside, a module has another method."""
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def _example(root: LightningModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    example = getattr(root, "example_input_array", None)
    if example is None:
        raise MisconfigurationException(
            f"{class_name(root)} has no example_input_array, and no batch was given: set it to an "
            "input of the model, or give data."
        )
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def has_samples(leaf: Any) -> bool:
    """Whether a leaf is a tensor whose dimension 0 may be that of the samples."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0
