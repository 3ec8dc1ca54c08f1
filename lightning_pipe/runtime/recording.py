"""What one rank did and when, kept for whoever wants to look at it later.

A recorder is given every instruction with the time at which the rank turned to it and at which it
was complete, and the waits of a round that are no instructions. That costs two readings of a
clock and an append; nothing is computed, nothing is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from lightning_pipe.schedule.instructions import Compute, Instruction


@dataclass(frozen=True, slots=True)
class AwaitBatch:
    """Wait until the rank before begins the same batch, which it says in its first forward."""


@dataclass(frozen=True, slots=True)
class AwaitEnding:
    """Wait for the last rank's word on a batch, which it gives at the end of its round.

    Attributes:
        round: Index of that round in the fill.
    """

    round: int


@dataclass(frozen=True, slots=True)
class AwaitReduction:
    """Wait, before an update, until gradients are summed over all who hold the parameters.

    Attributes:
        stage: Whose update it is.
        update: Its number.
    """

    stage: int
    update: int


Step: TypeAlias = Instruction | AwaitBatch | AwaitEnding | AwaitReduction
Entry: TypeAlias = tuple[Step, float, float]
"""A step, and the seconds of ``time.perf_counter`` at its start and at its end."""


@dataclass(slots=True)
class Round:
    """What one batch caused on a rank, or what emptied the pipeline between two batches.

    Attributes:
        index: In its fill, from 0.
        entries: In order.
    """

    index: int
    entries: list[Entry] = field(default_factory=list)


@dataclass
class Fill:
    """What a rank did from one fill of the pipeline until it was empty again.

    Attributes:
        number: Over all that the recorder saw, from 0; the same on all ranks.
        head: Its first rounds.
        tail: Its last ones, if it had more than the recorder keeps.
        skipped: Rounds between the two, which were forgotten.
        skipped_busy: Seconds of forwards and backwards in these.
    """

    number: int
    head: list[Round] = field(default_factory=list)
    tail: deque[Round] = field(default_factory=deque)
    skipped: int = 0
    skipped_busy: float = 0.0

    @property
    def num_kept(self) -> int:
        """How many rounds are not forgotten."""
        return len(self.head) + len(self.tail)

    @property
    def kept(self) -> Iterator[Round]:
        """All rounds that are not forgotten, in order."""
        return chain(self.head, self.tail)


class Recorder:
    """Keeps what one rank did lately.

    Args:
        keep: Of a fill that goes on over batches so many rounds at its begin, and so many at its
            end; of earlier fills those that are needed for so many rounds in all.
    """

    def __init__(self, keep: int) -> None:
        assert keep > 0
        self._keep = keep
        self._entries: list[Entry] = []  # of the running round
        self._fills_begun = 0
        self.fills: deque[Fill] = deque()

    def begin_round(self, index: int) -> None:
        """What follows belongs to a new round.

        Args:
            index: In its fill; 0 begins a fill.
        """
        if index == 0 or not self.fills:  # or attached while a fill is running
            self.fills.append(Fill(self._fills_begun))
            self._fills_begun += 1
        new, fill = Round(index), self.fills[-1]
        self._entries = new.entries
        if len(fill.head) < self._keep:
            fill.head.append(new)
        else:
            fill.tail.append(new)
        if len(fill.tail) > self._keep:
            forgotten = fill.tail.popleft()
            fill.skipped += 1
            fill.skipped_busy += sum(
                end - start for step, start, end in forgotten.entries if isinstance(step, Compute)
            )
        self._forget_fills()

    def add(self, step: Step, start: float, end: float) -> None:
        """Append to the running round."""
        self._entries.append((step, start, end))

    def _forget_fills(self) -> None:
        """Drop the oldest fills that are not needed for the number of rounds to keep."""
        rounds = sum(fill.num_kept for fill in self.fills)
        while rounds - self.fills[0].num_kept >= self._keep:
            rounds -= self.fills.popleft().num_kept
