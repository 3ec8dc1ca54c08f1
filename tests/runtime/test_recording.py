"""What a recorder keeps of a pipeline's rounds, and what it forgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_pipe.runtime.recording import AwaitBatch, AwaitEnding, Fill, Recorder
from lightning_pipe.runtime.transport import LocalTransport
from lightning_pipe.schedule import SCHEDULES, Forward, Placement, make_plan

from .harness import Layout, Module, Rank, on_ranks


def record(keep: int, rounds: Sequence[int]) -> list[Fill]:
    """Rounds with these indices in their fills; the forward of each takes a second."""
    recorder = Recorder(keep)
    for number, index in enumerate(rounds):
        recorder.begin_round(index)
        recorder.add(AwaitBatch(), number, number + 0.5)
        recorder.add(Forward(0, index), number + 1, number + 2)
    return list(recorder.fills)


def kept(fill: Fill) -> list[int]:
    return [one.index for one in fill.kept]


def test_the_latest_fills_are_kept() -> None:
    fills = record(3, [0] * 7)

    assert [fill.number for fill in fills] == [4, 5, 6]
    assert [kept(fill) for fill in fills] == [[0]] * 3
    assert [one.entries[1][1] for fill in fills for one in fill.kept] == [5, 6, 7]


def test_of_a_long_fill_begin_and_end_are_kept() -> None:
    (fill,) = record(2, range(9))

    assert [one.index for one in fill.head] == [0, 1]
    assert [one.index for one in fill.tail] == [7, 8]
    assert (fill.skipped, fill.skipped_busy) == (5, 5.0)


def test_fills_of_several_rounds_make_room() -> None:
    fills = record(4, [0, 1, 2, 0, 1, 2, 0, 1, 2])

    assert [fill.number for fill in fills] == [1, 2]
    assert [kept(fill) for fill in fills] == [[0, 1, 2]] * 2


def test_a_recorder_may_come_in_the_middle_of_a_fill() -> None:
    assert [kept(fill) for fill in record(4, [5, 6, 0])] == [[5, 6], [0]]


WIDTH, COUNT, RANKS = 3, 4, 2


def run(schedule: str, stages: int, batches: int) -> list[Recorder]:
    """Train small layers; the recorder of each rank."""
    torch.manual_seed(0)
    layout = Layout(schedule, RANKS, COUNT, stages)
    models = [Module(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(RANKS)]
    batch = torch.ones(COUNT, WIDTH).double(), torch.zeros(COUNT, WIDTH).double()

    def work(transport: LocalTransport) -> Recorder:
        rank, recorder = Rank(models[transport.rank], layout, transport), Recorder(10)
        rank.pipeline.record_to(recorder)
        rank.fit([batch] * batches)
        rank.pipeline.record_to(None)
        rank.fit([batch])  # of which nothing is recorded
        return recorder

    return on_ranks(RANKS, work)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)],
)
def test_a_pipeline_records_its_plan(schedule: str, stages: int) -> None:
    recorders = run(schedule, stages, batches=3)

    plan = make_plan(schedule, SCHEDULES[schedule].place(RANKS, stages), COUNT)
    for rank, recorder in enumerate(recorders):
        assert [kept(fill) for fill in recorder.fills] == [[0]] * 3
        hears = [AwaitBatch()] * (rank > 0)
        is_told = [AwaitEnding(0)] * (rank != plan.placement.rank_of[-1])
        for fill in recorder.fills:
            entries = [entry for one in fill.kept for entry in one.entries]
            assert [step for step, _, _ in entries] == [*hears, *plan.programs[rank], *is_told]
            assert all(start <= end for _, start, end in entries)
            assert all(before[2] <= after[1] for before, after in pairwise(entries))


def test_a_fill_over_batches_is_recorded_round_by_round() -> None:
    recorders = run("pipedream", stages=1, batches=3)

    plan = make_plan("pipedream", Placement.round_robin(RANKS), (COUNT,) * 3)
    for rank, recorder in enumerate(recorders):
        (fill,) = recorder.fills
        assert kept(fill) == [0, 1, 2]
        steps = [step for one in fill.kept for step, _, _ in one.entries]
        waits = [step for step in steps if isinstance(step, AwaitBatch | AwaitEnding)]
        assert [step for step in steps if step not in waits] == list(plan.programs[rank])
        # One round late while it goes on, and at its end all that is left.
        assert waits == ([AwaitBatch()] * 3 if rank else [AwaitEnding(0), AwaitEnding(2)])


def test_cost_of_an_instruction() -> None:
    """A fifth of a microsecond or so; ten times that would be seen in runs with small layers."""
    recorder, step = Recorder(10), Forward(0, 0)

    def measure() -> float:
        recorder.begin_round(0)
        began = time.perf_counter()
        for _ in range(1000):
            recorder.add(step, 0.0, 1.0)
        return time.perf_counter() - began

    assert min(measure() for _ in range(20)) / 1000 < 2e-6
