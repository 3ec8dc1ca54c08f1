"""A timeline as a trace of Chrome's format, which https://ui.perfetto.dev opens.

The format: "Trace Event Format" (Google), https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from lightning_pipe.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Communication,
    Compute,
    Event,
    Forward,
    Reduce,
    Timeline,
    Update,
)

_KINDS = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "backward, input part",
    BackwardWeight: "backward, weight part",
    Reduce: "reduce",
    Update: "update",
}
_MICROSECONDS = 1e6
_INSIDE = 1e-3  # microseconds before its end, where an arrow still belongs to a slice


def trace_of(
    timeline: Timeline | Iterable[Event],
    seconds_per_unit: float = 1.0,
    process: str = "predicted",
) -> list[dict[str, Any]]:
    """Make the events of a trace: a process with a thread for each rank.

    What keeps a rank busy or waiting for a message is a slice; an update that takes no time is a
    mark. Arrows lead from a compute to the one on another rank that needs its output. A counter for
    each rank says how many micro-batches are in flight.

    Args:
        timeline: A simulated timeline, or recorded events; those of a rank in order. Micro-batches
            may come again, with the next batch.
        seconds_per_unit: What the times of the events are multiplied by.
        process: Name of the process. Traces with different names can be joined into one.

    Returns:
        The events, ready for `write_trace`.
    """
    events = list(timeline.events if isinstance(timeline, Timeline) else timeline)
    scale = seconds_per_unit * _MICROSECONDS
    number = crc32(process.encode()) >> 1  # Perfetto wants a small whole number
    ranks = sorted({event.rank for event in events})
    trace: list[dict[str, Any]] = [_name("process_name", process, number)]
    trace += [_name("thread_name", f"rank {rank}", number, rank) for rank in ranks]
    trace += [
        {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": rank}}
        | {"pid": number, "tid": rank}
        for rank in ranks
    ]
    for event in events:
        trace += [entry | {"pid": number, "tid": event.rank} for entry in _entries(event, scale)]
    trace += [entry | {"pid": number} for entry in _arrows(events, scale, process)]
    trace += [entry | {"pid": number} for entry in _in_flight(events, scale)]
    return trace


def write_trace(path: str | Path, events: list[dict[str, Any]]) -> None:
    """Write a trace to a file, over one that is there.

    Args:
        path: Of the file; its folder must exist.
        events: Of `trace_of`, once or several times.
    """
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "args": {"name": name}, "pid": process, "tid": thread}


def _entries(event: Event, scale: float) -> Iterator[dict[str, Any]]:
    """Give the slice or the mark of an event; a message that was there at once has none."""
    step, duration = event.instruction, event.end - event.start
    entry: dict[str, Any] = {"name": str(step), "ts": event.start * scale}
    slice_ = entry | {"ph": "X", "dur": duration * scale}
    if isinstance(step, Communication):
        if duration > 0:
            args = {"stage": step.stage, "microbatch": step.microbatch, "kind": "wait"}
            yield slice_ | {"name": f"wait {step}", "cat": "wait", "args": args}
        return
    args = {"stage": step.stage, "kind": _KINDS[type(step)]}
    if isinstance(step, Compute):
        args |= {"microbatch": step.microbatch, "version": step.version}
        yield slice_ | {"cat": "compute", "args": args}
        return
    args["update"] = step.update
    if duration > 0:
        yield slice_ | {"cat": "update", "args": args}
    elif isinstance(step, Update):
        yield entry | {"ph": "i", "s": "t", "cat": "update", "args": args}


def _arrows(events: list[Event], scale: float, process: str) -> Iterator[dict[str, Any]]:
    """Give both ends of an arrow for each activation and gradient that changes ranks.

    Computes of the same name are told apart by their order.
    """
    computes: dict[tuple[bool, int, int], list[Event]] = defaultdict(list)
    for event in events:
        step = event.instruction
        if isinstance(step, Compute) and not isinstance(step, BackwardWeight):
            computes[isinstance(step, Forward), step.stage, step.microbatch].append(event)
    for (forward, stage, i), targets in computes.items():
        sources = computes.get((forward, stage - 1 if forward else stage + 1, i), [])
        for count, (source, target) in enumerate(zip(sources, targets, strict=False)):
            if source.rank == target.rank:
                continue
            start, end = source.start * scale, source.end * scale
            arrow: dict[str, Any] = {"name": "activation" if forward else "gradient"}
            arrow |= {"cat": "message", "id": f"{process}:{target.instruction}:{count}"}
            yield arrow | {"ph": "s", "tid": source.rank, "ts": max(start, end - _INSIDE)}
            yield arrow | {"ph": "f", "tid": target.rank, "ts": target.start * scale, "bp": "e"}


def _in_flight(events: list[Event], scale: float) -> Iterator[dict[str, Any]]:
    """Count the micro-batches of each rank between forward and last backward; not in evaluation."""
    last = Backward | BackwardWeight
    if not any(isinstance(event.instruction, last) for event in events):
        return
    in_flight: Counter[int] = Counter()
    for event in events:
        step, rank = event.instruction, event.rank
        if isinstance(step, Forward | last):
            in_flight[rank] += 1 if isinstance(step, Forward) else -1
            entry: dict[str, Any] = {"ph": "C", "name": f"in flight, rank {rank}", "tid": rank}
            args = {"micro-batches": in_flight[rank]}
            yield entry | {"ts": event.end * scale, "args": args}
