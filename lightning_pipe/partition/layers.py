"""Find the layers that are cut into stages.

The chaining rule, which everything else in the package relies on: layer 0 gets the positional
arguments of the pipelined call; each other layer gets what the layer before it returned, as **one**
positional argument (a tuple stays one tuple), as `nn.Sequential` chains its children. Where the
layers come from `configure_pipeline`, each layer also gets those keyword arguments of the call that
`keyword_names` lists for it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pipe.partition.class_swap import class_name, original_forward
from lightning_pipe.partition.listed_layers import checked_list, lowest_container

_HOOK_REMEDY = (
    "define `configure_pipeline(self)` in {root}, returning the ordered layers, e.g."
    " `return [self.embed, *self.blocks, self.head]`"
)


@dataclass(frozen=True)
class PipelinedLayers:
    """The ordered layers of a model and the module whose call runs them.

    Attributes:
        module: the pipelined module: calling it is the pipelined call.
        name: its qualified name inside `root`, "" for `root` itself.
        layers: the layers in the order in which data flows. An `nn.Sequential` may hold one module
            twice.
        names: the qualified name inside `root` of each layer.
        root: the LightningModule that was searched.
        keywords: whether keyword arguments of the call reach the layers (see `keyword_names`); true
            for layers from `configure_pipeline`, false for an `nn.Sequential`, whose `forward`
            takes none.
    """

    module: nn.Module = field(repr=False)
    name: str
    layers: tuple[nn.Module, ...] = field(repr=False)
    names: tuple[str, ...]
    root: nn.Module = field(repr=False)
    keywords: bool = False


def find_layers(root: nn.Module, path: str | None = None) -> PipelinedLayers:
    """Find the layers of a model; of three ways the first that applies is taken.

    1. `root` defines `configure_pipeline(self) -> Sequence[nn.Module]`. The pipelined module is the
       lowest module with a `forward` that contains all of them.
    2. `path` names an `nn.Sequential`.
    3. The only `nn.Sequential` that holds at least 90% of the parameters of `root`: elements are
       counted, those of a shared parameter once.

    Args:
        root: the LightningModule (any module will do).
        path: qualified name of an `nn.Sequential` inside `root`.

    Raises:
        MisconfigurationException: if nothing or several modules fit, if `path` is given together
            with `configure_pipeline`, if either names something that cannot be cut, if a parameter
            has no shape yet, or if the pipelined module is compiled as a whole.
    """
    _refuse_lazy_parameters(root)
    configure_pipeline = getattr(root, "configure_pipeline", None)
    if configure_pipeline is None:
        found = _find_by_share(root) if path is None else _find_by_path(root, path)
    elif path is None:
        found = _find_by_hook(root, configure_pipeline())
    else:
        raise MisconfigurationException(
            f"`module={path!r}` was given, but {class_name(root)} also defines"
            " `configure_pipeline`, which would win: remove one of the two."
        )
    _refuse_compiled(found)
    return found


def keyword_names(layer: nn.Module, num_positional: int = 1) -> frozenset[str]:
    """Return the names of the keyword arguments that `layer` takes from the pipelined call.

    These are the parameters that its original `forward` names and that can be passed by keyword,
    except the first `num_positional` ones, which the chained positional arguments fill. `**kwargs`
    names nothing: a layer that takes anything would silently get what is meant for another one.

    Args:
        layer: any layer, also one that lives on another rank.
        num_positional: how many positional arguments it gets: 1, for layer 0 as many as the
            call has.
    """
    try:
        parameters = list(inspect.signature(original_forward(layer)).parameters.values())
    except (TypeError, ValueError):  # implemented in C without a signature
        return frozenset()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = [p for p in positional[num_positional:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    return frozenset(p.name for p in [*free, *(p for p in parameters if p.kind is p.KEYWORD_ONLY)])


def parameter_counts(found: PipelinedLayers, trained: bool = False) -> list[int]:
    """Return the number of parameter elements of each layer.

    A shared parameter counts where it appears first.

    Args:
        found: the layers.
        trained: count only those that require a gradient.
    """
    seen: set[int] = set()
    counts = []
    for layer in found.layers:
        new = [p for p in layer.parameters() if id(p) not in seen]
        seen.update(id(p) for p in new)
        counts.append(sum(p.numel() for p in new if p.requires_grad or not trained))
    return counts


def _find_by_hook(root: nn.Module, returned: object) -> PipelinedLayers:
    layers = checked_list(root, returned)
    names = {id(module): name for name, module in root.named_modules()}
    name, module = lowest_container(root, layers)
    return PipelinedLayers(
        module=module,
        name=name,
        layers=layers,
        names=tuple(names[id(layer)] for layer in layers),
        root=root,
        keywords=True,
    )


def _find_by_path(root: nn.Module, path: str) -> PipelinedLayers:
    try:
        module = root.get_submodule(path)
    except AttributeError:
        known = [name for name, _ in root.named_modules() if name]
        near = difflib.get_close_matches(path, known, n=3, cutoff=0.5)
        hint = f"did you mean {_quoted(near)}?" if near else f"it has {_quoted(known[:10])}."
        raise MisconfigurationException(
            f"`module={path!r}` names no submodule of {class_name(root)}: {hint}"
        ) from None
    if not isinstance(module, nn.Sequential):
        raise MisconfigurationException(
            f"`module={path!r}` names a {class_name(module)}, expected an nn.Sequential;"
            f" {_sequentials_in(root)} Name one of these, or"
            f" {_HOOK_REMEDY.format(root=class_name(root))}."
        )
    return _from_sequential(root, path, module)


def _find_by_share(root: nn.Module) -> PipelinedLayers:
    shares = _shares(root)
    fitting = [name for name, share in shares.items() if share >= 0.9]
    if len(fitting) == 1:
        module = root.get_submodule(fitting[0])
        assert isinstance(module, nn.Sequential)
        return _from_sequential(root, fitting[0], module)
    if fitting:
        given = f"Several nn.Sequential hold at least 90% of the parameters of {class_name(root)}: "
        given += ", ".join(f"{name!r} ({shares[name]:.1%})" for name in fitting) + "."
    else:
        given = (
            f"No nn.Sequential holds at least 90% of the parameters of {class_name(root)};"
            f" {_sequentials_in(root)}"
        )
    raise MisconfigurationException(
        f"{given} Say which layers are to be cut: name an nn.Sequential with"
        f" `PipelineStrategy(module=...)`, or {_HOOK_REMEDY.format(root=class_name(root))}."
    )


def _from_sequential(root: nn.Module, name: str, module: nn.Sequential) -> PipelinedLayers:
    # Not `named_children`: it drops the second place of a module that stands twice.
    children = module._modules
    if not children:
        raise MisconfigurationException(
            f"`module={name!r}` names an empty nn.Sequential, expected at least one layer per"
            " stage."
        )
    prefix = f"{name}." if name else ""
    return PipelinedLayers(
        module=module,
        name=name,
        layers=tuple(children.values()),
        names=tuple(prefix + child for child in children),
        root=root,
    )


def _shares(root: nn.Module) -> dict[str, float]:
    """Return each `nn.Sequential` in `root` with its share of the parameter elements."""
    total = sum(p.numel() for p in root.parameters())
    return {
        name: sum(p.numel() for p in module.parameters()) / total if total else 0.0
        for name, module in root.named_modules()
        if isinstance(module, nn.Sequential)
    }


def _sequentials_in(root: nn.Module) -> str:
    shares = sorted(_shares(root).items(), key=lambda item: -item[1])
    if not shares:
        return "it has no nn.Sequential at all."
    listed = ", ".join(f"{name!r} ({share:.1%})" for name, share in shares[:10])
    return f"it has {listed}{', ...' if len(shares) > 10 else ''}."


def _refuse_lazy_parameters(root: nn.Module) -> None:
    lazy = [name for name, parameter in root.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise MisconfigurationException(
            f"The parameter {lazy[0]!r} of {class_name(root)} has no shape yet, so its layer can"
            " be neither weighed nor left on another rank: run one batch through the lazy modules"
            " first, or give them their sizes."
        )


def _refuse_compiled(found: PipelinedLayers) -> None:
    for name, module in found.root.named_modules():
        compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if compiled and any(inner is found.module for inner in module.modules()):
            raise MisconfigurationException(
                f"{name or class_name(module)!r}, which runs all layers, is compiled: the graph"
                " would contain the layers of all ranks. Compile each layer instead, e.g."
                " `nn.Sequential(*map(torch.compile, layers))`."
            )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "no submodules"
