"""Gradients of which each replica of a stage keeps its share (ZeRO-2).

A gradient goes to the replica that updates its parameter as soon as a micro-batch's backward has
it, and is added up there; the others free it at once. Gradients travel in buckets of constant size,
of which a few are under way at a time. The replicas go through the buckets in one order, whatever
the order in which their gradients come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pipe.runtime.groups import Group, Pending
from lightning_pipe.runtime.reduction import as_parameter, local_part

_BUCKET_BYTES = 4 * 2**20
_UNDER_WAY = 2


@dataclass(eq=False)
class _Bucket:
    owner: int
    place: int  # in the order in which buckets are sent
    parameters: list[nn.Parameter]
    missing: int = 0  # gradients of the running backward


class GradientShards:
    """The gradients of this rank's stages.

    Args:
        stages: The parameters of each, in the same order on all replicas.
        owners: To which replica each belongs.
        replicas: The ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        owners: Mapping[nn.Parameter, int],
        replicas: Group,
    ) -> None:
        self._stages = {
            stage: StageGradients(parameters, owners, replicas)
            for stage, parameters in stages.items()
            if parameters
        }

    def before_backward(self, stage: int, last: bool) -> None:
        """See :class:`~lightning_pipe.runtime.training.Shards`."""
        if stage in self._stages:
            self._stages[stage].begin()

    def after_backward(self, stage: int) -> None:
        """See :class:`~lightning_pipe.runtime.training.Shards`."""
        if stage in self._stages:
            self._stages[stage].end()

    def end_round(self) -> None:
        """See :class:`~lightning_pipe.runtime.training.Shards`."""
        for gradients in self._stages.values():
            gradients.deliver()

    def close(self) -> None:
        """Leave the parameters alone."""
        for gradients in self._stages.values():
            gradients.close()


class StageGradients:
    """The gradients of one stage.

    Args:
        parameters: Of the stage, in the same order on all replicas.
        owners: To which replica each belongs.
        replicas: The ranks.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owners: Mapping[nn.Parameter, int],
        replicas: Group,
    ) -> None:
        self._replicas = replicas
        self._buckets = _fill(parameters[::-1], owners)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._under_way: deque[tuple[Pending, _Bucket, Tensor]] = deque()
        self._next = len(self._buckets)  # to be sent; no backward is running
        self._handles: dict[nn.Parameter, Any] = {}

    def close(self) -> None:
        """Leave the parameters alone."""
        for handle in self._handles.values():
            handle.remove()

    def begin(self) -> None:
        """A micro-batch's backward begins."""
        self._next = 0
        for bucket in self._buckets:
            trained = [parameter for parameter in bucket.parameters if parameter.requires_grad]
            bucket.missing = len(trained)
            for parameter in trained:
                if parameter not in self._handles:  # it may have been unfrozen
                    hook: Any = parameter.register_post_accumulate_grad_hook
                    self._handles[parameter] = hook(self._take)

    def end(self) -> None:
        """It has ended: what is left is sent, and all that was sent has arrived."""
        while self._next < len(self._buckets):
            self._send()
        while self._under_way:
            self._receive()

    def deliver(self) -> None:
        """Give this replica's parameters the sums over micro-batches and replicas."""
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums = {}

    def _take(self, parameter: nn.Parameter) -> None:
        """A gradient is there."""
        bucket = self._bucket_of[parameter]
        if bucket.place < self._next:
            raise MisconfigurationException(
                f"A parameter of shape {tuple(parameter.shape)} got a gradient twice in one "
                "backward, as in a layer that calls checkpoint(use_reentrant=True). With "
                "zero_stage=2 the first one has been sent already. Use use_reentrant=False, or "
                "zero_stage=1."
            )
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        while len(self._under_way) >= _UNDER_WAY:
            self._receive()
        trained = [parameter for parameter in bucket.parameters if parameter.requires_grad]
        if not trained:
            return
        present = [float(p.grad is not None) for p in trained]
        pieces = [
            local_part(torch.zeros_like(p) if p.grad is None else as_parameter(p.grad, p)).reshape(
                -1
            )
            for p in trained
        ]
        for parameter in trained:
            parameter.grad = None
        packed = torch.cat([*pieces, pieces[0].new_tensor(present)])
        self._under_way.append((self._replicas.sum_to(packed, bucket.owner), bucket, packed))

    @torch.no_grad()
    def _receive(self) -> None:
        pending, bucket, packed = self._under_way.popleft()
        pending.wait()
        if bucket.owner != self._replicas.index:
            return
        trained = [parameter for parameter in bucket.parameters if parameter.requires_grad]
        sizes = [local_part(parameter).numel() for parameter in trained]
        *parts, present = torch.split(packed, [*sizes, len(sizes)])
        for parameter, part, somewhere in zip(trained, parts, present.tolist(), strict=True):
            if parameter in self._sums:
                local_part(self._sums[parameter]).add_(part.view(local_part(parameter).shape))
            elif somewhere:
                total = self._sums[parameter] = torch.empty_like(parameter, requires_grad=False)
                local_part(total).copy_(part.view(local_part(parameter).shape))


def _fill(parameters: Sequence[nn.Parameter], owners: Mapping[nn.Parameter, int]) -> list[_Bucket]:
    """Put neighbours of one owner and one type together, up to a size."""
    buckets: list[_Bucket] = []
    open_ones: dict[tuple[int, torch.dtype], _Bucket] = {}
    for parameter in parameters:
        key = owners[parameter], parameter.dtype
        bucket = open_ones.get(key)
        size = sum(p.nbytes for p in bucket.parameters) if bucket is not None else 0
        if bucket is None or size + parameter.nbytes > _BUCKET_BYTES:
            bucket = open_ones[key] = _Bucket(owners[parameter], len(buckets), [])
            buckets.append(bucket)
        bucket.parameters.append(parameter)
    return buckets
