"""Ranks that hold the same parameters, in different pipelines or in different stages of one.

Their collective operations are started in the same order on all of them, since they run the same
program for the stages that they have in common. Those of different groups do not wait for each
other, so a sum may be under way while this rank goes on with its program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.mesh import Grid


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Complete it; raises PeerLostError."""
        ...


class Group(Protocol):
    """A set of ranks.

    Attributes:
        size: How many.
        index: This rank's place among them.
    """

    size: int
    index: int

    def sum(self, tensor: Tensor) -> Pending:
        """Start to sum a tensor over all ranks, in place."""
        ...

    def sum_to(self, tensor: Tensor, receiver: int) -> Pending:
        """Start to sum a tensor over all ranks, in place on one; elsewhere it is spoiled."""
        ...

    def broadcast(self, tensor: Tensor, sender: int) -> Pending:
        """Start to give one rank's tensor to all, in place."""
        ...

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The integers that each rank gives, equally many, by place."""
        ...


class GlooGroup:
    """Ranks of different processes; tensors on a GPU are staged through the host.

    Args:
        ranks: In the world.
        group: Their process group.
        what: Names what they have in common, for errors.
    """

    def __init__(self, ranks: Sequence[int], group: Any, what: str) -> None:
        self.size, self.index = len(ranks), sorted(ranks).index(dist.get_rank())
        self._group, self._what = group, what

    def sum(self, tensor: Tensor) -> Pending:
        """See :class:`Group`."""
        return self._start(tensor, lambda host: self._group.allreduce([host]))

    def sum_to(self, tensor: Tensor, receiver: int) -> Pending:
        """See :class:`Group`."""
        options = dist.ReduceOptions()
        options.rootRank = receiver
        return self._start(tensor, lambda host: self._group.reduce([host], options))

    def broadcast(self, tensor: Tensor, sender: int) -> Pending:
        """See :class:`Group`."""
        options = dist.BroadcastOptions()
        options.rootRank = sender
        return self._start(
            tensor,
            # Bytes: gloo does not know all types.
            lambda host: self._group.broadcast([host.view(-1).view(torch.uint8)], options),
        )

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """See :class:`Group`."""
        mine = torch.tensor(values, dtype=torch.int64)
        given = [torch.empty_like(mine) for _ in range(self.size)]
        self._start(mine, lambda host: self._group.allgather([given], [host])).wait()
        return [tensor.tolist() for tensor in given]

    def close(self) -> None:
        """Give the connections up."""
        dist.destroy_process_group(self._group)
        self._group = None

    def abandon(self) -> None:
        """Let go of what keeps connections open."""
        self._group = None

    def _start(self, tensor: Tensor, start: Callable[[Tensor], Any]) -> Pending:
        host = tensor.detach()
        staged = host.device.type != "cpu" or not host.is_contiguous()
        host = host.cpu().contiguous() if staged else host
        try:
            work = start(host)
        except RuntimeError as error:
            if "gloo" not in str(error):  # it has refused the tensor
                raise
            return _Lost(f"{self._what}: {error}")
        return _PendingGloo(work, host, tensor if staged else None, self._what)


class GlooGroups:
    """The groups that one rank belongs to. Making one is collective over the *whole world*.

    Args:
        grid: Of the world.
        timeout: After which a wait ends in an error.

    Attributes:
        peers: The ranks at the same place of all pipelines; they agree on what to do next.
        tensor: The ranks that have a part of the same layers.
        world: All ranks.
    """

    def __init__(self, grid: Grid, timeout: timedelta) -> None:
        self._grid, self._timeout = grid, timeout
        self._made: dict[tuple[int, ...], Group] = {}
        self._members: list[GlooGroup] = []
        width = grid.data * grid.tensor
        rows = [list(range(first, first + width)) for first in range(0, grid.size, width)]
        self.peers = self._make(rows, "agreeing with the other pipelines")
        parts = [
            list(range(first, first + grid.tensor)) for first in range(0, grid.size, grid.tensor)
        ]
        self.tensor = self._make(parts, "agreeing with the ranks that share a layer")
        self.world = self._make([range(grid.size)], "reducing over all ranks")

    def over(self, pipeline_ranks: Sequence[int]) -> Group:
        """All ranks that hold the same parameters, if some ranks of a pipeline do: collective.

        Args:
            pipeline_ranks: The same on the whole world, this one's not always among them.

        Returns:
            A group that holds this rank; of size 1, if it is not among them.
        """
        key = tuple(sorted(pipeline_ranks))
        if key not in self._made:
            what = f"reducing over the replicas of pipeline rank {key[0]}"
            if len(key) > 1:
                what = f"reducing over pipeline ranks {', '.join(map(str, key))}"
            self._made[key] = self._make(self._grid.holders(key), what)
        return self._made[key]

    def close(self) -> None:
        """Give the connections up. All operations must be complete, on all ranks."""
        for member in self._members:
            member.close()
        self._members = []

    def abandon(self) -> None:
        """Close the connections at once, so that no peer waits for this rank."""
        for member in self._members:
            member.abandon()
        self._members = []

    def _make(self, rows: Sequence[Sequence[int]], what: str) -> Group:
        mine: Group = Alone()
        for ranks in rows:
            if len(ranks) > 1:
                group = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo")
                if dist.get_rank() in ranks:
                    mine = member = GlooGroup(ranks, group, what)
                    self._members.append(member)
        return mine


class Alone:
    """A rank without others."""

    size, index = 1, 0

    def sum(self, tensor: Tensor) -> Pending:
        """See :class:`Group`."""
        return _Done()

    def sum_to(self, tensor: Tensor, receiver: int) -> Pending:
        """See :class:`Group`."""
        return _Done()

    def broadcast(self, tensor: Tensor, sender: int) -> Pending:
        """See :class:`Group`."""
        return _Done()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """See :class:`Group`."""
        return [list(values)]


class _Done:
    def wait(self) -> None:
        pass


class _Lost:
    def __init__(self, message: str) -> None:
        self._message = message

    def wait(self) -> None:
        raise PeerLostError(self._message)


class _PendingGloo:
    def __init__(self, work: Any, host: Tensor, staged: Tensor | None, what: str) -> None:
        self._work, self._host, self._staged, self._what = work, host, staged, what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"{self._what}: {error}") from error
        finally:
            self._work = None
        if self._staged is not None:
            with torch.no_grad():
                self._staged.copy_(self._host)
