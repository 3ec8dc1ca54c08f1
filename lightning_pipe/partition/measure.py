"""Measure what each layer costs, one layer at a time, on copies.

A layer is copied, gets the output of the layer before, runs forward and backward several times and
is thrown away. Nothing of the model changes: no weight, gradient, buffer or mode, and no random
state. Layers without memory (``configure_model`` on the meta device) get some for that long, with
small random values.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_pipe.partition.call_arguments import has_samples, replaced
from lightning_pipe.partition.layers import PipelinedLayers, keyword_names
from lightning_pipe.partition.meta_copy import MetaCopy, left_out
from lightning_pipe.partition.profile import LayerProfile, Profile

_CPU = torch.device("cpu")
_ADAM = 2  # bytes of optimizer state for each byte of a parameter, where it cannot be found out


def measure(
    root: LightningModule,
    found: PipelinedLayers,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_size: int,
    repeats: int = 5,
    device: torch.device = _CPU,
    progress: Callable[[int, int], None] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    batch: Any = None,
) -> Profile:
    """Measure all layers.

    Seconds are medians. They are taken for the whole batch and for half of it, so that what does
    not depend on the number of samples is known. What layers keep is counted once where two keep
    the same (a layer its output, the next one its input), with the earlier one.

    Args:
        root: The user's module; gives the optimizer.
        found: Its layers.
        args: Positional arguments of a pipelined call.
        kwargs: Its keyword arguments.
        batch_size: Samples in them; tensors whose dimension 0 is as long are cut.
        repeats: How often each layer runs, after a first time that does not count.
        device: Where layers run.
        progress: Called with the number of layers that are done and that of all.
        context: Around each forward, for autocast.
        batch: The call's; for what the loss keeps for its backward.

    Returns:
        The profile.
    """
    with isolate_rng(include_cuda=device.type == "cuda"), torch.inference_mode(False):
        with torch.enable_grad():
            runs = _Runs(repeats, device, context)
            layers, output = _measure_layers(found, args, kwargs, batch_size, runs, progress)
            loss_bytes = 0 if batch is None else _loss_bytes(root, found, batch, output)
        layers = _with_parameters(root, found, layers)
    first = _bytes(tree_leaves((args, dict(kwargs))))
    return Profile(tuple(layers), batch_size, first, str(device), loss_bytes)


class _Runs:
    """How layers are run.

    Args:
        repeats: How often.
        device: Where.
        context: Around a forward.
    """

    def __init__(
        self, repeats: int, device: torch.device, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._repeats, self.device, self._context = repeats, device, context

    def time(self, run: Callable[[Any], Any], enter: Callable[[], Any]) -> tuple[float, float, Any]:
        """Seconds of a forward and of a backward, and the output."""
        forward, backward = [], []
        for _ in range(1 + self._repeats):
            entered = enter()
            start = self._now()
            with self._context():
                output = run(entered)
            middle = self._now()
            roots = [leaf for leaf in tree_leaves(output) if _needs_gradient(leaf)]
            gradients = [torch.ones_like(leaf) for leaf in roots]
            begin = self._now()
            if roots:
                torch.autograd.backward(roots, gradients)
            forward.append(middle - start)
            backward.append(self._now() - begin)
        output = apply_to_collection(output, Tensor, Tensor.detach)
        return median(forward[1:]), median(backward[1:]), output

    def kept(self, run: Callable[[Any], Any], inputs: Any) -> tuple[_Storages, Any]:
        """What a forward keeps for its backward, and its output."""
        storages: _Storages = {}
        with _keeping(storages), self._context():
            output = run(inputs)
        return storages, apply_to_collection(output, Tensor, Tensor.detach)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


_Storages = dict[int, torch.UntypedStorage]
"""By address; held, so that no address is used again."""


def _keeping(storages: _Storages) -> AbstractContextManager[Any]:
    """Inside, what autograd keeps is noted."""

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _loss_bytes(root: LightningModule, found: PipelinedLayers, batch: Any, output: Any) -> int:
    """What the step keeps besides the layers, found out without memory; 0 if it cannot be.

    Metrics of the step, which it updates, are copies.
    """
    storages: _Storages = {}
    try:
        twin = MetaCopy(root, found.layers)
        module = twin.module.get_submodule(found.name)
        entered = _entered(twin.arguments(output))
        with (
            replaced(module, "forward", lambda *_, **__: entered),
            replaced(twin.module, "log", lambda *_, **__: None),
            torch.device("meta"),
            _keeping(storages),
        ):
            twin.module.training_step(twin.arguments(batch), 0)  # type: ignore[operator]
    except Exception:  # whatever user code raises without values
        return 0
    own = {t.untyped_storage()._cdata for t in (*twin.module.parameters(), *tree_leaves(entered))}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


def _measure_layers(
    found: PipelinedLayers,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_size: int,
    runs: _Runs,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[LayerProfile], Any]:
    """Go down the chain, with the whole batch and with a part of it; also gives the output."""
    sizes = sorted({batch_size, max(1, batch_size // 2)}, reverse=True)
    calls = [_moved(_cut((args, dict(kwargs)), batch_size, size), runs.device) for size in sizes]
    inputs = [call_args for call_args, _ in calls]
    keywords = [call_kwargs for _, call_kwargs in calls]
    before: _Storages = {}
    profiles = []
    for index, (name, layer) in enumerate(zip(found.names, found.layers, strict=True)):
        twin = _copy(layer, runs.device)
        names = keyword_names(layer, len(inputs[0])) if found.keywords else frozenset()
        times = []
        own = {t.untyped_storage()._cdata for t in (*twin.parameters(), *twin.buffers())}
        for place, call_kwargs in enumerate(keywords):
            chosen = {key: value for key, value in call_kwargs.items() if key in names}

            def run(entered: Any, chosen: dict[str, Any] = chosen, twin: nn.Module = twin) -> Any:
                return twin(*entered, **chosen)

            def enter(place: int = place, first: bool = index == 0) -> Any:
                return inputs[place] if first else _entered(inputs[place])

            forward, backward, output = runs.time(run, enter)
            times.append((forward, backward))
            if place == 0:  # what it keeps may be what it gives to the next layer
                storages, output = runs.kept(run, enter())
            inputs[place] = (output,)
        kept = {k: s for k, s in storages.items() if k not in own and k not in before}
        before = storages
        forward, backward = times[0]
        overheads = [_overhead(both, sizes) for both in zip(*times, strict=True)]
        profiles.append(
            LayerProfile(
                name,
                forward,
                backward,
                sum(storage.nbytes() for storage in kept.values()),
                _bytes(tree_leaves(inputs[0])),
                0,
                0,
                0,
                *overheads,
            )
        )
        if progress is not None:
            progress(index + 1, len(found.layers))
    return profiles, inputs[0][0]


def _overhead(seconds: Sequence[float], sizes: Sequence[int]) -> float:
    """The part of a time that does not depend on the number of samples, from two of them."""
    if len(sizes) == 1:
        return 0.0
    slope = (seconds[0] - seconds[1]) / (sizes[0] - sizes[1])
    return min(max(seconds[0] - slope * sizes[0], 0.0), seconds[0])


def _copy(layer: nn.Module, device: torch.device) -> nn.Module:
    """A layer's copy on a device, without hooks of the user's; memory for what has none."""
    memo: dict[int, Any] = {}
    for part in layer.modules():
        for name, value in vars(part).items():
            memo.update(left_out(name, value))
    memo |= {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in layer.parameters()}
    twin = copy.deepcopy(layer, memo)
    if any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers())):
        twin.to_empty(device=device)
        with torch.no_grad():
            for tensor in (*twin.parameters(), *twin.buffers()):
                if tensor.is_floating_point():
                    tensor.normal_(std=0.02)
                else:
                    tensor.zero_()
    return twin.to(device)


def _with_parameters(
    root: LightningModule, found: PipelinedLayers, layers: Sequence[LayerProfile]
) -> list[LayerProfile]:
    """Add the bytes of parameters, gradients and optimizer; a shared parameter counts once."""
    states = _optimizer_bytes(root, found)
    seen: set[int] = set()
    complete = []
    for layer, profile in zip(found.layers, layers, strict=True):
        own = [p for p in layer.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        trained = [p for p in own if p.requires_grad]
        numbers = vars(profile) | {
            "parameter_bytes": _bytes(own),
            "gradient_bytes": _bytes(trained),
            "optimizer_bytes": sum(states.get(id(p), 0) for p in trained),
        }
        complete.append(LayerProfile(**numbers))
    return complete


def _optimizer_bytes(root: LightningModule, found: PipelinedLayers) -> dict[int, int]:
    """What the module's optimizer keeps for each parameter: one step of it without memory.

    Where it cannot be built or run so, as Adam: twice the bytes of the parameter.
    """
    parameters = dict(root.named_parameters())
    try:
        twin = MetaCopy(root, found.layers).module
        assert isinstance(twin, LightningModule)
        configured = twin.configure_optimizers()
        optimizers = [x for x in tree_leaves(configured) if isinstance(x, torch.optim.Optimizer)]
        states: dict[int, int] = {}
        names = {id(parameter): name for name, parameter in twin.named_parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            for parameter, state in optimizer.state.items():
                name = names.get(id(parameter))
                if name in parameters:
                    states[id(parameters[name])] = _bytes(tree_leaves(state))
        if not optimizers:
            raise ValueError("no optimizer")
    except Exception:  # whatever user code raises without a trainer, or an optimizer on meta
        return {id(p): _ADAM * p.nbytes for p in parameters.values()}
    return states


def _cut(tree: Any, whole: int, size: int) -> Any:
    """The first samples of what has as many as the batch."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:size] if has_samples(tensor) and tensor.shape[0] == whole else tensor

    return apply_to_collection(tree, Tensor, cut)


def _moved(tree: Any, device: torch.device) -> Any:
    return apply_to_collection(tree, Tensor, lambda tensor: tensor.detach().to(device, copy=True))


class _Enter(torch.autograd.Function):
    """Lets a tensor require a gradient without being a leaf, which layers must not change."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _entered(inputs: Any) -> Any:
    """What a layer gets from the one before: tensors without history that require gradients."""
    anchor = torch.zeros((), requires_grad=True)

    def enter(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        entered: Tensor = _Enter.apply(anchor, tensor)  # type: ignore[no-untyped-call]
        return entered

    return apply_to_collection(inputs, Tensor, enter)


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _bytes(leaves: Sequence[Any]) -> int:
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
