"""Recorded rounds of all ranks, run again on a clock with other times.

What a rank did, in which order, and which message each wait was for is in its records, whatever
schedule it followed. So the same rounds can be run again as they would have gone with stages that
take equally long, with messages that take no time, or with the times that are typical of them. Pure
Python; in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.runtime.recording import AwaitBatch, AwaitEnding, Round, Step
from lightning_pipe.schedule import (
    Backward,
    BackwardInput,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
)

Wait: TypeAlias = ReceiveActivation | ReceiveGradient | AwaitBatch | AwaitEnding
"""What a rank can be held up in."""


@dataclass(frozen=True, slots=True)
class Record:
    """One step of a rank.

    Attributes:
        rank: Which rank.
        step: What it did.
        start: When it turned to it, in seconds.
        end: When it was complete.
        fill: Number of the fill.
        round: Index of the round in its fill.
        opens: Whether it is the first of its round.
        awaits: Names what a wait is for; ``None`` for all else.
    """

    rank: int
    step: Step
    start: float
    end: float
    fill: int
    round: int
    opens: bool
    awaits: Hashable = None

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start


Rows: TypeAlias = list[list[Record]]
"""Records by rank, those of a rank in order."""


def records_of(
    rank: int, last_rank: int, fill: int, rounds: Iterable[Round], shift: float = 0.0
) -> list[Record]:
    """Put the entries of some rounds of one fill in a row.

    Args:
        rank: Which recorded them.
        last_rank: The rank of the last stage.
        fill: Number of the fill.
        rounds: In order.
        shift: Added to all times: what the rank's clock is behind that of the others.
    """
    return [
        Record(
            rank,
            step,
            start + shift,
            end + shift,
            fill,
            one.index,
            position == 0,
            _awaited(step, rank, last_rank, fill, one.index),
        )
        for one in rounds
        for position, (step, start, end) in enumerate(one.entries)
    ]


def _awaited(step: Step, rank: int, last_rank: int, fill: int, round_: int) -> Hashable:
    """Name what a wait is for; the names that `_granted` gives."""
    match step:
        case ReceiveActivation(stage, i):
            return fill, "forward", stage - 1, i
        case ReceiveGradient(stage, i):
            return fill, "backward", stage + 1, i
        case AwaitBatch():
            return fill, "begin", rank - 1, round_
        case AwaitEnding(ended):
            return fill, "end", last_rank, ended
        case _:
            return None


def _granted(row: Sequence[Record]) -> list[list[tuple[Hashable, bool]]]:
    """For each record of a rank, what others may await of it; true: they wait for its start only.

    A rank announces a batch at the start of its first forward of the round. The last rank says
    what a batch came to at the end of its round.
    """
    granted: list[list[tuple[Hashable, bool]]] = []
    begun: set[tuple[int, int]] = set()
    ends: dict[tuple[int, int], int] = {}
    for position, record in enumerate(row):
        names: list[tuple[Hashable, bool]] = []
        match record.step:
            case Forward(stage, i):
                names.append(((record.fill, "forward", stage, i), False))
                if (record.fill, record.round) not in begun:
                    begun.add((record.fill, record.round))
                    names.append(((record.fill, "begin", record.rank, record.round), True))
            case Backward(stage, i) | BackwardInput(stage, i):
                names.append(((record.fill, "backward", stage, i), False))
        granted.append(names)
        ends[record.fill, record.round] = position
    for (fill, round_), position in ends.items():
        granted[position].append(((fill, "end", row[position].rank, round_), False))
    return granted


def granted_times(rows: Rows) -> dict[Hashable, float]:
    """Say when everything that a rank may wait for was there at its sender."""
    return {
        name: record.start if at_start else record.end
        for row in rows
        for record, names in zip(row, _granted(row), strict=True)
        for name, at_start in names
    }


@dataclass(frozen=True)
class Times:
    """What a replay takes for each step.

    Attributes:
        work: Seconds that a record keeps its rank, waits aside.
        pause: Seconds between a record and the next one of its rank.
        message: Seconds from what a wait is for until it is over, at the least.
        known: Whether what a wait is for, if it lies before all records, is there when it was
            there in truth; else it is there from the beginning.
        as_begun: Whether each rank begins when it did in truth; else all begin at 0.
    """

    work: Callable[[Record], float]
    pause: Callable[[Record, Record], float]
    message: Callable[[Record], float] = lambda record: 0.0
    known: bool = False
    as_begun: bool = True


Replayed: TypeAlias = list[list[tuple[float, float]]]
"""Start and end of every record, by rank."""


def replay(rows: Rows, times: Times) -> Replayed:
    """Run records again, each rank's in their order.

    Args:
        rows: Of all ranks, over the same rounds.
        times: What they take now.

    Returns:
        The new start and end of every record.
    """
    granted = [_granted(row) for row in rows]
    to_come = {name for one in granted for names in one for name, _ in names}
    there: dict[Hashable, float] = {}
    done: Replayed = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            mine = done[rank]
            while len(mine) < len(row):
                record = row[len(mine)]
                name = record.awaits
                if name in to_come and name not in there:
                    break
                start = _next_start(row, mine, times)
                end = start + times.work(record)
                if name is not None and (name in there or times.known):
                    end = max(end, there.get(name, record.end) + times.message(record))
                for given, at_start in granted[rank][len(mine)]:
                    there[given] = start if at_start else end
                mine.append((start, end))
                moved = True
    assert all(len(mine) == len(row) for mine, row in zip(done, rows, strict=True))
    return done


def _next_start(row: list[Record], done: list[tuple[float, float]], times: Times) -> float:
    """When a rank turns to its next record."""
    position = len(done)
    if position == 0:
        return row[0].start if times.as_begun else 0.0
    return done[-1][1] + times.pause(row[position - 1], row[position])


__all__ = [
    "Record",
    "Replayed",
    "Rows",
    "Times",
    "Wait",
    "granted_times",
    "records_of",
    "replay",
]
