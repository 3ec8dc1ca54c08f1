"""Build one rank's part of a model: own its stages, leave the others on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

from torch import Tensor, nn

from lightning_pipe.partition.absent import absent, is_absent
from lightning_pipe.partition.layers import PipelinedLayers


def stage_slices(sizes: Sequence[int]) -> list[range]:
    """Return the layer indices of each stage, given the number of layers of each stage."""
    stops = list(accumulate(sizes))
    return [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def shard(found: PipelinedLayers, owned: Collection[int]) -> None:
    """Free the memory of all layers that this rank does not own (see `absent`).

    What an owned layer or a module outside the layers also holds (a tied weight, a shared module)
    stays real and tied, so that the order of the parameters stays that of the whole model.

    Args:
        found: the layers.
        owned: indices into `found.layers` of the layers that this rank runs.

    Raises:
        RuntimeError: if an owned layer was freed before: its weights are gone.
    """
    lost = [found.names[i] for i in sorted(owned) if is_absent(found.layers[i])]
    if lost:
        raise RuntimeError(
            f"layers {lost} were freed by an earlier call of shard: make them present first"
        )
    # By object, not by index: an nn.Sequential may hold one module twice.
    own = {id(found.layers[i]) for i in owned}
    others = [(n, m) for n, m in zip(found.names, found.layers, strict=True) if id(m) not in own]
    keep: set[int] = set()
    for _, module in _modules_outside(found.root, [layer for _, layer in others]):
        keep.add(id(module))
        keep.update(id(tensor) for tensor in module.parameters(recurse=False))
        keep.update(id(tensor) for tensor in module.buffers(recurse=False))
    memo: dict[int, Tensor] = {}
    for name, layer in others:
        absent(layer, name, keep, memo)


def outside_parameters(root: nn.Module, found: PipelinedLayers) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that `root` reaches without passing through a layer, by qualified name.

    One that is tied to a layer's parameter is among them: code outside the layers uses it on every
    rank.
    """
    names: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in _modules_outside(root, found.layers):
        for name, parameter in module.named_parameters(prefix, recurse=False):
            names.setdefault(id(parameter), (name, parameter))
    return list(names.values())


def outside_buffers(root: nn.Module, found: PipelinedLayers) -> list[Tensor]:
    """Return the buffers that `root` reaches without passing through a layer."""
    modules = [module for _, module in _modules_outside(root, found.layers)]
    return [buffer for module in modules for buffer in module.buffers(recurse=False)]


def shared_between_stages(found: PipelinedLayers, sizes: Sequence[int]) -> list[tuple[str, str]]:
    """Find the parameters that are one object but live in several places.

    A place is a stage, or the part of the model outside of all layers.

    Args:
        found: the layers, before or after `shard`.
        sizes: the number of layers of each stage.

    Returns:
        Pairs of qualified names: the parameter's first place (outside of the layers comes before
        all stages, stages come in order) and its first place in each further stage.
    """
    first = {id(p): name for name, p in outside_parameters(found.root, found)}
    pairs = []
    for stage in stage_slices(sizes):
        in_stage: dict[int, str] = {}
        for i in stage:
            for name, parameter in found.layers[i].named_parameters(found.names[i]):
                in_stage.setdefault(id(parameter), name)
        pairs += [(first[key], name) for key, name in in_stage.items() if key in first]
        first = {**in_stage, **first}
    return pairs


def tied_parameters(
    found: PipelinedLayers, sizes: Sequence[int]
) -> list[tuple[nn.Parameter, list[int]]]:
    """Return the parameters that several stages have, with these stages, in one order on all ranks.

    Those that live outside of the layers, too, are left out.

    Args:
        found: the layers, before or after `shard`.
        sizes: the number of layers of each stage.
    """
    outside = {id(parameter) for _, parameter in outside_parameters(found.root, found)}
    stages: dict[int, tuple[nn.Parameter, list[int]]] = {}
    for stage, where in enumerate(stage_slices(sizes)):
        parameters = [p for i in where for p in found.layers[i].parameters()]
        for parameter in {id(p): p for p in parameters}.values():
            stages.setdefault(id(parameter), (parameter, []))[1].append(stage)
    return [
        (parameter, places)
        for parameter, places in stages.values()
        if len(places) > 1 and id(parameter) not in outside
    ]


def _modules_outside(
    root: nn.Module, layers: Sequence[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Walk all modules that are reached without passing through one of `layers`."""
    yield from root.named_modules(memo=set(layers))  # torch takes those in its memo for visited
