"""Names, placements and counts: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import ast
import re
import sys
import time
from pathlib import Path

import pytest

import lightning_pipe.schedule as schedule_package
from lightning_pipe.schedule import (
    SCHEDULES,
    Placement,
    ScheduleError,
    VersionPolicy,
    accepts,
    make_plan,
    policy_for,
    schedule_names,
)
from lightning_pipe.schedule.instructions import _requirements

FOUR = Placement.round_robin(4)
FOUR_BY_TWO = Placement.round_robin(4, 2)


def test_names() -> None:
    synchronous, continuous = (
        ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble"),
        ("pipedream", "pipedream_2bw"),
    )
    assert schedule_names() == synchronous + continuous
    assert [name for name in SCHEDULES if SCHEDULES[name].continuous] == list(continuous)
    assert set(SCHEDULES) == {*schedule_names(), "forward"}


def test_placement() -> None:
    placement = Placement.round_robin(3, stages_per_rank=2)
    assert placement.rank_of == (0, 1, 2, 0, 1, 2)
    assert (placement.num_stages, placement.num_ranks) == (6, 3)
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize("rank_of", [(), (1,), (0, 2), (0, -1)])
def test_placement_with_holes(rank_of: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="each rank from 0 to the highest"):
        Placement(rank_of)


@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(0, 1), (1, 0)])
def test_placement_of_nothing(num_ranks: int, stages_per_rank: int) -> None:
    with pytest.raises(ScheduleError, match="must be at least 1"):
        Placement.round_robin(num_ranks, stages_per_rank)


@pytest.mark.parametrize(
    ("schedule", "placement", "num_microbatches", "message"),
    [
        ("1fb1", FOUR, 4, "There is no schedule '1fb1'. Did you mean '1f1b'? Choose one of naive,"),
        ("GPipe", FOUR, 4, "Did you mean 'gpipe'?"),
        ("zzz", FOUR, 4, "There is no schedule 'zzz'. Choose one of naive, gpipe, 1f1b, interl"),
        ("gpipe", FOUR, 0, "num_microbatches=0 must be at least 1"),
        ("naive", FOUR, 2, "set num_microbatches=1, or choose 'gpipe'"),
        ("1f1b", FOUR_BY_TWO, 4, "8 stages on 4 ranks, but '1f1b' needs one stage per rank"),
        ("interleaved", FOUR, 4, "needs at least two per rank: set stages_per_rank=2"),
        ("interleaved", FOUR_BY_TWO, 6, "a multiple of the 4 ranks: the nearest is 4 or 8"),
        ("interleaved", FOUR_BY_TWO, 3, "a multiple of the 4 ranks: the nearest is 4"),
        ("interleaved", Placement((0, 1, 1, 0)), 4, "use Placement.round_robin, or choose 'gpipe'"),
        ("zero_bubble", Placement((0, 1, 0, 1)), 4, "set stages_per_rank=1 or 2"),
        ("zero_bubble", Placement.v_shaped(3), 4, "on each of 3 ranks needs 5 or more"),
        ("interleaved", Placement((0, 1, 0)), 4, "use Placement.round_robin, or choose 'gpipe'"),
        ("1f1b", FOUR, (4, 4), "(4, 4) are 2 batches, but '1f1b' is synchronous and drains"),
        ("pipedream", FOUR, (), "num_microbatches=() must have at least one batch"),
        ("pipedream", FOUR, (1, 0), "num_microbatches=0 must be at least 1"),
        ("pipedream", FOUR_BY_TWO, 4, "8 stages on 4 ranks, but 'pipedream' takes one stage per"),
        ("pipedream_2bw", FOUR_BY_TWO, 8, "but 'pipedream_2bw' takes one stage per rank only"),
        (
            "pipedream_2bw",
            FOUR,
            (4, 3, 4),
            "num_microbatches=3, but 'pipedream_2bw' needs at least",
        ),
        ("pipedream_2bw", FOUR, (3, 3), "set num_microbatches=4 or more"),
    ],
)
def test_refusal(
    schedule: str,
    placement: Placement,
    num_microbatches: int | tuple[int, ...],
    message: str,
) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        make_plan(schedule, placement, num_microbatches)
    if schedule in SCHEDULES:
        assert not accepts(schedule, placement, num_microbatches)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("placement", [FOUR, FOUR_BY_TWO, Placement.round_robin(1)])
@pytest.mark.parametrize("num_microbatches", range(10))
def test_accepts_means_that_make_plan_does(
    schedule: str, placement: Placement, num_microbatches: int
) -> None:
    if accepts(schedule, placement, num_microbatches):
        assert make_plan(schedule, placement, num_microbatches).schedule == schedule
    else:
        with pytest.raises(ScheduleError):
            make_plan(schedule, placement, num_microbatches)


def test_accepts_does_not_hide_a_wrong_name() -> None:
    with pytest.raises(ScheduleError, match="no schedule"):
        accepts("gpip", FOUR, 4)


@pytest.mark.parametrize("num_microbatches", range(1, 9))
def test_gpipe_takes_every_count_over_the_stages_of_another_schedule(num_microbatches: int) -> None:
    assert accepts("gpipe", FOUR_BY_TWO, num_microbatches)


def test_policies() -> None:
    plan = make_plan("pipedream", FOUR, (2, 1), policy=VersionPolicy.NO_STASHING)
    assert plan.policy is VersionPolicy.NO_STASHING
    assert make_plan("pipedream", FOUR, (2, 1)).policy is VersionPolicy.STASHING
    assert make_plan("pipedream_2bw", FOUR, (4, 1)).policy is VersionPolicy.DOUBLE_BUFFERED
    assert make_plan("gpipe", FOUR, 2).policy is VersionPolicy.SYNCHRONOUS


def test_policy_that_a_schedule_does_not_take() -> None:
    message = (
        "policy=VersionPolicy.STASHING, but 'pipedream_2bw' takes only "
        "VersionPolicy.DOUBLE_BUFFERED"
    )
    with pytest.raises(ScheduleError, match=message):
        make_plan("pipedream_2bw", FOUR, 4, policy=VersionPolicy.STASHING)
    assert not accepts("pipedream_2bw", FOUR, 4, VersionPolicy.STASHING)
    assert accepts("pipedream", FOUR, (2, 1), VersionPolicy.VERTICAL_SYNC)


@pytest.mark.parametrize(
    ("schedule", "weight_stashing", "vertical_sync", "policy"),
    [
        ("pipedream", True, False, VersionPolicy.STASHING),
        ("pipedream", True, True, VersionPolicy.VERTICAL_SYNC),
        ("pipedream", False, False, VersionPolicy.NO_STASHING),
        ("pipedream_2bw", True, False, VersionPolicy.DOUBLE_BUFFERED),
        ("1f1b", True, False, VersionPolicy.SYNCHRONOUS),
    ],
)
def test_policy_of_the_options(
    schedule: str, weight_stashing: bool, vertical_sync: bool, policy: VersionPolicy
) -> None:
    assert policy_for(schedule, weight_stashing, vertical_sync) is policy


@pytest.mark.parametrize(
    ("schedule", "weight_stashing", "vertical_sync", "message"),
    [
        ("pipedream", False, True, "vertical_sync=True needs weight_stashing=True: "),
        (
            "1f1b",
            False,
            False,
            "weight_stashing=False has no effect with the synchronous schedule '1f1b', whose "
            "weights do not change within a batch. Leave both weight_stashing and vertical_sync "
            "at their defaults (True, False).",
        ),
        ("gpipe", True, True, "vertical_sync=True has no effect with the synchronous schedule"),
        ("gpipe", False, True, "vertical_sync=True has no effect with the synchronous schedule"),
        (
            "pipedream_2bw",
            False,
            False,
            "weight_stashing=False has no effect with 'pipedream_2bw', which always keeps two",
        ),
        ("pipedreams", False, True, "There is no schedule 'pipedreams'. Did you mean 'pipedream'?"),
    ],
)
def test_options_that_have_no_policy(
    schedule: str, weight_stashing: bool, vertical_sync: bool, message: str
) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        policy_for(schedule, weight_stashing, vertical_sync)


def test_plans_are_cached() -> None:
    assert make_plan("gpipe", FOUR, 4) is make_plan("gpipe", FOUR, 4)


def test_make_plan_is_fast() -> None:
    def seconds() -> float:
        make_plan.cache_clear()
        _requirements.cache_clear()
        start = time.process_time()
        make_plan("1f1b", Placement.round_robin(8), 64)
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.05  # 22 ms on a shared CPU core


def test_imports_only_the_standard_library_and_itself() -> None:
    for path in Path(schedule_package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith("lightning_pipe.schedule")
                assert own or name.split(".")[0] in sys.stdlib_module_names, (path, name)
