"""Sum the gradients of parameters that several ranks hold: once for each update.

Replicas of a stage hold all of its parameters, the stages that share a tied weight hold that one,
and all ranks hold what is outside the layers. It is one mechanism: a set of parameters, the group
of ranks that hold them, and the stages whose backwards contribute.

A sum is started as soon as the last backward that contributes is done, and waited for where the
update needs it, so it overlaps what the rank still has to do, and the cool-down of the ranks that
have more. Messages are of constant size (the constant buffers of ZeRO-R, Rajbhandari et al. 2020):
small gradients travel together, large ones in pieces, from where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.runtime.groups import Group, Pending

BUCKET_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class Reduction:
    """Parameters whose gradients are summed over a group of ranks.

    Attributes:
        parameters: In the same order on all ranks of the group.
        group: The ranks that hold them.
        stages: This rank's, whose backwards contribute.
        over_stages: Whether ranks of different stages are among them, whose stages end in
            different orders.
    """

    parameters: Sequence[nn.Parameter]
    group: Group
    stages: frozenset[int] = field(default_factory=frozenset)
    over_stages: bool = False


class GradientSum:
    """A sum of gradients over the ranks of a group, under way.

    A gradient that no rank has stays missing; one that only some ranks have counts as zero on the
    others. Which there are travels along.

    Args:
        parameters: In the same order on all ranks. Frozen ones are left out.
        gradients: This rank's, or ``None`` for each that it does not have.
        group: The ranks.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        group: Group,
    ) -> None:
        self._gradients = list(gradients)
        trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        for index in trained:
            gradient, parameter = self._gradients[index], parameters[index]
            self._gradients[index] = (
                torch.zeros_like(parameter)
                if gradient is None
                else as_parameter(gradient, parameter)
            )
        self._trained = trained
        present = [float(gradients[index] is not None) for index in trained]
        self._present = torch.tensor(present)
        self._under_way: list[Pending] = []
        if trained:
            self._under_way.append(group.sum(self._present))
        self._buckets = list(buckets([local_part(self._gradients[i]) for i in trained]))
        self._under_way += [group.sum(bucket.packed) for bucket in self._buckets]

    def wait(self) -> list[Tensor | None]:
        """The sums, in the order of the parameters; raises PeerLostError."""
        for pending in self._under_way:
            pending.wait()
        for bucket in self._buckets:
            bucket.unpack()
        for index, somewhere in zip(self._trained, self._present.tolist(), strict=True):
            if not somewhere:
                self._gradients[index] = None
        return self._gradients


class StageReductions:
    """The sums of one batch on one rank, started as its stages come to their ends.

    The ranks of a group must start its sums in one order. Replicas do, since they run the same
    program. Ranks of different stages start them in the order of the list: each as soon as those
    before it in the same group have started.

    Args:
        reductions: In the same order on all ranks.
    """

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._due = {reduction: set(reduction.stages) for reduction in reductions}
        self._started: dict[Reduction, GradientSum] = {}

    def end_stage(self, stage: int) -> None:
        """The last backward of a stage is done: start the sums that have waited for it."""
        waiting: set[Group] = set()
        for reduction, due in self._due.items():
            due.discard(stage)
            if reduction in self._started:
                continue
            if due or (reduction.over_stages and reduction.group in waiting):
                waiting.add(reduction.group)
                continue
            gradients = [parameter.grad for parameter in reduction.parameters]
            self._started[reduction] = GradientSum(reduction.parameters, gradients, reduction.group)

    def finish(self) -> None:
        """Give the parameters the sums; all stages are at their ends."""
        for reduction in self._due:  # in one order on all ranks
            under_way = self._started.pop(reduction, None)
            if under_way is not None:
                sums = zip(reduction.parameters, under_way.wait(), strict=True)
                for parameter, gradient in sums:
                    parameter.grad = gradient


def as_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A dense gradient of which each rank has the part that it has of the parameter. Collective.

    torch leaves some as parts of a sum, others not: that depends on the layer.
    """
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def local_part(tensor: Tensor | None) -> Tensor:
    """What this rank has of a tensor: all, or its part of a DTensor."""
    assert tensor is not None
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Bucket:
    """Tensors of one dtype and device that travel together.

    Attributes:
        packed: Their values, one after the other; a single one itself.

    Args:
        tensors: At least one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        single = len(tensors) == 1
        self.packed = tensors[0] if single else torch.cat([t.reshape(-1) for t in tensors])

    def unpack(self) -> None:
        """Give the tensors the values."""
        if len(self._tensors) > 1:
            with torch.no_grad():
                parts = torch.split(self.packed, [tensor.numel() for tensor in self._tensors])
                for tensor, part in zip(self._tensors, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))


def buckets(tensors: Sequence[Tensor], size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Put tensors together to buckets of about one size.

    Args:
        tensors: In order.
        size: In bytes. A larger tensor is cut, if it is contiguous.
    """
    together: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        large = tensor.nbytes > size // 2
        fits = together and (tensor.dtype, tensor.device) == (together[0].dtype, together[0].device)
        if together and (large or not fits or filled + tensor.nbytes > size):
            yield Bucket(together)
            together, filled = [], 0
        if not large:
            together.append(tensor)
            filled += tensor.nbytes
        elif tensor.is_contiguous():
            for piece in torch.split(tensor.view(-1), size // tensor.itemsize):
                yield Bucket([piece])
        else:
            yield Bucket([tensor])
    if together:
        yield Bucket(together)
