"""The processes of one or more pipelines, as Lightning wants to see them.

Lightning's parallel strategies think of data-parallel replicas. The ranks of one replica load the
same data and log the same values, so for all that concerns data only replicas count.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_pipe.process_launcher import ProcessLauncher
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.script_launcher import ScriptLauncher

T = TypeVar("T")


class PipelineProcesses(ParallelStrategy):
    """Launches the ranks, and answers for them.

    Attributes:
        grid: Which rank does what.
    """

    _num_nodes = 1
    _start_method: Literal["popen", "fork", "spawn"] = "popen"
    grid = Grid(1)

    @property
    def is_distributed(self) -> bool:
        """Whether ranks load different data, so that samplers must be told."""
        return self.grid.data > 1

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """On this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a replica load the same."""
        return {"num_replicas": self.grid.data, "rank": self.grid.data_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment where this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if imports._IS_INTERACTIVE and self._start_method != "fork":
            raise MisconfigurationException(
                f"PipelineStrategy(start_method={self._start_method!r}) in a notebook or an "
                "interactive Python, which cannot be started again for each rank. Use "
                "start_method='fork', or run your code as a script."
            )
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = ProcessLauncher(self, self._start_method)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Give one rank's object to all."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def gather(self, obj: T) -> list[T] | None:
        """Give every rank's object to rank 0, by rank; others get none. Collective."""
        if not dist.is_initialized():
            return [obj]
        is_first = dist.get_rank() == 0
        gathered: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(obj, gathered)
        return gathered

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce over the replicas; with one there is nothing to do.

        Args:
            tensor: This rank's; equal on all ranks of a replica.
            group: Of ranks; by default those of all replicas that are at the same place.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"`` or another one that torch knows.
        """
        if not isinstance(tensor, Tensor) or self.grid.data == 1:
            return tensor
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.double()  # numbers of samples, say, whose mean is no integer
        return _sync_ddp(tensor, group or self._replicas(), reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any) say so."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas: a new first dimension; as on one device, if there is one."""
        if self.grid.data == 1:
            return tensor
        if group in (None, dist.group.WORLD):  # as a LightningModule says where the user does not
            group = self._replicas()
        return _all_gather_ddp_if_available(tensor, group, sync_grads)

    def _replicas(self) -> Any:
        """The process group of the ranks of all replicas that are at the same place."""
        raise NotImplementedError
