"""Rounds put together again must be the plan that they are cut from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from lightning_pipe.schedule import (
    Backward,
    Instruction,
    Placement,
    ReceiveActivation,
    Rounds,
    ScheduleError,
    Update,
    VersionPolicy,
    make_plan,
    validate,
)

Program = tuple[Instruction, ...]

POLICIES = [
    ("pipedream", VersionPolicy.STASHING),
    ("pipedream", VersionPolicy.VERTICAL_SYNC),
    ("pipedream", VersionPolicy.NO_STASHING),
    ("pipedream_2bw", VersionPolicy.DOUBLE_BUFFERED),
]


def shapes(schedule: str) -> Iterator[tuple[int, int]]:
    """Numbers of ranks and of micro-batches per batch."""
    for P in (1, 2, 4):
        fewest = P if schedule == "pipedream_2bw" else 1
        yield from ((P, m) for m in (1, 2, 3, 5) if m >= fewest)


def rounds_of(schedule: str, P: int, size: int, policy: VersionPolicy) -> list[Rounds]:
    placement = Placement.round_robin(P)
    return [Rounds(schedule, placement, rank, size, policy) for rank in range(P)]


def joined(rounds: Rounds, whole: int, size: int) -> Program:
    """All rounds of a fill that goes on after so many batches."""
    return tuple(step for n in range(whole) for step in rounds.of(n, size, drains=False))


def spelled(program: Program) -> str:
    """All there is to a program: ``==`` does not look at versions."""
    return "\n".join(map(repr, program))


def test_rounds_of_two_ranks() -> None:
    first, last = rounds_of("pipedream", 2, 2, VersionPolicy.STASHING)
    rounds = [first.of(0, 2, False), first.of(1, 2, False), first.of(2, 1, True)]
    assert [" ".join(map(str, program)) for program in rounds] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0REDUCE_GRAD 0UPDATE",
        "0F2 0SEND_F2 0RECV_B1 0B1 0REDUCE_GRAD1 0UPDATE1 "
        "0F3 0SEND_F3 0RECV_B2 0B2 0REDUCE_GRAD2 0UPDATE2",
        "0F4 0SEND_F4 0RECV_B3 0B3 0REDUCE_GRAD3 0UPDATE3 0RECV_B4 0B4 0REDUCE_GRAD4 0UPDATE4",
    ]
    assert " ".join(map(str, first.drain(2))) == "0RECV_B3 0B3 0REDUCE_GRAD3 0UPDATE3"
    assert last.drain(2) == ()
    assert isinstance(last.of(1, 2, drains=False)[0], ReceiveActivation)


def test_the_round_of_2bw_ends_with_the_update_by_the_batch_before() -> None:
    for rounds in rounds_of("pipedream_2bw", 3, 4, VersionPolicy.DOUBLE_BUFFERED):
        assert not any(isinstance(step, Update) for step in rounds.of(0, 4, drains=False))
        for n in range(1, 9):
            program = rounds.of(n, 4, drains=False)
            updates = [step.update for step in program if isinstance(step, Update)]
            assert updates == [n - 1]
            assert isinstance(program[-1], Update)
            draining = rounds.of(n, 4, drains=True)
            assert [step.update for step in draining if isinstance(step, Update)] == [n - 1, n]
            assert [step.update for step in rounds.drain(n) if isinstance(step, Update)] == [n - 1]


@pytest.mark.parametrize(("schedule", "policy"), POLICIES)
def test_rounds_up_to_one_that_drains_are_the_plan_of_the_fill(
    schedule: str, policy: VersionPolicy
) -> None:
    """Beyond the steady state too: there a round is one that was cut, moved on."""
    for P, size in shapes(schedule):
        by_rank = rounds_of(schedule, P, size, policy)
        for whole in (0, 1, 2, 4, 11):
            for count in {1, size}:
                batches = (size,) * whole + (count,)
                plan = make_plan(schedule, Placement.round_robin(P), batches, policy=policy)
                for rounds, program in zip(by_rank, plan.programs, strict=True):
                    parts = joined(rounds, whole, size) + rounds.of(whole, count, drains=True)
                    assert spelled(parts) == spelled(program), (P, size, whole, count)


@pytest.mark.parametrize(("schedule", "policy"), POLICIES)
def test_a_drain_makes_a_valid_plan_of_what_went_before(
    schedule: str, policy: VersionPolicy, broken: Callable[..., str]
) -> None:
    for P, size in shapes(schedule):
        by_rank = rounds_of(schedule, P, size, policy)
        for whole in (1, 2, 3, 11):
            plan = make_plan(schedule, Placement.round_robin(P), (size,) * whole, policy=policy)
            programs = tuple(
                joined(rounds, whole, size) + rounds.drain(whole) for rounds in by_rank
            )
            drained = replace(plan, programs=programs)
            validate(drained)
            assert not broken(drained)


def test_nothing_is_left_before_the_first_round() -> None:
    for rounds in rounds_of("pipedream", 3, 2, VersionPolicy.STASHING):
        assert rounds.drain(0) == ()


def test_a_round_cannot_be_short_and_go_on() -> None:
    (rounds,) = rounds_of("pipedream", 1, 2, VersionPolicy.STASHING)
    with pytest.raises(AssertionError):
        rounds.of(3, 1, drains=False)


def test_a_size_that_the_schedule_does_not_take() -> None:
    with pytest.raises(ScheduleError, match="set num_microbatches=4 or more"):
        rounds_of("pipedream_2bw", 4, 3, VersionPolicy.DOUBLE_BUFFERED)


def test_late_rounds_cost_no_more_than_early_ones() -> None:
    rounds = rounds_of("pipedream_2bw", 4, 4, VersionPolicy.DOUBLE_BUFFERED)[1]

    def seconds(index: int) -> float:
        start = time.process_time()
        program = rounds.of(index, 4, drains=False)
        elapsed = time.process_time() - start
        backwards = [step for step in program if isinstance(step, Backward)]
        assert [step.version for step in backwards] == [index - 2] * 2 + [index - 1] * 2
        return elapsed

    assert min(seconds(10**6 + i) for i in range(20)) < 0.001  # 22 us on a shared CPU core
