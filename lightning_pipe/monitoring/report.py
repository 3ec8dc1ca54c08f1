"""What the records of all ranks say about a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from lightning_pipe.monitoring.bubbles import Bubble, split_fill
from lightning_pipe.monitoring.prediction import Prediction, events_of, predict
from lightning_pipe.monitoring.replay import Rows, records_of
from lightning_pipe.programs import Timing
from lightning_pipe.runtime.recording import Fill, Round
from lightning_pipe.schedule import (
    Compute,
    Event,
    Forward,
    Plan,
    Reduce,
    Timeline,
    VersionPolicy,
)

KINDS = "warm_up", "imbalance", "communication", "cool_down", "overhead", "reduction"
"""Of idle time: attributes of `Bubble`."""


@dataclass(frozen=True)
class RankRecords:
    """What one rank gives away.

    Attributes:
        fills: What it did lately.
        behind: Seconds that its clock is behind that of rank 0.
        peak_in_flight: By stage, most micro-batches whose backward was still due.
        live_versions: By stage, most versions of the weights held at a time.
    """

    fills: list[Fill]
    behind: float
    peak_in_flight: Mapping[int, int]
    live_versions: Mapping[int, int]


class MonitorReport:
    """A run, as its latest batches went.

    Args:
        records: Of the ranks of one pipeline, in their order.
        timing: What ran when, and where.
    """

    def __init__(self, records: Sequence[RankRecords], timing: Timing) -> None:
        self._records, self._timing = records, timing
        self._last_rank = timing.placement.rank_of[-1]

    @property
    def batches(self) -> int:
        """How many batches are recorded."""
        first = self._records[0].fills
        return sum(
            any(isinstance(s, Forward) for s, _, _ in r.entries) for f in first for r in f.kept
        )

    @cached_property
    def bubbles(self) -> tuple[Bubble, ...]:
        """Where the time of each rank went, by rank, in all fills that are recorded."""
        total = [Bubble() for _ in self._records]
        for fills in zip(*(records.fills for records in self._records), strict=True):
            parts = [self._rows(fills, [fill.head for fill in fills])]
            if fills[0].skipped:
                parts.append(self._rows(fills, [fill.tail for fill in fills]))
            elif fills[0].tail:
                parts = [self._rows(fills, [fill.kept for fill in fills])]
            busy = [fill.skipped_busy for fill in fills]
            split = split_fill(parts, busy)
            total = [so_far + more for so_far, more in zip(total, split, strict=True)]
        return tuple(total)

    @cached_property
    def prediction(self) -> Prediction:
        """The step time, measured and predicted, of the latest rounds that follow each other."""
        return predict(self._latest(fills=1 if self._timing.continuous else None))

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """By stage, most micro-batches in flight at a time."""
        return self._by_stage([records.peak_in_flight for records in self._records])

    @property
    def live_versions(self) -> tuple[int, ...]:
        """By stage, most versions of the weights held at a time."""
        return self._by_stage([records.live_versions for records in self._records])

    @cached_property
    def staleness(self) -> tuple[int, ...]:
        """By stage, most updates that a gradient came late."""
        late = [0] * self._timing.placement.num_stages
        for fill in (fill for records in self._records for fill in records.fills):
            for one in fill.kept:
                for step, _, _ in one.entries:
                    if isinstance(step, Forward):
                        behind = self._update_of(step, one) - step.version
                        late[step.stage] = max(late[step.stage], behind)
        return tuple(late)

    @property
    def metrics(self) -> dict[str, float]:
        """For loggers: mean bubbles, those of each rank, and what the worst stage keeps."""
        named = {"bubble": "idle", **{f"bubble_{kind}": kind for kind in KINDS}}
        metrics = {
            f"pipeline/{name}": fmean(bubble.share(kind) for bubble in self.bubbles)
            for name, kind in named.items()
        }
        by_stage = {
            "peak_in_flight": self.peak_in_flight,
            "live_versions": self.live_versions,
            "staleness": self.staleness,
        }
        metrics |= {f"pipeline/{name}": float(max(of)) for name, of in by_stage.items()}
        for rank, bubble in enumerate(self.bubbles):
            prefix = f"pipeline/rank{rank}"
            metrics |= {f"{prefix}/{name}": bubble.share(kind) for name, kind in named.items()}
            stages = self._timing.placement.stages_of(rank)
            metrics |= {
                f"{prefix}/{name}": float(max(of[stage] for stage in stages))
                for name, of in by_stage.items()
            }
        return metrics

    def events(self) -> tuple[list[Event], list[Event]]:
        """The latest rounds that follow each other, in seconds: measured, and predicted."""
        rows, replayed = self.prediction.rows, self.prediction.replayed
        return events_of(rows), events_of(rows, replayed)

    def timeline(self) -> Timeline:
        """The latest fill, or of a long one its end, in seconds."""
        placement = self._timing.placement
        events = sorted(events_of(self._latest(fills=1)), key=lambda event: event.start)
        begin, end = events[0].start, max(event.end for event in events)
        moved = [Event(e.rank, e.instruction, e.start - begin, e.end - begin) for e in events]
        shown = (_as_drawn(event, (end - begin) / 1000) for event in moved)
        count = sum(isinstance(e.instruction, Forward) and e.instruction.stage == 0 for e in events)
        plan = Plan(self._timing.schedule, placement, (count,), policy=self._timing.policy)
        busy = tuple(bubble.busy for bubble in self.bubbles)
        in_flight, versions = self.peak_in_flight, self.live_versions
        drawn = tuple(event for event in shown if event is not None)
        return Timeline(plan, end - begin, drawn, busy, in_flight, versions)

    def __str__(self) -> str:
        """A short text for the terminal."""
        measured, predicted = self.prediction.measured_step, self.prediction.predicted_step
        deviation = predicted / measured - 1 if measured else 0.0
        # Most pipelines have nothing to sum.
        shown = [k for k in KINDS if k != "reduction" or any(b.reduction for b in self.bubbles)]
        names = ["bubble", *(kind.replace("_", "-") for kind in shown)]
        lines = [
            f"Pipeline, the latest {self.batches} batches: {_seconds(measured)} a step, "
            f"predicted {_seconds(predicted)} ({deviation:+.1%})",
            "rank" + "".join(f"{name:>15}" for name in names),
        ]
        for rank, bubble in enumerate(self.bubbles):
            shares = [bubble.share(kind) for kind in ("idle", *shown)]
            lines.append(f"{rank:>4}" + "".join(f"{share:>15.1%}" for share in shares))
        lines.append(
            f"by stage: most in flight {_list(self.peak_in_flight)}; versions "
            f"{_list(self.live_versions)}; staleness {_list(self.staleness)}"
        )
        return "\n".join(lines)

    def _rows(self, fills: Sequence[Fill], rounds: Iterable[Iterable[Round]]) -> Rows:
        """The records of some rounds of one fill, by rank."""
        return [
            records_of(rank, self._last_rank, fill.number, mine, self._records[rank].behind)
            for rank, (fill, mine) in enumerate(zip(fills, rounds, strict=True))
        ]

    def _latest(self, fills: int | None) -> Rows:
        """The latest rounds that follow each other without a gap, from up to so many fills."""
        latest: list[Rows] = []
        by_fill = list(zip(*(records.fills for records in self._records), strict=True))
        for fill in reversed(by_fill[-fills:] if fills is not None else by_fill):
            gap = fill[0].skipped
            latest.append(self._rows(fill, [one.tail if gap else one.kept for one in fill]))
            if gap:
                break
        return [
            [r for rows in reversed(latest) for r in rows[k]] for k in range(len(self._records))
        ]

    def _by_stage(self, by_rank: Sequence[Mapping[int, int]]) -> tuple[int, ...]:
        rank_of = self._timing.placement.rank_of
        return tuple(by_rank[rank].get(stage, 0) for stage, rank in enumerate(rank_of))

    def _update_of(self, step: Forward, one: Round) -> int:
        """Number of the update that a micro-batch's gradient belongs to."""
        match self._timing.policy:
            case VersionPolicy.SYNCHRONOUS:
                return 0
            case VersionPolicy.DOUBLE_BUFFERED:
                return one.index
            case _:
                return step.microbatch


def _as_drawn(event: Event, visible: float) -> Event | None:
    """Leave out a reduction with nothing to reduce; what is too short to be seen is a mark."""
    if isinstance(event.instruction, Compute) or event.end - event.start >= visible:
        return event
    if isinstance(event.instruction, Reduce):
        return None
    return replace(event, end=event.start)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
