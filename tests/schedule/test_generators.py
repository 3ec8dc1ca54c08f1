"""Each generator against its picture, which is also the one in its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from lightning_pipe.schedule import Backward, Forward, Placement, look_up, make_plan, text_grid
from lightning_pipe.schedule.forward_only import forward_only
from lightning_pipe.schedule.gpipe import gpipe
from lightning_pipe.schedule.interleaved import interleaved
from lightning_pipe.schedule.one_f_one_b import one_f_one_b
from lightning_pipe.schedule.pipedream import pipedream
from lightning_pipe.schedule.zero_bubble import _zb_v, zero_bubble

GPIPE = """\
rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
rank 1 | .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 ..
rank 2 | .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 .. ..
rank 3 | .. .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. .. .."""

ONE_F_ONE_B = """\
rank 0 | F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
rank 1 | .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..
rank 2 | .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 .. ..
rank 3 | .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. .. .."""

INTERLEAVED = """\
rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ..  2B2 ..  2B3 0B2 0B3
rank 1 | ..  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .."""

PIPEDREAM = """\
rank 0 | F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@0 F4@2 B2@0 ..   B3@1 ..   B4@2
rank 1 | ..   F0@0 F1@0 ..   B0@0 F2@1 B1@0 F3@2 B2@1 F4@3 B3@2 ..   B4@3 ..
rank 2 | ..   ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3 F4@4 B4@4 ..   .."""

FORWARD = """\
rank 0 | F0 F1 F2 F3 .. ..
rank 1 | .. F0 F1 F2 F3 ..
rank 2 | .. .. F0 F1 F2 F3"""

ZERO_BUBBLE = """\
rank 0 | F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
rank 1 | .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
rank 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4"""

ZERO_BUBBLE_V = """\
rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ..
rank 1 | ..  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"""

NAIVE = """\
rank 0 | F0 .. .. .. .. B0
rank 1 | .. F0 .. .. B0 ..
rank 2 | .. .. F0 B0 .. .."""


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "stages_per_rank", "num_microbatches", "generator", "picture"),
    [
        ("gpipe", 4, 1, 4, gpipe, GPIPE),
        ("1f1b", 4, 1, 6, one_f_one_b, ONE_F_ONE_B),
        ("interleaved", 2, 2, 4, interleaved, INTERLEAVED),
        ("zero_bubble", 3, 1, 5, zero_bubble, ZERO_BUBBLE),
        ("zero_bubble", 2, 2, 3, _zb_v, ZERO_BUBBLE_V),
        ("pipedream", 3, 1, 5, pipedream, PIPEDREAM),
        ("forward", 3, 1, 4, forward_only, FORWARD),
        ("naive", 3, 1, 1, None, NAIVE),
    ],
)
def test_picture(
    schedule: str,
    num_ranks: int,
    stages_per_rank: int,
    num_microbatches: int,
    generator: Callable[..., object] | None,
    picture: str,
) -> None:
    placement = look_up(schedule).place(num_ranks, stages_per_rank)
    plan = make_plan(schedule, placement, num_microbatches)
    assert text_grid(plan, versions="@" in picture) == picture
    if generator is not None:
        assert picture in (inspect.getdoc(generator) or "").replace("\n    ", "\n")


def test_1f1b_with_fewer_microbatches_than_stages_is_all_warm_up() -> None:
    assert text_grid(make_plan("1f1b", Placement.round_robin(3), 2)) == (
        "rank 0 | F0 F1 .. .. .. B0 .. B1\n"
        "rank 1 | .. F0 F1 .. B0 .. B1 ..\n"
        "rank 2 | .. .. F0 B0 F1 B1 .. .."
    )


def test_gpipe_finishes_one_stage_of_a_rank_before_the_next() -> None:
    assert text_grid(make_plan("gpipe", Placement.round_robin(2, 2), 3)) == (
        "rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 ..  ..  2B0 2B1 2B2 0B0 0B1 0B2\n"
        "rank 1 | ..  1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2 .."
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_rank(schedule: str) -> None:
    order = "F0 F1 B0 B1" if schedule == "gpipe" else "F0 B0 F1 B1"
    assert text_grid(make_plan(schedule, Placement.round_robin(1), 2)) == f"rank 0 | {order}"


def test_one_rank_interleaved_hands_over_locally() -> None:
    plan = make_plan("interleaved", Placement.round_robin(1, 2), 2)
    assert text_grid(plan) == "rank 0 | 0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"
    assert {type(step).__name__ for step in plan.programs[0]} == {
        "Forward",
        "Backward",
        "Reduce",
        "Update",
    }


def test_1f1b_follows_the_stages_when_ranks_are_permuted() -> None:
    plan = make_plan("1f1b", Placement((1, 0)), 2)
    assert text_grid(plan) == "rank 0 | .. F0 B0 F1 B1 ..\nrank 1 | F0 F1 .. B0 .. B1"


def test_versions_of_a_synchronous_plan_are_0() -> None:
    plan = make_plan("1f1b", Placement.round_robin(2), 4)
    steps = [step for program in plan.programs for step in program]
    assert {step.version for step in steps if isinstance(step, Forward | Backward)} == {0}
