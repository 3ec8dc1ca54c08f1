"""Where the time of each rank went: computing, or idle for one of six reasons.

=============  ====================================================================================
warm-up        before a rank's first compute of a fill; and waits that the schedule has before the
               rank's first backward even if all stages took equally long and messages no time
cool-down      after its last compute until the last one anywhere; and such waits after its first
               backward
imbalance      waits that would be there as well if messages took no time, because the other rank
               was not done yet: its stage takes longer, or its optimizer, its hooks, its data
communication  the rest of all waits, and the time that sends take
overhead       time between the first and the last compute that is spent neither computing nor
               waiting: updates, and with a schedule that does not drain all that Lightning does
               between two batches
reduction      waits for gradients to be summed over all who hold the parameters (replicas, ranks
               with a tied weight): between a rank's computes, and after the last one anywhere;
               what is summed while other ranks are still computing costs nothing
=============  ====================================================================================

With 1F1B and equal stages that gives warm-up and cool-down only: the wait between the warm-up
forwards and the first backward belongs to the schedule, though the peer is computing all the time.
So "the peer was still computing" cannot be the rule; what tells the reasons apart is which waits
are left when the same rounds are run again without unequal stages, or without latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from lightning_pipe.monitoring.replay import Record, Replayed, Rows, Times, replay
from lightning_pipe.runtime.recording import AwaitReduction
from lightning_pipe.schedule import (
    Compute,
    Forward,
    Send,
)


@dataclass(frozen=True)
class Bubble:
    """Where the time of one rank went, in seconds. All but ``wall`` add up to it.

    Attributes:
        wall: From the first compute of the fills on any rank to the last one, and the sum of
            gradients after it.
        busy: In forwards and backwards.
        warm_up: Idle while the pipeline fills.
        imbalance: Idle because another rank took longer.
        communication: Idle because messages took time.
        cool_down: Idle while the pipeline empties.
        overhead: Neither computing nor waiting.
        reduction: Idle until gradients are summed.
    """

    wall: float = 0.0
    busy: float = 0.0
    warm_up: float = 0.0
    imbalance: float = 0.0
    communication: float = 0.0
    cool_down: float = 0.0
    overhead: float = 0.0
    reduction: float = 0.0

    def __add__(self, other: Bubble) -> Bubble:
        """Of both together."""
        return Bubble(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def share(self, name: str) -> float:
        """Give one of the attributes as a share of the wall time."""
        seconds: float = getattr(self, name)
        return seconds / self.wall if self.wall else 0.0

    @property
    def idle(self) -> float:
        """All that is not busy."""
        return self.wall - self.busy


def split_fill(parts: Sequence[Rows], forgotten_busy: Sequence[float] = ()) -> list[Bubble]:
    """Say where the time of each rank went in one fill of the pipeline.

    Args:
        parts: What is known of the fill: all of it, or its first rounds and its last ones.
        forgotten_busy: Of each rank, seconds of computes between the two parts. The idle time there
            is taken to be of the same kinds as that of the two parts.

    Returns:
        A bubble for each rank.
    """
    computes = [
        record
        for rows in parts
        for row in rows
        for record in row
        if isinstance(record.step, Compute)
    ]
    if not computes:
        return [Bubble() for _ in parts[0]]
    begin = min(record.start for record in computes)
    end = max(record.end for record in computes)
    records = (record for rows in parts for row in rows for record in row)
    summed = [record.end for record in records if isinstance(record.step, AwaitReduction)]
    replays = [_replays(rows) for rows in parts]
    bubbles = []
    for rank in range(len(parts[0])):
        account = _Account([rows[rank] for rows in parts])
        for number, (rows, (ideal, actual)) in enumerate(zip(parts, replays, strict=True)):
            account.add_part(number, rows[rank], _waits(ideal[rank]), _waits(actual[rank]))
        account.forgotten(forgotten_busy[rank] if forgotten_busy else 0.0)
        bubbles.append(account.bubble(begin, end, max([end, *summed])))
    return bubbles


def _replays(rows: Rows) -> tuple[Replayed, Replayed]:
    """Run rounds again with equal stages and no latency; and as they were, but no latency."""
    by_stage: dict[type, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for record in row:
            if isinstance(record.step, Compute):
                by_stage[type(record.step)][record.step.stage].append(record.seconds)
    # The mean over stages of their means: in a part of a fill some stages may run more often.
    equal = {kind: fmean(map(fmean, stages.values())) for kind, stages in by_stage.items()}
    ideal = Times(
        work=lambda record: equal.get(type(record.step), 0.0),
        pause=lambda before, after: 0.0,
        as_begun=False,
    )
    actual = Times(
        work=lambda record: record.seconds if record.awaits is None else 0.0,
        pause=lambda before, after: after.start - before.end,
        known=True,
    )
    return replay(rows, ideal), replay(rows, actual)


def _waits(replayed: Sequence[tuple[float, float]]) -> list[float]:
    return [end - start for start, end in replayed]


class _Account:
    """Of one rank in one fill.

    Args:
        parts: Its records, in one part or two.
    """

    def __init__(self, parts: Sequence[Sequence[Record]]) -> None:
        self._parts = parts
        records = [(n, p, r) for n, part in enumerate(parts) for p, r in enumerate(part)]
        computes = [(n, p, r) for n, p, r in records if isinstance(r.step, Compute)]
        self._first, self._last = computes[0], computes[-1]
        self._last_forward = max((n, p) for n, p, r in computes if isinstance(r.step, Forward))
        self._backward_begun = False
        self._busy = self._warm_up = self._imbalance = 0.0
        self._communication = self._cool_down = self._overhead = self._reduction = 0.0

    def add_part(
        self, number: int, row: Sequence[Record], ideal: Sequence[float], actual: Sequence[float]
    ) -> None:
        """Add the records between the first and the last compute of the rank.

        Args:
            number: Of the part.
            row: Its records.
            ideal: How long each would take if it is a wait, with equal stages and no latency.
            actual: The same, with stages as they are and no latency.
        """
        previous: Record | None = None
        for position, record in enumerate(row):
            if not self._first[:2] <= (number, position) <= self._last[:2]:
                continue
            if previous is not None:
                self._overhead += record.start - previous.end
            previous = record
            if record.awaits is not None:
                # Where records begin in the middle of a fill, the ranks are not where they would
                # be with equal stages: there are no waits of the schedule until it empties.
                knows = number == 0 or (number, position) > self._last_forward
                self._add_wait(record, ideal[position] if knows else 0.0, actual[position])
            elif isinstance(record.step, Compute):
                self._backward_begun |= not isinstance(record.step, Forward)
                self._busy += record.seconds
            elif isinstance(record.step, AwaitReduction):
                self._reduction += record.seconds
            elif isinstance(record.step, Send):
                self._communication += record.seconds
            else:
                self._overhead += record.seconds

    def _add_wait(self, record: Record, ideal: float, actual: float) -> None:
        """Split a wait."""
        schedule = min(record.seconds, ideal)
        imbalance = min(record.seconds - schedule, max(0.0, actual - schedule))
        if self._backward_begun:
            self._cool_down += schedule
        else:
            self._warm_up += schedule
        self._imbalance += imbalance
        self._communication += record.seconds - schedule - imbalance

    def forgotten(self, busy: float) -> None:
        """Add what lies between two parts."""
        if len(self._parts) < 2:
            return
        before, after = self._parts
        idle = max(0.0, after[0].start - before[-1].end - busy)
        self._busy += busy
        known = self._imbalance + self._communication + self._overhead + self._reduction
        factor = 1 + idle / known if known else 1.0
        self._overhead += 0.0 if known else idle
        self._imbalance *= factor
        self._communication *= factor
        self._overhead *= factor
        self._reduction *= factor

    def bubble(self, begin: float, end: float, summed: float) -> Bubble:
        """Add what comes before the first and after the last compute.

        Args:
            begin: Of the first compute anywhere.
            end: Of the last compute anywhere.
            summed: When all sums of gradients are there, too.
        """
        return Bubble(
            summed - begin,
            self._busy,
            self._warm_up + self._first[2].start - begin,
            self._imbalance,
            self._communication,
            self._cool_down + end - self._last[2].end,
            self._overhead,
            self._reduction + summed - end,
        )


__all__ = ["Bubble", "split_fill"]
