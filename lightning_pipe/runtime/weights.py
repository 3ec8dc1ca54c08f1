"""The versions of a stage's weights that are still to be read (weight stashing).

The parameters always hold the newest version. An asynchronous schedule also runs forwards and
backwards that must see the weights as they were some updates ago, so a version is read through
*aliases*: leaf tensors over its memory, which stand in the parameters' places in the layers for as
long as the forward or the backward runs. What autograd saves, and what a recomputation finds in the
layers, is then that version; the gradients land on the aliases.

An update works in place. Before it, the parameters move to a copy of their memory if anyone still
reads the old version, which its aliases then keep (copy on write). If no one does, the aliases go
on to the new version, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.runtime.reduction import local_part

Gradients = list[tuple[nn.Parameter, Tensor]]


class WeightStore:
    """The weights of one stage, by version.

    Attributes:
        newest: Version of the parameters: updates since the fill began.
        peak_versions: Most versions held at a time.
        peak_bytes: Most bytes of weights held at a time, frozen ones included.

    Args:
        layers: The stage's.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self.newest = 0
        self.peak_versions = self.peak_bytes = 0
        self._parameters: list[nn.Parameter] = []  # that are trained
        self._places: list[list[tuple[dict[str, Any], str]]] = []  # of each, in the modules
        self._aliases: dict[int, list[nn.Parameter]] = {}  # by version

    def begin_fill(self) -> None:
        """Call the weights as they are now version 0; nothing older can be read.

        Raises:
            MisconfigurationException: A parameter has hooks, which gradients on aliases pass by.
        """
        places: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
        for module in {module: None for layer in self._layers for module in layer.modules()}:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    places.setdefault(parameter, []).append((module._parameters, name))
        self._parameters, self._places = list(places), list(places.values())
        for parameter, ((_, name), *_) in places.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise MisconfigurationException(
                    f"A parameter {name!r} of shape {tuple(parameter.shape)} has gradient hooks, "
                    "which an asynchronous schedule does not run: gradients belong to versions of "
                    "a weight. Use the hook `on_before_optimizer_step` instead."
                )
        self.newest, self._aliases = 0, {}
        self._measure()

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those that are trained, in the order of :meth:`take_gradients`."""
        return self._parameters

    def end_fill(self) -> None:
        """Let go of all versions but the newest."""
        self._aliases = {}

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Inside, the layers have the weights of a version.

        Raises:
            RuntimeError: It is not held.
        """
        aliases = self._read(version)
        self._put(aliases)
        try:
            yield
        finally:
            self._put(self._parameters)

    def take_gradients(self, version: int) -> list[Tensor | None]:
        """Take what backwards under :meth:`reading` have left, in the order of the parameters."""
        aliases = self._read(version)
        gradients = [alias.grad for alias in aliases]
        for alias in aliases:
            alias.grad = None
        for parameter in self._parameters:
            if parameter.grad is not None:
                raise MisconfigurationException(
                    f"A layer used a parameter of shape {tuple(parameter.shape)} that it holds "
                    "elsewhere than as an attribute (in a list, or a closure), where the weights "
                    "of an earlier version cannot take its place. Read parameters as attributes."
                )
        return gradients

    def with_parameters(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Pair gradients, in the order of the parameters, with these; leave out missing ones."""
        pairs = zip(self._parameters, gradients, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]

    def advance(self, keeps: int, in_flight: bool = False) -> None:
        """Make the parameters ready for the next update, in place.

        Args:
            keeps: The oldest version that will be read afterwards.
            in_flight: Whether graphs of forwards are waiting for their backward.

        Raises:
            MisconfigurationException: These graphs should see the update, and do not.
        """
        newest = self._aliases.get(self.newest)
        self._aliases = {v: aliases for v, aliases in self._aliases.items() if v >= keeps}
        if keeps <= self.newest:
            self._read(self.newest)  # its aliases keep the memory
            for parameter in self._parameters:
                _move(parameter, local_part(parameter).data.clone())
        elif newest is not None:
            self._go_on_with(newest, in_flight)
        self.newest += 1
        self._measure()

    def _go_on_with(self, aliases: list[nn.Parameter], in_flight: bool) -> None:
        """Let the aliases of the newest version be those of the next one."""
        for parameter, alias in zip(self._parameters, aliases, strict=True):
            if local_part(alias).data_ptr() != local_part(parameter).data_ptr():
                # Its layer has moved it, as recurrent layers do for cuDNN.
                if in_flight:
                    raise MisconfigurationException(
                        f"A layer moves its weight of shape {tuple(parameter.shape)} to other "
                        "memory in its forward (as LSTM and GRU do on GPUs), where backwards do "
                        "not see the updates that weight_stashing=False wants them to see. Use "
                        "weight_stashing=True."
                    )
                _move(alias, local_part(parameter).data)
        self._aliases[self.newest + 1] = aliases

    def _read(self, version: int) -> list[nn.Parameter]:
        """The aliases of a version."""
        aliases = self._aliases.get(version)
        if aliases is None:
            if version != self.newest:
                held = sorted({*self._aliases, self.newest})
                raise RuntimeError(
                    f"Version {version} of the weights is to be read, but only versions {held} "
                    "are held: this is an error in the schedule. Please report it."
                )
            # Over `.data`: a version counter of their own, so that updates in place, which come
            # after the last read, or which the schedule wants, are no error to autograd.
            aliases = [_alias(parameter) for parameter in self._parameters]
            self._aliases[version] = aliases
        return aliases

    def _put(self, tensors: Sequence[nn.Parameter]) -> None:
        for tensor, places in zip(tensors, self._places, strict=True):
            for parameters, name in places:
                parameters[name] = tensor

    def _measure(self) -> None:
        versions = len({*self._aliases, self.newest})
        if versions > self.peak_versions:
            held: list[Tensor] = [p for layer in self._layers for p in layer.parameters()]
            for aliases in self._aliases.values():
                held += aliases
            self.peak_versions, self.peak_bytes = versions, count_bytes(held)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """A leaf over the same memory; of a DTensor one over that of this rank's part."""
    data = local_part(parameter).data
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        data = DTensor.from_local(
            data, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return nn.Parameter(data)


def _move(parameter: nn.Parameter, data: Tensor) -> None:
    """Let a parameter have other memory."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = data  # `.data =` would leave it where it is
    else:
        parameter.data = data


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of weights on this rank; memory that several refer to counts once."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
