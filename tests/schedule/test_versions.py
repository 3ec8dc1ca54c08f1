"""Which weights are read: every policy against its table, and against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from lightning_pipe.schedule import (
    Backward,
    Forward,
    Placement,
    Plan,
    VersionPolicy,
    live_versions,
    make_plan,
    staleness,
)

POLICIES = [
    ("pipedream", VersionPolicy.STASHING),
    ("pipedream", VersionPolicy.VERTICAL_SYNC),
    ("pipedream", VersionPolicy.NO_STASHING),
    ("pipedream_2bw", VersionPolicy.DOUBLE_BUFFERED),
]


@cache
def fills(schedule: str, policy: VersionPolicy) -> list[Plan]:
    """Fills of one to three batches, the last of them whole or shorter."""
    return [
        make_plan(schedule, Placement.round_robin(P), (m,) * (N - 1) + (last,), policy=policy)
        for P in range(1, 6)
        for m in range(P if schedule == "pipedream_2bw" else 1, 7)
        for N in (1, 2, 3)
        for last in sorted({1, m})
    ]


def reads(plan: Plan, kind: type[Forward | Backward], microbatch: int) -> list[int]:
    """What one micro-batch reads, stage by stage."""
    steps = [step for program in plan.programs for step in program if isinstance(step, kind)]
    steps = [step for step in steps if step.microbatch == microbatch]
    return [step.version for step in sorted(steps, key=lambda step: step.stage)]


@pytest.mark.parametrize(("schedule", "policy"), POLICIES)
def test_every_fill_runs(schedule: str, policy: VersionPolicy, broken: Callable[..., str]) -> None:
    """The interpreter has the table of versions written out."""
    for plan in fills(schedule, policy):
        for receive_model in ("posted", "rendezvous"):
            problem = broken(plan, receive_model)
            assert not problem, (plan.placement, plan.batches, receive_model, problem)


@pytest.mark.parametrize(
    ("policy", "forward", "backward"),
    [
        (VersionPolicy.STASHING, [1, 2, 3, 4], [1, 2, 3, 4]),
        (VersionPolicy.VERTICAL_SYNC, [1, 1, 1, 1], [1, 1, 1, 1]),
        (VersionPolicy.NO_STASHING, [1, 2, 3, 4], [4, 4, 4, 4]),
    ],
)
def test_microbatch_4_on_4_workers(
    policy: VersionPolicy, forward: list[int], backward: list[int]
) -> None:
    plan = make_plan("pipedream", Placement.round_robin(4), (1,) * 8, policy=policy)
    assert reads(plan, Forward, 4) == forward
    assert reads(plan, Backward, 4) == backward


def test_2bw_reads_the_weights_of_two_batches_before() -> None:
    plan = make_plan("pipedream_2bw", Placement.round_robin(3), (3, 3, 3, 3, 2))
    for kind in (Forward, Backward):
        by_microbatch = [reads(plan, kind, i) for i in range(14)]
        assert by_microbatch == [[n] * 3 for n in [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]]


def test_versions_follow_the_stages_when_ranks_are_permuted() -> None:
    plan = make_plan("pipedream", Placement((2, 0, 1)), (1,) * 8)
    assert reads(plan, Forward, 4) == [2, 3, 4]


@pytest.mark.parametrize(("schedule", "policy"), POLICIES)
def test_staleness_and_live_versions(schedule: str, policy: VersionPolicy) -> None:
    for plan in fills(schedule, policy):
        stages = range(plan.placement.num_stages)
        w = [plan.placement.num_stages - 1 - stage for stage in stages]
        M, N = plan.num_microbatches, len(plan.batches)
        stale, live = {
            VersionPolicy.STASHING: (w, [w[s] + 1 for s in stages]),
            VersionPolicy.VERTICAL_SYNC: ([w[0] for s in stages], [w[0] + 1 for s in stages]),
            VersionPolicy.NO_STASHING: (w, [1 for s in stages]),
            VersionPolicy.DOUBLE_BUFFERED: (
                [1 for s in stages],
                [2 if w[s] > 0 else 1 for s in stages],
            ),
        }[policy]
        if schedule == "pipedream" and w[0] >= M:  # too few of them to come to that
            stale = [min(number, M - 1) for number in stale]
            live = [min(number, M) for number in live]
        if schedule == "pipedream_2bw":
            stale = [min(number, N - 1) for number in stale]
            live = live if N > 2 else [1 for s in stages]
        assert staleness(plan) == tuple(stale), plan
        assert live_versions(plan) == tuple(live), plan


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "forward"])
def test_synchronous_schedules_hold_one_version_that_is_never_stale(schedule: str) -> None:
    plan = make_plan(schedule, Placement.round_robin(3), 4)
    assert live_versions(plan) == (1, 1, 1)
    assert staleness(plan) == (0, 0, 0)


def test_on_one_rank_only_the_updates_of_2bw_are_late() -> None:
    one, batches = Placement.round_robin(1), (1, 1, 1)
    assert " ".join(map(str, make_plan("pipedream", one, batches).programs[0])) == (
        "0F0 0B0 0REDUCE_GRAD 0UPDATE 0F1 0B1 0REDUCE_GRAD1 0UPDATE1 0F2 0B2 0REDUCE_GRAD2 0UPDATE2"
    )
    assert " ".join(map(str, make_plan("pipedream_2bw", one, batches).programs[0])) == (
        "0F0 0B0 0REDUCE_GRAD 0F1 0B1 0REDUCE_GRAD1 0UPDATE 0F2 0B2 0REDUCE_GRAD2 0UPDATE1 0UPDATE2"
    )


def test_updates_of_a_plan() -> None:
    four = Placement.round_robin(4)
    synchronous = Plan("1f1b", four, (8,))
    assert (synchronous.num_microbatches, synchronous.num_updates) == (8, 1)
    assert synchronous.microbatches_of(0) == range(8)
    by_microbatch = Plan("pipedream", four, (4, 4, 3), policy=VersionPolicy.STASHING)
    assert (by_microbatch.num_microbatches, by_microbatch.num_updates) == (11, 11)
    assert by_microbatch.microbatches_of(5) == range(5, 6)
    by_batch = Plan("pipedream_2bw", four, (4, 5, 3), policy=VersionPolicy.DOUBLE_BUFFERED)
    assert (by_batch.num_microbatches, by_batch.num_updates) == (12, 3)
    assert [by_batch.microbatches_of(k) for k in range(3)] == [range(4), range(4, 9), range(9, 12)]
    for plan in (synchronous, by_microbatch, by_batch):
        updates = range(plan.num_updates)
        assert [plan.update_of(i) for i in range(plan.num_microbatches)] == [
            k for k in updates for _ in plan.microbatches_of(k)
        ]
    assert Plan("forward", four, (8,)).num_updates == 0
