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
    """

    parameters: Sequence[nn.Parameter]
    group: Group
    stages: frozenset[int] = field(default_factory=frozenset)


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
            if self._gradients[index] is None:
                self._gradients[index] = torch.zeros_like(parameters[index])
        self._trained = trained
        present = [float(gradients[index] is not None) for index in trained]
        self._present = torch.tensor(present)
        self._under_way: list[Pending] = []
        if trained:
            self._under_way.append(group.sum(self._present))
        self._packs: list[tuple[Tensor, list[Tensor]]] = []
        for pieces in buckets([local_part(self._gradients[i]) for i in trained]):
            packed = pieces[0] if len(pieces) == 1 else torch.cat([p.reshape(-1) for p in pieces])
            if len(pieces) > 1:
                self._packs.append((packed, pieces))
            self._under_way.append(group.sum(packed))

    def wait(self) -> list[Tensor | None]:
        """The sums, in the order of the parameters; raises PeerLostError."""
        for pending in self._under_way:
            pending.wait()
        with torch.no_grad():
            for packed, pieces in self._packs:
                unpack(packed, pieces)
        for index, somewhere in zip(self._trained, self._present.tolist(), strict=True):
            if not somewhere:
                self._gradients[index] = None
        return self._gradients


class StageReductions:
    """The sums of one batch on one rank, started as its stages come to their ends.

    Args:
        reductions: In the same order on all ranks.
    """

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._due = {reduction: set(reduction.stages) for reduction in reductions}
        self._started: dict[Reduction, GradientSum] = {}

    def end_stage(self, stage: int) -> None:
        """The last backward of a stage is done: start the sums that have waited for it."""
        for reduction, due in self._due.items():
            if stage in due:
                due.remove(stage)
                if not due:
                    gradients = [parameter.grad for parameter in reduction.parameters]
                    self._started[reduction] = GradientSum(
                        reduction.parameters, gradients, reduction.group
                    )

    def finish(self) -> None:
        """Give the parameters the sums; all stages are at their ends."""
        for reduction in self._due:  # in one order on all ranks
            under_way = self._started.pop(reduction, None)
            if under_way is not None:
                sums = zip(reduction.parameters, under_way.wait(), strict=True)
                for parameter, gradient in sums:
                    parameter.grad = gradient


def local_part(tensor: Tensor | None) -> Tensor:
    """What this rank has of a tensor: all, or its part of a DTensor."""
    assert tensor is not None
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def buckets(tensors: Sequence[Tensor], size: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Put tensors together to buckets of about one size.

    Args:
        tensors: In order.
        size: In bytes. A larger tensor is cut, if it is contiguous.

    Yields:
        Tensors of one dtype and device, together at most ``size``, or one, a view of a part.
    """
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        large = tensor.nbytes > size // 2
        fits = bucket and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (large or not fits or filled + tensor.nbytes > size):
            yield bucket
            bucket, filled = [], 0
        if not large:
            bucket.append(tensor)
            filled += tensor.nbytes
        elif tensor.is_contiguous():
            yield from ([piece] for piece in torch.split(tensor.view(-1), size // tensor.itemsize))
        else:
            yield [tensor]
    if bucket:
        yield bucket


def unpack(packed: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy a bucket's contents back to where they came from."""
    sizes = [piece.numel() for piece in pieces]
    for piece, part in zip(pieces, torch.split(packed, sizes), strict=True):
        piece.copy_(part.view(piece.shape))
