"""Which process does what: one mesh of pipeline, data and tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pipeline_parallel", "data_parallel", "tensor_parallel")


@dataclass(frozen=True)
class Grid:
    """The ranks of the world by what they do.

    Ranks are numbered with the tensor axis innermost and the pipeline outermost, and nodes hold
    consecutive ranks. So what communicates most (in every layer) stays inside a node for longest,
    then what does once for each update (replicas of a stage), and nodes are bridged by what sends
    least: an activation, from one stage to the next (Narayanan et al. 2021, section 3).

    Attributes:
        pipeline: Ranks in a pipeline.
        data: Replicas: pipelines with data of their own.
        tensor: Ranks that share each layer of a replica.
        rank: This process's, in the world.
    """

    pipeline: int
    data: int = 1
    tensor: int = 1
    rank: int = 0

    @property
    def pipeline_rank(self) -> int:
        """This process's place in its pipeline."""
        return self.rank // (self.data * self.tensor)

    @property
    def data_rank(self) -> int:
        """Number of this process's replica."""
        return self.rank // self.tensor % self.data

    @property
    def tensor_rank(self) -> int:
        """Which part of its layers this process has."""
        return self.rank % self.tensor

    @property
    def size(self) -> int:
        """Of the world."""
        return self.pipeline * self.data * self.tensor

    def at(self, pipeline: int, data: int, tensor: int) -> int:
        """The rank at a place."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def pipelines(self) -> list[list[int]]:
        """The ranks of every pipeline, in order of their stages; the first replica's come first.

        There are as many in a replica as ranks share a layer.
        """
        return [
            [self.at(stage, data, tensor) for stage in range(self.pipeline)]
            for data, tensor in product(range(self.data), range(self.tensor))
        ]

    def holders(self, pipeline_ranks: Sequence[int]) -> list[list[int]]:
        """The ranks that hold the same parameters, if some pipeline ranks do; by tensor rank."""
        return [
            [self.at(p, d, t) for p in sorted(pipeline_ranks) for d in range(self.data)]
            for t in range(self.tensor)
        ]

    def replicas(self) -> list[list[int]]:
        """The ranks of every replica: those that load the same data."""
        return [
            [self.at(p, d, t) for p in range(self.pipeline) for t in range(self.tensor)]
            for d in range(self.data)
        ]

    def __str__(self) -> str:
        """This process, for errors."""
        place = f"pipeline rank {self.pipeline_rank}"
        place += f", replica {self.data_rank}" if self.data > 1 else ""
        return place + (f", tensor rank {self.tensor_rank}" if self.tensor > 1 else "")


def make_mesh(device: torch.device, grid: Grid, for_layers: bool = False) -> DeviceMesh:
    """The mesh of the whole world, pipeline outermost. Collective.

    Lightning users find the other two axes under these names in ``self.device_mesh``.

    Args:
        device: Of this rank.
        grid: Of the world.
        for_layers: Whether layers communicate over it. On GPUs they do so by NCCL, and all else is
            staged through the host, by gloo.
    """
    sizes = (grid.pipeline, grid.data, grid.tensor)
    if not for_layers or device.type != "cuda":
        return init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    between_layers: dict[Any, Any] = dict.fromkeys(AXES[1:], "nccl")
    return init_device_mesh(
        device.type, sizes, mesh_dim_names=AXES, backend_override=between_layers
    )
