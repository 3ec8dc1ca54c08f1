"""The simulator against closed forms that do not come from it."""

from __future__ import annotations

from itertools import accumulate

import pytest

from lightning_pipe.schedule import (
    Backward,
    Compute,
    Costs,
    Forward,
    Placement,
    Plan,
    ReceiveActivation,
    ScheduleError,
    accepts,
    make_plan,
    simulate,
)

RANKS = [1, 2, 3, 4, 6]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "pipedream"])
@pytest.mark.parametrize("P", RANKS)
def test_bubble_and_in_flight(schedule: str, P: int) -> None:
    for m in range(1, 4 * P + 1):
        if not accepts(schedule, Placement.round_robin(P), m):
            continue
        timeline = simulate(make_plan(schedule, Placement.round_robin(P), m))
        assert timeline.makespan == 3 * (m + P - 1)
        assert timeline.busy == (3.0 * m,) * P
        assert timeline.bubble == pytest.approx([(P - 1) / (m + P - 1)] * P, abs=1e-12)
        assert timeline.mean_bubble == pytest.approx((P - 1) / (m + P - 1), abs=1e-12)
        f_then_b = schedule in ("naive", "gpipe")
        expected = [m if f_then_b else min(P - s, m) for s in range(P)]
        assert timeline.peak_in_flight == tuple(expected)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (1.0, 1.2, 1.0), (1.3, 1.0, 0.8)]
)
def test_zero_bubble_h1_takes_what_the_paper_says(
    P: int, forward: float, inputs: float, weights: float
) -> None:
    """Qi et al. 2024, table 2: (P-1)(F+I-W) of idle time, in the memory of 1F1B."""
    work = forward + inputs + weights
    for m in (P, 2 * P, 16):
        plan = make_plan("zero_bubble", Placement.round_robin(P), m)
        timeline = simulate(plan, Costs(forward, inputs + weights, backward_weight=weights))
        assert timeline.makespan == pytest.approx(m * work + (P - 1) * (forward + inputs - weights))
        assert timeline.busy == pytest.approx((m * work,) * P)
        assert max(timeline.peak_in_flight) == min(P, m)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
def test_zero_bubble_v_has_no_gap_in_a_ranks_work(P: int) -> None:
    for m in (2 * P - 1, 2 * P, 16):
        timeline = simulate(make_plan("zero_bubble", Placement.v_shaped(P), m))
        assert timeline.makespan == 6 * m + P - 1
        for rank in range(P):
            computes = [
                e for e in timeline.events if e.rank == rank and isinstance(e.instruction, Compute)
            ]
            assert computes[-1].end - computes[0].start == timeline.busy[rank] == 6 * m


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_bubble(P: int, v: int) -> None:
    for m in range(P, 4 * P + 1, P):
        timeline = simulate(make_plan("interleaved", Placement.round_robin(P, v), m))
        assert timeline.makespan == 3 * (v * m + P - 1)
        assert timeline.mean_bubble == pytest.approx((P - 1) / (v * m + P - 1), abs=1e-12)
        for rank, program in enumerate(timeline.plan.programs):
            warm_up = (P - rank - 1) * 2 + (v - 1) * P
            changes = (isinstance(x, Forward) - isinstance(x, Backward) for x in program)
            assert max(accumulate(changes)) == min(warm_up + 1, m * v)
        assert timeline.peak_in_flight[0] == min(m, 2 * P)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_f_then_b_over_several_stages_per_rank_has_the_interleaved_bubble(v: int) -> None:
    for m in range(4, 14):
        timeline = simulate(make_plan("gpipe", Placement.round_robin(4, v), m))
        assert timeline.makespan == 3 * (v * m + 3)


def test_a_fill_over_many_batches_has_next_to_no_bubble() -> None:
    timeline = simulate(make_plan("pipedream", Placement.round_robin(4), (4,) * 24))
    assert timeline.mean_bubble == pytest.approx(3 / (96 + 3))
    assert timeline.live_versions == (4, 3, 2, 1)


def test_forward_only_keeps_nothing() -> None:
    timeline = simulate(make_plan("forward", Placement.round_robin(3), 5))
    assert timeline.makespan == 7
    assert timeline.peak_in_flight == (0, 0, 0)
    assert timeline.live_versions == (1, 1, 1)


@pytest.mark.parametrize("P", RANKS)
def test_latency_shows_once_per_hop_and_direction_in_gpipe(P: int) -> None:
    timeline = simulate(make_plan("gpipe", Placement.round_robin(P), 4), Costs(communication=0.25))
    assert timeline.makespan == 3 * (4 + P - 1) + 2 * (P - 1) * 0.25


def test_the_slowest_stage_sets_the_pace() -> None:
    plan = make_plan("gpipe", Placement.round_robin(3), 8)
    timeline = simulate(plan, Costs([1.0, 4.0, 1.0], [2.0, 8.0, 2.0]))
    assert timeline.makespan == (1 + 8 * 4 + 1) + (2 + 8 * 8 + 2)
    assert timeline.busy == (24.0, 96.0, 24.0)


def test_events_of_two_ranks() -> None:
    timeline = simulate(make_plan("naive", Placement.round_robin(2), 1), Costs(communication=0.5))
    spans = {str(event.instruction): (event.start, event.end) for event in timeline.events}
    assert spans == {
        "0F0": (0.0, 1.0),
        "0SEND_F0": (1.0, 1.0),
        "1RECV_F0": (0.0, 1.5),
        "1F0": (1.5, 2.5),
        "1B0": (2.5, 4.5),
        "1SEND_B0": (4.5, 4.5),
        "1REDUCE_GRAD": (4.5, 4.5),
        "1UPDATE": (4.5, 4.5),
        "0RECV_B0": (1.0, 5.0),
        "0B0": (5.0, 7.0),
        "0REDUCE_GRAD": (7.0, 7.0),
        "0UPDATE": (7.0, 7.0),
    }


def test_free_computes_have_no_bubble() -> None:
    plan = make_plan("gpipe", Placement.round_robin(2), 2)
    assert simulate(plan, Costs(0.0, 0.0)).bubble == (0.0, 0.0)


@pytest.mark.parametrize("forward", [[1.0], [1.0, 2.0, 3.0], -1.0, [1.0, -1.0], []])
def test_costs_that_do_not_fit(forward: float | list[float]) -> None:
    with pytest.raises(ValueError, match="must be one cost, or 2, none below 0"):
        simulate(make_plan("gpipe", Placement.round_robin(2), 2), Costs(forward))


def test_a_plan_that_cannot_complete() -> None:
    placement = Placement.round_robin(2)
    plan = Plan("mine", placement, (1,), ((), (ReceiveActivation(1, 0, peer=0), Forward(1, 0))))
    with pytest.raises(ScheduleError, match="cannot complete"):
        simulate(plan)
