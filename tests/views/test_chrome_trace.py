"""A trace says what the timeline says, in the form that Chrome and Perfetto read."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.schedule import (
    Compute,
    Costs,
    Receive,
    Reduce,
    Timeline,
    Update,
    make_plan,
    simulate,
)
from lightning_pipe.schedule.registry import look_up
from lightning_pipe.views.chrome_trace import trace_of, write_trace

CASES: dict[str, tuple[str, int, Any, int]] = {
    "1f1b": ("1f1b", 4, 6, 1),
    "interleaved": ("interleaved", 2, 4, 2),
    "zero bubble": ("zero_bubble", 3, 6, 1),
    "zero bubble, two stages": ("zero_bubble", 3, 6, 2),
    "pipedream": ("pipedream", 3, (1,) * 5, 1),
    "forward only": ("forward", 3, 4, 1),
}
COSTS = Costs(communication=0.25, update=0.5)


def timeline_of(case: str, costs: Costs = COSTS) -> Timeline:
    name, ranks, batches, stages = CASES[case]
    return simulate(make_plan(name, look_up(name).place(ranks, stages), batches), costs)


def phases(trace: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [entry for entry in trace if entry["ph"] == phase]


@pytest.mark.parametrize("case", CASES)
def test_slices_are_the_events(case: str) -> None:
    timeline = timeline_of(case)
    slices = phases(trace_of(timeline, seconds_per_unit=1e-3), "X")
    expected = {
        (str(event.instruction), event.rank): (event.start * 1e3, (event.end - event.start) * 1e3)
        for event in timeline.events
        if isinstance(event.instruction, Compute | Update)
    }
    expected |= {
        (f"wait {event.instruction}", event.rank): (
            event.start * 1e3,
            (event.end - event.start) * 1e3,
        )
        for event in timeline.events
        if isinstance(event.instruction, Receive) and event.end > event.start
    }
    found = {(entry["name"], entry["tid"]): (entry["ts"], entry["dur"]) for entry in slices}
    assert found.keys() == expected.keys()
    assert len(found) == len(slices)
    for key, times in expected.items():
        assert found[key] == pytest.approx(times, abs=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_slices_of_a_rank_do_not_overlap(case: str) -> None:
    by_rank = defaultdict(list)
    for entry in phases(trace_of(timeline_of(case)), "X"):
        by_rank[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    assert len(by_rank) == CASES[case][1]
    for times in by_rank.values():
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(sorted(times)))


@pytest.mark.parametrize("case", CASES)
def test_arrows_lead_from_a_compute_to_the_one_that_needs_it(case: str) -> None:
    timeline = timeline_of(case)
    trace = trace_of(timeline)
    starts = {entry["id"]: entry for entry in phases(trace, "s")}
    ends = {entry["id"]: entry for entry in phases(trace, "f")}
    messages = sum(isinstance(event.instruction, Receive) for event in timeline.events)
    assert len(phases(trace, "s")) == len(phases(trace, "f")) == len(starts) == messages
    assert starts.keys() == ends.keys()

    def enclosing(entry: dict[str, Any]) -> str:
        (name,) = [
            other["name"]
            for other in phases(trace, "X")
            if other["tid"] == entry["tid"] and other["cat"] == "compute"
            if other["ts"] <= entry["ts"] < other["ts"] + other["dur"]
        ]
        return str(name)

    spelled = {str(event.instruction): event.instruction for event in timeline.events}
    seen = set()
    for key, start in starts.items():
        end = ends[key]
        assert start["tid"] != end["tid"]
        assert start["ts"] <= end["ts"]
        assert start["name"] == end["name"]
        source, target = spelled[enclosing(start)], spelled[enclosing(end)]
        assert isinstance(source, Compute)
        assert isinstance(target, Compute)
        ahead = 1 if start["name"] == "activation" else -1
        assert target.stage == source.stage + ahead
        assert target.microbatch == source.microbatch
        seen.add((start["name"], target.stage, target.microbatch))
    assert len(seen) == messages


@pytest.mark.parametrize("case", [case for case in CASES if case != "forward only"])
def test_micro_batches_in_flight(case: str) -> None:
    timeline = timeline_of(case)
    counts = phases(trace_of(timeline), "C")
    for rank in range(CASES[case][1]):
        values = [
            entry["args"]["micro-batches"] for entry in counts if entry["name"].endswith(f" {rank}")
        ]
        assert values[-1] == 0
        if CASES[case][3] == 1:
            assert max(values) == timeline.peak_in_flight[rank]
    assert not phases(trace_of(timeline_of("forward only")), "C")


def test_names_arguments_and_updates_that_take_no_time() -> None:
    timeline = timeline_of("pipedream", Costs())
    trace = trace_of(timeline, process="measured")
    names = {(entry["name"], entry["tid"]): entry["args"] for entry in phases(trace, "M")}
    assert names["process_name", 0] == {"name": "measured"}
    assert [names["thread_name", rank] for rank in range(3)] == [
        {"name": f"rank {rank}"} for rank in range(3)
    ]
    assert Counter(entry["tid"] for entry in phases(trace, "i")) == {0: 5, 1: 5, 2: 5}
    (last,) = [entry for entry in phases(trace, "X") if entry["name"] == "2B4"]
    assert last["args"] == {"stage": 2, "kind": "backward", "microbatch": 4, "version": 4}
    assert {entry["pid"] for entry in trace}.isdisjoint(
        {entry["pid"] for entry in trace_of(timeline, process="predicted")}
    )


def test_recorded_batches_one_after_the_other() -> None:
    """Micro-batch 0 comes again with each batch: its arrows stay within the batch."""
    timeline = timeline_of("1f1b", Costs(reduce=1))
    second = [
        replace(event, start=event.start + 100, end=event.end + 100) for event in timeline.events
    ]
    trace = trace_of([*timeline.events, *second])
    starts = {entry["id"]: entry["ts"] for entry in phases(trace, "s")}
    ends = {entry["id"]: entry["ts"] for entry in phases(trace, "f")}
    assert len(starts) == 2 * 6 * 6
    assert all((starts[key] < 100e6) == (ends[key] < 100e6) for key in starts)
    reduces = [str(Reduce(stage)) for stage in range(4)]
    assert sorted(e["name"] for e in phases(trace, "X") if e["cat"] == "update") == sorted(
        2 * reduces
    )


def test_file(tmp_path: Path) -> None:
    trace = trace_of(timeline_of("1f1b"))
    write_trace(tmp_path / "trace.json", trace)
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read["traceEvents"] == trace
