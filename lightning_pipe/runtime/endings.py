"""What only the last rank knows about a batch reaches all ranks, at the same distance."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pipe.runtime.transport import Channel, PendingObject, Transport, give_to_others


@dataclass(frozen=True)
class Ending:
    """The last rank's word on a batch; its tensors are on the CPU.

    Attributes:
        number: Of the batch.
        loss: Its mean.
        weight: Sum of the weights of its micro-batches.
        own_weight: Whether the step gave weights of its own.
        buffers: Those outside the layers.
        attachment: What the caller added.
        asked: Whether any rank was asked to stop.
    """

    number: int
    loss: Tensor
    weight: float
    own_weight: bool
    buffers: list[Tensor]
    attachment: Any
    asked: bool


class Endings:
    """One rank's end of the way from the last rank to all.

    One message at a time is asked for: a large one comes in two parts, and the second must not
    meet a receive that is meant for the next message.

    Args:
        transport: Connects the ranks.
        last: The rank of the last stage.
    """

    def __init__(self, transport: Transport, last: int) -> None:
        self._transport, self._last = transport, last
        self._said: deque[Ending] = deque()  # on the last rank itself
        self._due = 0  # on the others
        self._asked_for: PendingObject | None = None

    def expect(self) -> None:
        """One more ending will come."""
        if self._transport.rank != self._last:
            self._due += 1
            self._ask()

    def say(self, ending: Ending) -> None:
        """On the last rank: give it to all."""
        self._said.append(ending)
        give_to_others(self._transport, ending)

    def hear(self, leave: int) -> list[Ending]:
        """Take endings, oldest first.

        Args:
            leave: So many, the latest, are left for later rounds.
        """
        if self._transport.rank == self._last:
            return [self._said.popleft() for _ in range(len(self._said) - leave)]
        heard = []
        while self._due > leave:
            assert self._asked_for is not None
            heard.append(self._asked_for.wait())
            self._due -= 1
            self._asked_for = None
            self._ask()
        return heard

    def _ask(self) -> None:
        if self._due and self._asked_for is None:
            self._asked_for = PendingObject(self._transport, Channel.RESULT, self._last)
