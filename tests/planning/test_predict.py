"""The clock on arrays against the exact simulation, bit by bit, and against closed forms."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from lightning_pipe.planning.orders import read_order
from lightning_pipe.planning.predict import predict
from lightning_pipe.schedule import (
    SCHEDULES,
    Backward,
    Compute,
    Costs,
    Forward,
    Placement,
    ScheduleError,
    VersionPolicy,
    accepts,
    make_plan,
    registry,
    simulate,
)
from lightning_pipe.schedule.registry import Schedule

POLICY = VersionPolicy


def some_costs(rng: random.Random, num_stages: int) -> Costs:
    """Unequal stages, and numbers whose sums depend on the order in which they are added."""

    def each(count: int, most: float) -> tuple[float, ...]:
        return tuple(rng.uniform(0, most) for _ in range(count))

    backward = tuple(1.0 + b for b in each(num_stages, 3))
    return Costs(
        each(num_stages, 2),
        backward,
        backward_weight=rng.choice([None, tuple(b * rng.random() for b in backward)]),
        communication=rng.choice([0.0, 0.3, each(num_stages - 1, 4)]),
        reduce=rng.choice([0.0, each(num_stages, 1)]),
        update=rng.choice([0.0, each(num_stages, 5)]),
    )


def cases() -> Iterator[tuple[str, Placement, int | tuple[int, ...], VersionPolicy | None]]:
    for schedule in ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "forward"):
        for num_ranks in (1, 2, 3, 5):
            for stages_per_rank in (1, 2, 3):
                placement = SCHEDULES[schedule].place(num_ranks, stages_per_rank)
                for m in (1, 2, 6, 15, 20):
                    if accepts(schedule, placement, m):
                        yield schedule, placement, m, None
    yield "gpipe", Placement((0, 1, 1, 0, 2)), 7, None  # ranks with more and with fewer stages
    for num_ranks in (1, 2, 4):
        placement = Placement.round_robin(num_ranks)
        for policy in (POLICY.STASHING, POLICY.VERTICAL_SYNC, POLICY.NO_STASHING):
            for batches in (1, (3, 1, 2), (4, 4, 4, 4, 4)):
                yield "pipedream", placement, batches, policy
        for batches in (1, (4, 2), (4, 5, 6, 7), (4,) * 6):
            yield "pipedream_2bw", placement, batches, None


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_exact_simulation(seed: int) -> None:
    rng = random.Random(seed)
    seen = set()
    for schedule, placement, batches, policy in cases():
        costs = some_costs(rng, placement.num_stages)
        timeline = simulate(make_plan(schedule, placement, batches, policy=policy), costs)
        predicted = predict(schedule, placement, batches, costs, policy)
        assert predicted.makespan == timeline.makespan
        assert predicted.busy == timeline.busy
        assert predicted.bubble == timeline.bubble
        assert predicted.mean_bubble == timeline.mean_bubble
        assert predicted.peak_in_flight == timeline.peak_in_flight
        computes = [e for e in timeline.events if isinstance(e.instruction, Compute)]
        for event in computes:
            assert predicted.when(event.instruction) == (event.start, event.end)
        assert np.count_nonzero(~np.isnan(predicted.ends)) == len(computes)
        seen.add((schedule, policy))
    assert len(seen) == 10


@pytest.mark.parametrize(("P", "m"), [(16, 48), (64, 256), (100, 40)])
def test_closed_forms_where_no_plan_is_made(P: int, m: int) -> None:
    """One unit a forward, two a backward: PEERS and Qi et al. 2024."""
    one = Placement.round_robin(P)
    for schedule in ("gpipe", "1f1b"):
        predicted = predict(schedule, one, m)
        assert predicted.makespan == 3 * (m + P - 1)
        assert predicted.mean_bubble == pytest.approx((P - 1) / (m + P - 1), abs=1e-12)
    assert predicted.peak_in_flight == tuple(min(P - s, m) for s in range(P))
    if m % P == 0:
        split = predict("interleaved", Placement.round_robin(P, 4), m)
        assert split.makespan == 3 * (4 * m + P - 1)
    if m >= P:
        split = predict("zero_bubble", one, m)
        assert split.makespan == 3 * m + P - 1  # F + I - W = 1
    if m >= 2 * P - 1:
        split = predict("zero_bubble", Placement.v_shaped(P), m)
        assert split.makespan == 6 * m + P - 1


def test_a_large_pipeline_is_quick() -> None:
    """A tenth of the micro-batches of 128 ranks; the whole takes less than a second."""
    predicted = predict("1f1b", Placement.round_robin(128), 100)
    assert predicted.makespan == 3 * (100 + 127)


def test_what_a_rank_keeps_at_a_time() -> None:
    """The peak over both stages of a rank is less than the sum of their peaks."""
    placement, amount = Placement.round_robin(3, 2), np.array([5.0, 1, 2, 9, 3, 4])
    order = read_order("interleaved", placement, 9)
    plan = make_plan("interleaved", placement, 9)
    for rank, program in enumerate(plan.programs):
        kept = peak = 0.0
        for step in program:
            if isinstance(step, Forward | Backward):
                kept += amount[step.stage] * (1 if isinstance(step, Forward) else -1)
                peak = max(peak, kept)
        assert order.peak_kept(amount)[rank] == peak
    assert (order.peak_kept(amount) < [7 * 14, 7 * 4, 7 * 6]).all()


def test_nothing_is_kept_forward_only() -> None:
    order = read_order("forward", Placement.round_robin(3), 9)
    assert not order.peak_kept(np.ones(3)).any()


def test_what_a_schedule_cannot_take() -> None:
    with pytest.raises(ScheduleError, match="multiple of the 4 ranks"):
        predict("interleaved", Placement.round_robin(4, 2), 6)
    with pytest.raises(ScheduleError, match="Did you mean"):
        predict("gpip", Placement.round_robin(4), 6)
    with pytest.raises(ValueError, match="forward"):
        predict("gpipe", Placement.round_robin(4), 6, Costs(forward=(1.0, 2.0)))


F, B = Forward, Backward


@pytest.mark.parametrize(
    ("orders", "reason"),
    [
        (([F(0, 0)], [F(1, 0), B(1, 0)]), "rank 0 a compute twice, none"),
        (([F(0, 0), F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]), "rank 0 a compute twice"),
        (([B(0, 0), F(0, 0)], [F(1, 0), B(1, 0)]), "rank 0"),
        (([F(0, 0), B(0, 0)], [F(0, 0), B(1, 0)]), "rank 1"),
        (([F(0, 0), B(0, 0)], [F(1, 1), B(1, 1)]), "rank 1"),
    ],
)
def test_what_a_generator_must_not_do(
    monkeypatch: pytest.MonkeyPatch, orders: Sequence[list[Compute]], reason: str
) -> None:
    broken = Schedule(lambda placement, m: list(orders))
    monkeypatch.setattr(registry, "SCHEDULES", {"broken": broken})
    with pytest.raises(ScheduleError, match=reason):
        predict("broken", Placement.round_robin(2), 1)


def test_an_order_that_cannot_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 wants to be done with the first micro-batch, rank 1 waits for the second."""
    orders: list[list[Compute]] = [
        [F(0, 0), B(0, 0), F(0, 1), B(0, 1)],
        [F(1, 1), B(1, 1), F(1, 0), B(1, 0)],
    ]
    monkeypatch.setattr(registry, "SCHEDULES", {"stuck": Schedule(lambda placement, m: orders)})
    with pytest.raises(ScheduleError, match="rank 0 waits for ever"):
        predict("stuck", Placement.round_robin(2), 2)
