"""How fast two devices are connected: inside a node, and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf

from lightning_pipe.runtime.mesh import Grid


@dataclass(frozen=True)
class Links:
    """The links between devices. Each pair has its own: several are not slower than one.

    Nodes hold consecutive ranks, which are numbered as `lightning_pipe.runtime.mesh.Grid` says.

    Attributes:
        bandwidth: Bytes per second and direction, between devices of one node.
        latency: Seconds from a send until a message without content has arrived.
        devices_per_node: ``None``: all devices are in one node.
        node_bandwidth: Between devices of different nodes. Default: as inside a node.
    """

    bandwidth: float = inf
    latency: float = 0.0
    devices_per_node: int | None = None
    node_bandwidth: float | None = None

    @property
    def fastest(self) -> float:
        """The bandwidth that no link exceeds."""
        return max(self.bandwidth, self.node_bandwidth or 0.0)

    def hold(self, ranks: int) -> bool:
        """Say whether so many ranks fill whole nodes, or a part of one."""
        size = self.devices_per_node
        return size is None or ranks <= size or ranks % size == 0

    def between(self, grid: Grid, first: int, second: int) -> float:
        """Give the bandwidth between two places of a pipeline, in the slowest of all pipelines."""
        return self._slower_if(_pipelines_cross(self.devices_per_node, grid, first, second))

    def of_replicas(self, grid: Grid, place: int) -> float:
        """Give that of the slowest link in the rings of a place's replicas."""
        return self._slower_if(_replicas_cross(self.devices_per_node, grid, place))

    def _slower_if(self, crosses: bool) -> float:
        if crosses and self.node_bandwidth is not None:
            return self.node_bandwidth
        return self.bandwidth


@lru_cache(maxsize=65536)
def _pipelines_cross(size: int | None, grid: Grid, first: int, second: int) -> bool:
    return size is not None and any(
        grid.at(first, data, tensor) // size != grid.at(second, data, tensor) // size
        for data, tensor in product(range(grid.data), range(grid.tensor))
    )


@lru_cache(maxsize=65536)
def _replicas_cross(size: int | None, grid: Grid, place: int) -> bool:
    return size is not None and any(
        grid.at(place, 0, tensor) // size != grid.at(place, data, tensor) // size
        for data, tensor in product(range(grid.data), range(grid.tensor))
    )
