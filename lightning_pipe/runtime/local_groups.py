"""Groups of ranks that are threads of one process: for tests, and to study schedules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.groups import Alone, Group, Pending


class LocalGroup:
    """Ranks that are threads of one process: for tests.

    Args:
        index: This rank's place.
        meeting: What they share; ``Meeting(size)``.
    """

    def __init__(self, index: int, meeting: Meeting) -> None:
        self.size, self.index, self._meeting = meeting.size, index, meeting

    def sum(self, tensor: Tensor) -> Pending:
        """See :class:`Group`; takes place where it is waited for."""
        return _PendingLocal(lambda: tensor.copy_(torch.stack(self._exchange(tensor)).sum(0)))

    def sum_to(self, tensor: Tensor, receiver: int) -> Pending:
        """See :class:`Group`."""
        return self.sum(tensor)

    def broadcast(self, tensor: Tensor, sender: int) -> Pending:
        """See :class:`Group`."""
        return _PendingLocal(lambda: tensor.copy_(self._exchange(tensor)[sender]))

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """See :class:`Group`."""
        return [each.tolist() for each in self._exchange(torch.tensor(values))]

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.index, tensor.detach().clone())


class LocalGroups:
    """The groups that a thread of one pipeline belongs to: for tests.

    Args:
        rank: Of the pipeline.
        size: Of the pipeline.
        meet: Gives the meeting of some ranks, the same to all of them.
    """

    def __init__(self, rank: int, size: int, meet: Callable[[tuple[int, ...]], Meeting]) -> None:
        self._rank, self._meet = rank, meet
        self.peers: Group = Alone()
        self.tensor: Group = Alone()
        self.world = self.over(range(size))

    def over(self, pipeline_ranks: Sequence[int]) -> Group:
        """See :class:`GlooGroups`."""
        ranks = tuple(sorted(pipeline_ranks))
        if len(ranks) == 1 or self._rank not in ranks:
            return Alone()
        return LocalGroup(ranks.index(self._rank), self._meet(ranks))


class Meeting:
    """Where the threads of a :class:`LocalGroup` meet.

    Args:
        size: How many.
        timeout: Seconds after which a wait ends in an error.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self._timeout = size, timeout
        self._given: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Give a tensor, and get those of all."""
        self._given[index] = tensor
        try:
            self.barrier.wait(self._timeout)
            given = list(self._given)
            self.barrier.wait(self._timeout)
        except threading.BrokenBarrierError as error:
            raise PeerLostError(f"member {index}: another rank did not come") from error
        return given


class _PendingLocal:
    def __init__(self, operation: Callable[[], Any]) -> None:
        self._operation = operation

    def wait(self) -> None:
        with torch.no_grad():
            self._operation()
