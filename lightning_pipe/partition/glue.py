"""Refuse code between the layers, which a pipeline would skip.

The pipelined module's `forward` is replaced by the chain of its layers. Whatever the user's own
`forward` does besides calling them one after another, such as a residual, a pooling or a mask that
it computes, would be left out without a word and train another model. So it is run once, on a copy
without memory, and watched.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from lightning_pipe.partition.class_swap import original_class, original_forward
from lightning_pipe.partition.layers import PipelinedLayers, keyword_names
from lightning_pipe.partition.meta_copy import MetaCopy

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def check_glue(found: PipelinedLayers, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Compare the pipelined module's own `forward` with the chain of its layers.

    It runs once, on a meta copy.

    Each layer must be called once, in order, with what a pipeline would pass it: the previous
    layer's output (layer 0: the call's positional arguments) and those keyword arguments of the
    call that it names. The last output must be returned. Objects are compared, not numbers; a
    change in place counts as another object. Nothing real is changed: not the module, its buffers,
    the arguments, nor any random state. A branch on `module.training` is seen only in the mode that
    the module is in.

    Args:
        found: the layers; any of them may be absent, and the pipelined module's class may be
            swapped.
        args: positional arguments of a pipelined call.
        kwargs: keyword arguments of that call.

    Raises:
        MisconfigurationException: if the pipeline would compute something else; it names the place.
            Where the copy cannot run (its code depends on values), there is a warning instead.
    """
    if _is_plain_chain(found):
        return
    watch = None
    try:
        with _harmless():
            copy = MetaCopy(found.module, found.layers)
            watch = _Watch(found, copy, copy.arguments((args, dict(kwargs))))
            watch.run()
    except Exception as error:  # anything that user code can raise on tensors without values
        if watch is None or watch.problem is None:
            warnings.warn(
                f"The forward of {_class_name(found)} cannot be traced without data"
                f" ({type(error).__name__}: {error}). Make sure that it only calls its layers one"
                " after another: a pipeline skips everything else.",
                stacklevel=2,
            )
            return
    if watch is not None and watch.problem is not None:
        raise MisconfigurationException(watch.problem)


def _is_plain_chain(found: PipelinedLayers) -> bool:
    """Tell whether there is no code of the user's to check."""
    forward = getattr(original_forward(found.module), "__func__", None)
    if forward in (nn.Module.forward, LightningModule.forward):
        return True  # not implemented, so there is nothing that a pipeline could skip
    is_sequential = forward is nn.Sequential.forward
    return is_sequential and tuple(found.module._modules.values()) == found.layers


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """Keep the trace from leaving anything behind: random states, warnings, compiled code."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Tensors made in inference mode have no version counter.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        # Nothing is compiled where dynamo was never imported, and importing it takes seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class _Watch:
    """Compares the calls of the layers with a pipeline's; `problem` is the first difference."""

    def __init__(self, found: PipelinedLayers, copy: MetaCopy, call: Arguments) -> None:
        self.problem: str | None = None
        self._names = found.names
        self._keywords = found.keywords
        self._class_name = _class_name(found)
        self._copy = copy
        self._call = call
        self._output: Any = None
        self._num_called = 0
        # Versions of the tensors as they were handed over. Holding the tensors keeps ids unique.
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._remember(call)

    def run(self) -> None:
        """Run the copy's `forward`."""
        for layer in set(self._copy.layers):
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            layer.register_forward_hook(self._leave)
        args, kwargs = self._call
        with torch.device("meta"):
            returned = self._copy.module.forward(*args, **kwargs)
        if self._num_called < len(self._names):
            self._report(
                f"The forward of {self._class_name} does not call layer"
                f" {self._names[self._num_called]!r}, a pipeline would: take it out of the list of"
                " layers, or call it."
            )
        elif not self._same(returned, self._output):
            self._report(
                f"After the last layer {self._names[-1]!r} the forward of {self._class_name}"
                " computes something that a pipeline would skip (it does not return what the layer"
                " returned): move it into a layer."
            )

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layers, index = self._copy.layers, self._num_called
        name = self._names[layers.index(layer)]
        if index < len(layers) and layers[index] is layer:
            self._compare(index, layer, (args, kwargs))
            self._num_called += 1
        elif layer in layers[:index]:
            self._report(
                f"The forward of {self._class_name} calls layer {name!r} twice, a pipeline calls it"
                " once: use two layers."
            )
        else:
            self._report(
                f"The forward of {self._class_name} calls layer {name!r} where"
                f" {self._names[index]!r} is expected: list the layers in the order in which they"
                " are called."
            )

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._output = output
        self._remember(output)

    def _compare(self, index: int, layer: nn.Module, actual: Arguments) -> None:
        """Compare the arguments of one call, by parameter: whether by position or by keyword."""
        signature = inspect.signature(original_forward(layer))
        given = _bind(signature, actual)
        chained = self._call[0] if index == 0 else (self._output,)
        known = keyword_names(layer, len(chained)) if self._keywords else frozenset()
        passed = {name: value for name, value in self._call[1].items() if name in known}
        try:
            piped = _bind(signature, (chained, passed))
            by_position = signature.bind_partial(*chained).arguments
        except TypeError as error:
            self._report(
                f"{self._place(index)} the forward of {self._class_name} passes arguments that a"
                f" pipeline would not ({error}): a layer gets one positional argument, what the"
                " layer before it returned, and those keyword arguments of the call that its"
                " forward names."
            )
            return
        differing = [n for n in signature.parameters if not self._same(given.get(n), piped.get(n))]
        if any(n in by_position for n in differing):
            self._report(
                f"{self._place(index)} the forward of {self._class_name} computes something that a"
                " pipeline would skip: move it into a layer."
            )
        elif differing:
            origin = "the call's own" if differing[0] in passed else "the default"
            self._report(
                f"{self._place(index)} the forward of {self._class_name} gives {differing[0]!r} of"
                f" layer {self._names[index]!r} another value than a pipeline would, which passes"
                f" {origin}: pass it unchanged as a keyword argument of the call, under a name that"
                " the layer's forward lists, or compute it in the layer."
            )

    def _same(self, left: Any, right: Any) -> bool:
        """Tell whether two values hold the same objects, unchanged since handed over."""
        left_leaves, left_spec = tree_flatten(left)
        right_leaves, right_spec = tree_flatten(right)
        return left_spec == right_spec and all(
            self._unchanged(a) if a is b else _equal(a, b)
            for a, b in zip(left_leaves, right_leaves, strict=True)
        )

    def _remember(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._versions[id(leaf)] = (leaf, leaf._version)

    def _unchanged(self, leaf: Any) -> bool:
        return id(leaf) not in self._versions or self._versions[id(leaf)][1] == leaf._version

    def _report(self, problem: str) -> None:
        # Go on instead of raising here: the user's forward may catch exceptions.
        self.problem = self.problem or problem

    def _place(self, index: int) -> str:
        if index == 0:
            return f"Before layer {self._names[0]!r}"
        return f"Between layers {self._names[index - 1]!r} and {self._names[index]!r}"


def _bind(signature: inspect.Signature, arguments: Arguments) -> dict[str, Any]:
    bound = signature.bind(*arguments[0], **arguments[1])
    bound.apply_defaults()
    return bound.arguments


def _equal(left: Any, right: Any) -> bool:
    """Compare values that are no tensors: a number is not an object that travels."""
    if isinstance(left, Tensor) or isinstance(right, Tensor) or type(left) is not type(right):
        return False
    try:
        return bool(left == right)
    except Exception:  # a user's own __eq__
        return False


def _class_name(found: PipelinedLayers) -> str:
    return repr(original_class(found.module).__name__)
