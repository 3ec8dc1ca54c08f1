"""Layers of which each replica holds an equal part of every parameter (ZeRO-3).

That is torch's ``fully_shard`` (FSDP2), on each layer by itself, over the replicas. Parameters are
gathered for a round, and gradients divided after its last backward; or, if memory is short, both
for every micro-batch and layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate


class FullShards:
    """The layers of this rank, divided. Constructing it is collective over the replicas.

    Args:
        stages: The layers of each stage of this rank.
        mesh: Of the replicas.
        ignored: Parameters that stay whole, since other stages have them, too.
        reshards: Whether a layer is gathered and freed for each micro-batch.

    Attributes:
        whole: By stage, parameters that stay whole, too, since several of its layers have them.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Module]],
        mesh: DeviceMesh,
        ignored: Collection[nn.Parameter],
        reshards: bool,
    ) -> None:
        self._reshards, self._mesh = reshards, mesh
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        self._stages: dict[int, list[Any]] = {}
        self.whole = {stage: _in_several_places(layers) for stage, layers in stages.items()}
        kept = {*ignored, *(p for parameters in self.whole.values() for p in parameters)}
        for stage, layers in stages.items():
            divided = [m for m in layers if any(p not in kept for p in m.parameters())]
            self._stages[stage] = divided
            for layer in divided:
                _refuse_hooks(layer)
                self._classes[layer] = type(layer)
                divided_layer: Any = layer
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshards, ignored_params=kept)
                # Losses are divided by the samples of all replicas: sums are means already.
                divided_layer.set_gradient_divide_factor(1.0)
                divided_layer.set_force_sum_reduction_for_comms(True)
                # What one replica uses another one may not.
                divided_layer.set_reduce_scatter_unused_params(True)

    def before_backward(self, stage: int, last: bool) -> None:
        """A backward of a stage begins.

        Args:
            stage: Which.
            last: Whether it is the last one of the round.
        """
        for layer in self._stages.get(stage, ()):
            layer.set_requires_gradient_sync(last or self._reshards, recurse=False)
            layer.set_reshard_after_backward(last or self._reshards, recurse=False)
            layer.set_is_last_backward(last)

    def after_backward(self, stage: int) -> None:
        """See :class:`~lightning_pipe.runtime.training.Shards`."""

    def end_round(self) -> None:
        """A round, or an evaluation, has ended: hold only parts from now on."""
        for layer in self._layers:
            layer.reshard()

    def gather(self) -> None:
        """Hold all until :meth:`release`. Collective over the replicas.

        They may call the layers unequally often then, as they do where data is not divided evenly.
        """
        for layer in self._layers:
            layer.set_reshard_after_forward(False, recurse=False)
            layer.unshard()

    def release(self) -> None:
        """Undo :meth:`gather`."""
        for layer in self._layers:
            layer.set_reshard_after_forward(self._reshards, recurse=False)
        self.end_round()

    def close(self) -> None:
        """Make ordinary layers of them, with whole parameters. Collective over the replicas."""
        known: dict[int, nn.Parameter] = {}  # a layer may have one in several places
        kept: list[Tensor] = []  # so that no id is another's
        for layer in self._layers:
            layer.reshard()
            for module in layer.modules():
                for name, parameter in list(module._parameters.items()):
                    if not isinstance(parameter, DTensor):
                        continue
                    kept.append(parameter)
                    if id(parameter) not in known:
                        whole = nn.Parameter(self._whole(parameter), parameter.requires_grad)
                        known[id(parameter)] = whole
                    setattr(module, name, known[id(parameter)])
            _forget(layer)
            layer.__class__ = self._classes[layer]
        self._stages = {}

    @torch.no_grad()
    def _whole(self, parameter: DTensor) -> Tensor:
        """A parameter that is not divided among replicas: as it was, maybe cut by tensor ranks."""
        mesh, axes = parameter.device_mesh, self._mesh.mesh_dim_names or ()
        if mesh.ndim == 1:
            return parameter.full_tensor() if mesh == self._mesh else parameter
        (axis,) = ((mesh.mesh_dim_names or ()).index(name) for name in axes)
        placements = list(parameter.placements)
        placements[axis] = Replicate()
        gathered = parameter.redistribute(placements=placements)
        del placements[axis]
        (other,) = (name for name in mesh.mesh_dim_names or () if name not in axes)
        return DTensor.from_local(gathered.to_local(), mesh[other], placements, run_check=False)

    @property
    def _layers(self) -> Iterator[Any]:
        return (layer for layers in self._stages.values() for layer in layers)


def _in_several_places(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Parameters that several layers have, or one that stands in several places."""
    places = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    return [parameter for parameter, count in places.items() if count > 1]


def _refuse_hooks(layer: nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise MisconfigurationException(
                f"A parameter {name!r} of shape {tuple(parameter.shape)} has gradient hooks, and "
                "with zero_stage=3 its parts take its place, which have none. Use the hook "
                "`on_before_optimizer_step`, or zero_stage=2."
            )


def _forget(layer: Any) -> None:
    """Take away what ``fully_shard`` has added to a layer; torch offers no way back."""
    state = layer._get_fsdp_state()
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()
    _module_state_mapping.pop(layer, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        layer.__dict__.pop(key, None)
