"""Which parameters several ranks hold, and which ranks these are.

Replicas hold the same stages. A tied weight, as of an embedding and a head, is held by each stage
that has it. What is outside the layers is held by all ranks. Copies are equal at first, and get
equal gradients, so that equal optimizers keep them equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.partition import PipelinedLayers, stage_slices, tied_parameters
from lightning_pipe.runtime.groups import Group
from lightning_pipe.runtime.reduction import Reduction, local_part
from lightning_pipe.runtime.training import Shards, Sharing
from lightning_pipe.schedule import Placement


class Groups(Protocol):
    """Gives the ranks of all replicas that are at some places of their pipelines."""

    tensor: Group

    def over(self, pipeline_ranks: Sequence[int]) -> Group:
        """See :class:`~lightning_pipe.runtime.groups.GlooGroups`. Collective."""
        ...


class SharedParameters:
    """What one rank shares with others. Constructing it is collective.

    Args:
        found: The layers, already sharded.
        sizes: The number of layers of each stage.
        placement: Which rank of a pipeline holds which stage.
        rank: Of the pipeline.
        outside: Parameters outside the layers.
        groups: Make groups of ranks.

    Attributes:
        replicas: The ranks that hold this rank's stages.
        layers: Of each stage of this rank.
        of_stage: Parameters that only replicas of that stage hold.
    """

    def __init__(
        self,
        found: PipelinedLayers,
        sizes: Sequence[int],
        placement: Placement,
        rank: int,
        outside: Sequence[nn.Parameter],
        groups: Groups,
    ) -> None:
        self._outside, self._tensor_group = list(outside), groups.tensor
        own, layers_of = placement.stages_of(rank), stage_slices(sizes)
        self.replicas = [groups.over([place]) for place in range(placement.num_ranks)][rank]
        everywhere = groups.over(range(placement.num_ranks)) if outside else self.replicas
        self._reductions = [Reduction(self._outside, everywhere, frozenset(own), over_stages=True)]
        self._holders: dict[int, int] = {id(p): placement.num_ranks for p in outside}
        for parameter, stages in tied_parameters(found, sizes):
            ranks = sorted({placement.rank_of[stage] for stage in stages})
            group = groups.over(ranks)
            self._holders[id(parameter)] = len(ranks)
            if rank in ranks:
                here = frozenset(stages) & frozenset(own)
                self._reductions.append(Reduction([parameter], group, here, over_stages=True))
        self.layers = {s: [found.layers[layer] for layer in layers_of[s]] for s in own}
        self.of_stage: dict[int, list[nn.Parameter]] = {}
        apart = set(self._holders)
        for stage, layers in self.layers.items():
            parameters = [p for p in _parameters(layers) if id(p) not in apart]
            apart.update(map(id, parameters))
            self.of_stage[stage] = parameters

    @property
    def apart(self) -> list[nn.Parameter]:
        """This rank's parameters that other stages, or all ranks, have as well."""
        return [parameter for reduction in self._reductions for parameter in reduction.parameters]

    def sharing(
        self,
        shards: Shards | None = None,
        whole: Mapping[int, Sequence[nn.Parameter]] = MappingProxyType({}),
    ) -> Sharing:
        """What the runtime needs to know.

        Args:
            shards: Bring the gradients of the stages together, if anything but sums does.
            whole: By stage, parameters whose gradients are summed even so.
        """
        reductions = self._all_reductions()
        if shards is not None:
            stages = whole.items()
            left = [Reduction(list(own), self.replicas, frozenset([s])) for s, own in stages]
            reductions = [*self._reductions, *left]
        several = [r for r in reductions if r.group.size > 1 and r.parameters]
        return Sharing(self._outside, several, self.replicas, shards)

    def _all_reductions(self) -> list[Reduction]:
        stages = self.of_stage.items()
        own = [Reduction(parameters, self.replicas, frozenset([s])) for s, parameters in stages]
        return [*self._reductions, *own]

    def holders(self, parameter: Tensor) -> int:
        """How many ranks of a pipeline hold a parameter."""
        return self._holders.get(id(parameter), 1)

    def make_equal(self) -> None:
        """Give all who hold a parameter or a layer's buffer the first one's values. Collective.

        Ranks that share a layer hold all that is no DTensor alike, too.
        """
        done: set[int] = set()
        for reduction in self._all_reductions():
            for parameter in reduction.parameters:
                if id(parameter) not in done:
                    done.add(id(parameter))
                    self._give_to_all(parameter, reduction.group)
        for buffer in (
            buffer
            for layers in self.layers.values()
            for layer in layers
            for buffer in layer.buffers()
        ):
            self._give_to_all(buffer, self.replicas)

    def _give_to_all(self, tensor: Tensor, group: Group) -> None:
        values = local_part(tensor).data
        if 0 in values.stride() and values.numel() > 1:  # expanded: a constant
            return
        if not isinstance(tensor, DTensor):
            self._tensor_group.broadcast(values, 0).wait()
        group.broadcast(values, 0).wait()


def _parameters(layers: Collection[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())
