"""How long the recorded steps should have taken, given what is typical of their parts.

Typical is the mean over a round, and of these the median over the rounds: micro-batches may be of
different sizes, and a rank may be held up now and then by what does not belong to the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from lightning_pipe.monitoring.replay import Record, Replayed, Rows, Times, granted_times, replay
from lightning_pipe.runtime.recording import AwaitBatch, AwaitEnding, AwaitReduction, Step
from lightning_pipe.schedule import Compute, Event, Forward, Instruction, Reduce


@dataclass(frozen=True)
class Prediction:
    """Recorded rounds, and the same as they should have been.

    Attributes:
        measured_step: Seconds from one batch to the next, the median.
        predicted_step: The same, predicted.
        rows: The records.
        replayed: Their predicted times.
    """

    measured_step: float
    predicted_step: float
    rows: Rows
    replayed: Replayed


def predict(rows: Rows) -> Prediction:
    """Predict what some rounds should have taken.

    Each stage's forward, backward and update, each message and each pause between two steps of a
    rank take what is typical of them; who waits for whom follows. What is left out, and makes the
    measured step longer, is whatever does not happen in most rounds.

    Args:
        rows: Of all ranks, over the same rounds, one after the other.
    """
    replayed = replay(rows, _typical_times(rows))
    measured = [(record.start, record.end) for record in rows[0]]
    return Prediction(
        _step_seconds(rows[0], measured), _step_seconds(rows[0], replayed[0]), rows, replayed
    )


def _typical_times(rows: Rows) -> Times:
    there = granted_times(rows)
    work, pauses = _Typical(), _Typical()
    shortest: dict[Hashable, float] = {}  # waits, which are over at once if the message is there
    latencies: dict[Hashable, list[float]] = defaultdict(list)
    for row in rows:
        for record in row:
            key = _kind(record)
            if record.awaits is None:
                work.add(key, record, record.seconds)
                continue
            shortest[key] = min(shortest.get(key, record.seconds), record.seconds)
            if record.start < there.get(record.awaits, record.start):
                latencies[key].append(max(0.0, record.end - there[record.awaits]))
        for before, after in pairwise(row):
            pauses.add(_kind_of_pause(before, after), after, after.start - before.end)

    def message(record: Record) -> float:
        waited = latencies[_kind(record)]
        return median(waited) if waited else shortest[_kind(record)]

    return Times(
        work=lambda record: (
            work.of(_kind(record)) if record.awaits is None else shortest[_kind(record)]
        ),
        pause=lambda before, after: pauses.of(_kind_of_pause(before, after)),
        message=_cached(message),
    )


def _kind(record: Record) -> Hashable:
    return record.rank, type(record.step), getattr(record.step, "stage", None)


def _kind_of_pause(before: Record, after: Record) -> Hashable:
    return before.rank, type(before.step), type(after.step), after.opens


def _cached(function: Callable[[Record], float]) -> Callable[[Record], float]:
    """Remember what a function of a record's kind has said."""
    known: dict[Hashable, float] = {}

    def cached(record: Record) -> float:
        kind = _kind(record)
        if kind not in known:
            known[kind] = function(record)
        return known[kind]

    return cached


class _Typical:
    """Typical seconds by kind."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, dict[tuple[int, int], list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._known: dict[Hashable, float] = {}

    def add(self, kind: Hashable, record: Record, seconds: float) -> None:
        """Take what one record took."""
        self._seconds[kind][record.fill, record.round].append(seconds)

    def of(self, kind: Hashable) -> float:
        """Give what is typical."""
        if kind not in self._known:
            self._known[kind] = median(map(fmean, self._seconds[kind].values()))
        return self._known[kind]


def _step_seconds(row: Sequence[Record], times: Sequence[tuple[float, float]]) -> float:
    """Give the median time from the first forward of a batch to that of the next one.

    Between two fills of a schedule that goes on over batches there may be anything; so only within
    a fill. A synchronous one has one batch in a fill.
    """
    starts: dict[tuple[int, int], float] = {}
    for record, (start, _) in zip(row, times, strict=True):
        if isinstance(record.step, Forward):
            starts.setdefault((record.fill, record.round), start)
    fills = {fill for fill, _ in starts}
    one_each = len(fills) == len(starts)
    steps = [
        starts[after] - starts[before]
        for before, after in pairwise(starts)
        if one_each or before[0] == after[0]
    ]
    if steps:
        return median(steps)
    computes = [
        time for record, time in zip(row, times, strict=True) if isinstance(record.step, Compute)
    ]
    return computes[-1][1] - computes[0][0] if computes else 0.0


def events_of(rows: Rows, times: Replayed | None = None) -> list[Event]:
    """Make events for pictures and traces, from time 0.

    A sum of gradients is shown where a rank waits for it.

    Args:
        rows: The records.
        times: Other times for them. Default: their own.
    """
    begin = min(row[0].start for row in rows)
    return [
        Event(record.rank, _shown(record.step), start - begin, end - begin)
        for rank, row in enumerate(rows)
        for record, (start, end) in zip(row, times[rank] if times else _own(row), strict=True)
        if not isinstance(record.step, AwaitBatch | AwaitEnding)
    ]


def _shown(step: Step) -> Instruction:
    assert not isinstance(step, AwaitBatch | AwaitEnding)
    return Reduce(step.stage, step.update) if isinstance(step, AwaitReduction) else step


def _own(row: Iterable[Record]) -> list[tuple[float, float]]:
    return [(record.start, record.end) for record in row]


__all__ = ["Prediction", "events_of", "predict"]
