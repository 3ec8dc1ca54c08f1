"""Of what enters a stage, each rank of a tensor-parallel group keeps its share (the P_a of ZeRO-R).

Tensor parallelism gives all T ranks of the group the same activations between layers. With
activation checkpointing these are what is kept for the backward, and need to be kept once, not T
times. Each rank keeps 1/T, and before layers run again the group gathers the shares.

No rank waits for ever: the ranks of a group are at the same place of their pipelines, so they run
the same program, and in it the same layers, in one order. Whether a tensor is cut is decided by
what is the same on all of them (its type, dtype and shape, never its values, strides or the memory
that is free), so all gather the same tensors in the same order, among the collectives that
the layers themselves run on the group. Where one fails, the others' gather ends with the group's
timeout.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

MIN_BYTES = 1 << 16
"""Of a tensor that is cut: a gather of less costs more time than its memory is worth."""


class ActivationPartition:
    """Cuts tensors that all ranks of a group have, and gathers them again.

    Args:
        all_gather: Collective: gives the bytes of all ranks, one after the other, given a rank's
            own, as many on each.
        rank: In the group.
        size: Of the group.
        min_bytes: Tensors with fewer are kept whole.
    """

    def __init__(
        self,
        all_gather: Callable[[Tensor], Tensor],
        rank: int,
        size: int,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self._all_gather, self._rank, self._size = all_gather, rank, size
        self._min_bytes = min_bytes

    def takes(self, value: Any) -> bool:
        """Whether something is cut: a plain tensor of floating-point numbers, and large."""
        return (
            type(value) is Tensor  # not a DTensor: each rank may have its own part already
            and value.layout is torch.strided
            and value.is_floating_point()
            and value.numel() * value.element_size() >= self._min_bytes
        )

    def cut(self, tensor: Tensor) -> Tensor:
        """This rank's share, in memory of its own: ceil(numel / size) elements, the last padded."""
        with torch.no_grad():
            flat = tensor.detach().reshape(-1)
            length = -(-flat.numel() // self._size)
            share = flat.new_zeros(length)
            own = flat[self._rank * length : (self._rank + 1) * length]
            share[: own.numel()] = own
            return share

    def gather(self, share: Tensor, shape: torch.Size) -> Tensor:
        """The whole, contiguous. Collective."""
        with torch.no_grad():
            whole = self._all_gather(share.detach().view(torch.uint8)).view(share.dtype)
            return whole[: shape.numel()].view(shape)

    def check(self, tensor: Tensor) -> None:
        """Refuse a tensor that is not the same on all ranks. Collective.

        Raises:
            MisconfigurationException: On every rank of the group.
        """
        whole = self.gather(self.cut(tensor), tensor.shape)
        ours = tensor.detach().contiguous()
        same = torch.equal(whole.view(-1).view(torch.uint8), ours.view(-1).view(torch.uint8))
        # A rank whose own share alone differs does not see it by itself.
        everywhere = self._all_gather(torch.tensor([same], dtype=torch.uint8, device=tensor.device))
        if not everywhere.all():
            raise MisconfigurationException(
                f"A tensor of shape {tuple(tensor.shape)} enters a stage or a layer with different "
                "values on the ranks of its tensor-parallel group, so that none of them can keep "
                "a share for the others (partition_activations=True). Let layers return what is "
                "the same on all ranks (output_layouts=Replicate()), or use "
                "partition_activations=False."
            )


def partition_over(
    group: dist.ProcessGroup, min_bytes: int = MIN_BYTES
) -> ActivationPartition | None:
    """Cut activations over a tensor-parallel group; ``None`` if it is a single rank."""

    def all_gather(own: Tensor) -> Tensor:
        everything = own.new_empty(own.numel() * size)
        dist.all_gather_into_tensor(everything, own, group=group)
        return everything

    size = dist.get_world_size(group)
    if size == 1:
        return None
    return ActivationPartition(all_gather, dist.get_rank(group), size, min_bytes)
