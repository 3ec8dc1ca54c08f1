"""A schedule of the user's own, as in examples/custom_schedule.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_pipe.schedule import (
    Backward,
    Compute,
    Forward,
    Placement,
    ScheduleError,
    make_plan,
    register_schedule,
    registry,
    schedule_names,
    text_grid,
)


@pytest.fixture
def _forgotten() -> Iterator[None]:
    before = dict(registry._schedules)
    yield
    registry._schedules.clear()
    registry._schedules.update(before)


def one_at_a_time(placement: Placement, num_microbatches: int) -> Iterator[list[Compute]]:
    for rank in range(placement.num_ranks):
        (stage,) = placement.stages_of(rank)
        yield [kind(stage, i) for i in range(num_microbatches) for kind in (Forward, Backward)]


@pytest.mark.usefixtures("_forgotten")
def test_a_registered_schedule_runs_by_its_name() -> None:
    register_schedule("one_at_a_time", one_at_a_time, max_in_flight=lambda placement, count: (1, 1))
    assert "one_at_a_time" in schedule_names()
    assert text_grid(make_plan("one_at_a_time", Placement.round_robin(2), 2)) == (
        "rank 0 | F0 .. .. B0 F1 .. .. B1\nrank 1 | .. F0 B0 .. .. F1 B1 .."
    )


@pytest.mark.usefixtures("_forgotten")
def test_it_is_validated() -> None:
    register_schedule("broken", lambda placement, count: [[Forward(0, 0)], [Forward(1, 0)]])
    with pytest.raises(ScheduleError, match="broken, rank 1: 1B0 is missing"):
        make_plan("broken", Placement.round_robin(2), 1)
    register_schedule("wide", one_at_a_time, max_in_flight=lambda placement, count: (0, 1))
    with pytest.raises(ScheduleError, match="the bound is 0"):
        make_plan("wide", Placement.round_robin(2), 1)


@pytest.mark.parametrize(
    ("name", "why"), [("1f1b", "is built in"), ("forward", "is built in"), ("a.csv", "in files")]
)
def test_names_that_are_taken(name: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        register_schedule(name, one_at_a_time)
