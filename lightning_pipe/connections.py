"""What connects one rank of a run to the others: process groups, and the mesh of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_pipe.runtime.consensus import Consensus
from lightning_pipe.runtime.distributed_transport import GlooTransport
from lightning_pipe.runtime.groups import GlooGroups
from lightning_pipe.runtime.mesh import Grid, make_mesh
from lightning_pipe.runtime.network import gloo_interface

T = TypeVar("T")


class Connections:
    """The connections of one rank in one run. Constructing it is collective.

    Args:
        grid: Which rank does what.
        device: Of this rank.
        timeout: After which a wait for another rank ends in an error.
        environment: Says where the ranks are.
        num_nodes: On how many nodes.
        mesh: Of the last run, whose process group is still there; made here otherwise.
        for_layers: Whether layers communicate over the mesh.

    Attributes:
        mesh: Of all ranks.
        transport: Between the ranks of a pipeline.
        groups: Of ranks that hold the same parameters.
        keeps_mesh: Whether later runs need the mesh.
    """

    def __init__(
        self,
        grid: Grid,
        device: torch.device,
        timeout: timedelta,
        environment: ClusterEnvironment,
        num_nodes: int,
        mesh: DeviceMesh | None,
        for_layers: bool,
    ) -> None:
        self._grid, self._num_nodes, self._environment = grid, num_nodes, environment
        self.keeps_mesh = for_layers
        with self.making_groups():
            _init_dist_connection(environment, "gloo", timeout=timeout)
            self.mesh = mesh or make_mesh(device, grid, for_layers)
            self.transport = GlooTransport(grid.pipelines(), device, timeout)
            self.groups = GlooGroups(grid, timeout)

    def making_groups(self) -> AbstractContextManager[None]:
        """Inside, new process groups use the network that connects the nodes."""
        return gloo_interface(self._num_nodes, self._environment.main_address)

    @property
    def consensus(self) -> Consensus:
        """With the other pipelines."""
        return Consensus(self.groups.peers, self._grid.tensor)

    @property
    def replicas(self) -> Any:
        """The process group of the ranks of all replicas that are at the same place."""
        return self.mesh["data_parallel"].get_group()

    @property
    def gather_metrics(self) -> Callable[..., list[Tensor]] | None:
        """Gives torchmetrics a tensor of all replicas; nothing if there is one."""
        if self._grid.data == 1:
            return None
        return lambda tensor, group=None: gather_all_tensors(tensor, group or self.replicas)

    def broadcast_in_replica(self, obj: T) -> T:
        """Give the object of a replica's first rank to all of its ranks. Collective."""
        given: list[Any] = [None] * self._grid.size
        first = self._grid.replicas()[self._grid.data_rank][0]
        dist.all_gather_object(given, obj if first == self._grid.rank else None)
        found: T = given[first]
        return found

    def close(self) -> None:
        """Give up what belongs to this run. All messages must have arrived, on all ranks.

        A mesh over which layers communicate is left: layers have parts on it, and torch remembers
        what it does with such.
        """
        self.transport.close()
        self.groups.close()
        if not self.keeps_mesh:
            groups = {self.mesh.get_group(axis) for axis in self.mesh.mesh_dim_names or ()}
            for group in groups - {dist.group.WORLD}:
                dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Close the connections at once, so that no peer waits for this rank."""
        self.transport.abandon()
        self.groups.abandon()
        del self.mesh  # it may hold the group of all ranks
