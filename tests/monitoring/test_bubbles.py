"""Where the time of a rank went, on simulated timelines of which all is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import pytest

from lightning_pipe.monitoring.bubbles import Bubble, split_fill
from lightning_pipe.monitoring.prediction import events_of, predict
from lightning_pipe.monitoring.replay import Rows, Times, records_of, replay
from lightning_pipe.monitoring.report import MonitorReport, RankRecords
from lightning_pipe.programs import Timing
from lightning_pipe.runtime.recording import AwaitBatch, AwaitEnding, AwaitReduction, Fill, Round
from lightning_pipe.schedule import (
    SCHEDULES,
    Costs,
    Forward,
    Plan,
    Receive,
    ReceiveActivation,
    Timeline,
    Update,
    make_plan,
    simulate,
)

SYNCHRONOUS = [
    ("naive", 4, 1, 1),
    ("gpipe", 4, 6, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved", 3, 6, 2),
    ("zero_bubble", 4, 8, 1),
    ("zero_bubble", 3, 8, 2),
]
LATENCY = 0.3


def plan_of(schedule: str, ranks: int, batches: int | tuple[int, ...], stages: int = 1) -> Plan:
    return make_plan(schedule, SCHEDULES[schedule].place(ranks, stages), batches)


def unequal(plan: Plan) -> Costs:
    """Costs that no two stages share."""
    count = plan.placement.num_stages
    forward = [1 + stage * 0.4 % 1.1 for stage in range(count)]
    return Costs(forward, [2.1 * cost for cost in forward], communication=LATENCY)


def rows_of(timeline: Timeline, fill: int = 0, begin: float = 0.0) -> Rows:
    """A fill as if it had been recorded, in one round."""
    last = timeline.plan.placement.rank_of[-1]
    rounds = [Round(0) for _ in timeline.busy]
    for event in timeline.events:
        entry = event.instruction, begin + event.start, begin + event.end
        rounds[event.rank].entries.append(entry)
    return [records_of(rank, last, fill, [one]) for rank, one in enumerate(rounds)]


def rounds_of(timeline: Timeline) -> list[list[Round]]:
    """A fill over batches, cut into rounds as the runtime cuts it, by rank."""
    size = timeline.plan.batches[0]
    rounds: list[list[Round]] = [[] for _ in timeline.busy]
    for event in timeline.events:
        step, mine = event.instruction, rounds[event.rank]
        first = len(mine) * size
        if isinstance(step, Forward | ReceiveActivation) and step.microbatch == first:
            mine.append(Round(len(mine)))
        mine[-1].entries.append((step, event.start, event.end))
    return rounds


def assert_complete(bubbles: Sequence[Bubble], timeline: Timeline) -> None:
    """All kinds of idle time are there, and nothing else."""
    for bubble, busy in zip(bubbles, timeline.busy, strict=True):
        kinds = (
            bubble.warm_up,
            bubble.imbalance,
            bubble.communication,
            bubble.cool_down,
            bubble.overhead,
            bubble.reduction,
        )
        assert min(kinds) >= -1e-9
        assert bubble.busy == pytest.approx(busy)
        assert bubble.wall == pytest.approx(timeline.makespan)
        assert bubble.idle == pytest.approx(sum(kinds))


@pytest.mark.parametrize(("schedule", "ranks", "count", "stages"), SYNCHRONOUS)
def test_all_parts_add_up_to_the_wall_time(
    schedule: str, ranks: int, count: int, stages: int
) -> None:
    plan = plan_of(schedule, ranks, count, stages)
    timeline = simulate(plan, unequal(plan))

    assert_complete(split_fill([rows_of(timeline)]), timeline)


@pytest.mark.parametrize(("schedule", "ranks", "count", "stages"), SYNCHRONOUS)
def test_equal_stages_without_latency_only_fill_and_empty_the_pipeline(
    schedule: str, ranks: int, count: int, stages: int
) -> None:
    timeline = simulate(plan_of(schedule, ranks, count, stages))

    bubbles = split_fill([rows_of(timeline)])

    assert_complete(bubbles, timeline)
    assert any(bubble.warm_up for bubble in bubbles)
    for bubble in bubbles:
        assert bubble.warm_up + bubble.cool_down == pytest.approx(bubble.idle)


@pytest.mark.parametrize(("schedule", "ranks", "count", "stages"), SYNCHRONOUS)
def test_latency_is_communication(schedule: str, ranks: int, count: int, stages: int) -> None:
    plan = plan_of(schedule, ranks, count, stages)
    without, timeline = simulate(plan), simulate(plan, Costs(communication=LATENCY))

    bubbles = split_fill([rows_of(timeline)])

    assert_complete(bubbles, timeline)
    assert [bubble.imbalance for bubble in bubbles] == pytest.approx([0.0] * ranks)
    # Rank 0 begins with a compute; what its waits are longer, after that, is due to messages.
    before = {e.instruction: e.end - e.start for e in without.events}
    longer = [
        max(0.0, event.end - event.start - before[event.instruction])
        for event in timeline.events
        if event.rank == 0 and isinstance(event.instruction, Receive)
    ]
    assert bubbles[0].communication == pytest.approx(sum(longer))
    assert bubbles[0].communication > LATENCY


def test_unequal_stages_are_imbalance() -> None:
    timeline = simulate(plan_of("1f1b", 2, 8), Costs((1, 3), (2, 6)))

    first, second = split_fill([rows_of(timeline)])

    # With two stages of 2 + 4 rank 0 would wait 4 for its first gradient, and 2 for its last.
    assert first == Bubble(75, 24, warm_up=4, imbalance=45, cool_down=2)
    assert second == Bubble(75, 72, warm_up=1, cool_down=2)


def test_a_slow_micro_batch_is_imbalance_too() -> None:
    rows = rows_of(simulate(plan_of("gpipe", 2, 4)))
    slow = next(r for r in rows[0] if r.step == Forward(0, 2))
    late = replay(
        rows,
        Times(lambda r: 0.0 if r.awaits else r.seconds + (r is slow), lambda before, after: 0.0),
    )
    rounds = [Round(0, [(r.step, *t) for r, t in zip(*pair)]) for pair in zip(rows, late)]  # noqa: B905

    first, second = split_fill([[*map_records(rounds)]])

    assert second.imbalance == pytest.approx(1)
    assert first.imbalance == second.communication == first.communication == 0


def map_records(rounds: Sequence[Round]) -> Rows:
    return [records_of(rank, len(rounds) - 1, 0, [one]) for rank, one in enumerate(rounds)]


def test_time_between_steps_is_overhead_and_holds_others_up() -> None:
    rounds = [
        Round(0, [(Forward(0, 0), 0, 1), (Forward(0, 1), 1, 2)]),
        Round(0, [(ReceiveActivation(1, 0, 0), 0, 1), (Forward(1, 0), 1, 2)]),
    ]
    rounds[0].entries.append((Forward(0, 2), 7, 8))  # five seconds of something else
    rounds[1].entries += [(ReceiveActivation(1, 2, 0), 2, 8), (Forward(1, 2), 8, 9)]

    first, second = split_fill([map_records(rounds)])

    assert first == Bubble(9, 3, cool_down=1, overhead=5)
    assert second == Bubble(9, 2, warm_up=2, imbalance=5)


def test_waits_of_a_round_that_are_no_messages() -> None:
    """A rank that hears of a batch late, or of its end, waits for a peer and not for a message."""
    rounds = [
        Round(0, [(Forward(0, 0), 0, 1), (AwaitEnding(0), 1, 6)]),
        Round(0, [(AwaitBatch(), 0, 0), (ReceiveActivation(1, 0, 0), 0, 1), (Forward(1, 0), 1, 5)]),
    ]
    later = [
        Round(1, [(Forward(0, 1), 9, 10)]),
        Round(
            1,
            [
                (AwaitBatch(), 5, 9.5),
                (ReceiveActivation(1, 1, 0), 9.5, 10),
                (Forward(1, 1), 10, 11),
            ],
        ),
    ]
    rows = [records_of(rank, 1, 0, [rounds[rank], later[rank]]) for rank in range(2)]

    first, second = split_fill([rows])

    # What rank 0 waits for is there at 5, a second earlier. With stages of 1.75 each it would have
    # waited 1.75 for it. Rank 1 would have waited until 8, had rank 0 not lost that second.
    assert first == Bubble(
        11, 2, warm_up=1.75, imbalance=2.25, communication=1, cool_down=1, overhead=3
    )
    assert second == Bubble(11, 5, warm_up=1.5, imbalance=3, communication=1.5)


def test_a_sum_costs_what_it_takes_longer_than_all_computes() -> None:
    rounds = [
        Round(0, [(Forward(0, 0), 0, 1), (Forward(0, 1), 1, 6), (AwaitReduction(0, 0), 6, 9)]),
        Round(0, [(Forward(1, 0), 1, 2), (AwaitReduction(1, 0), 2, 8)]),
    ]

    first, second = split_fill([map_records(rounds)])

    assert first == Bubble(9, 6, reduction=3)
    assert second == Bubble(9, 1, warm_up=1, cool_down=4, reduction=3)


def test_a_sum_between_computes() -> None:
    """As of PipeDream, which updates after every backward."""
    entries = [(Forward(0, 0), 0, 1), (AwaitReduction(0, 0), 1, 3), (Update(0, 0), 3, 4)]
    (bubble,) = split_fill([map_records([Round(0, [*entries, (Forward(0, 1), 4, 5)])])])
    assert bubble == Bubble(5, 2, overhead=1, reduction=2)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("latency", [0.0, LATENCY])
def test_what_is_forgotten_of_a_long_fill_is_like_the_rest(schedule: str, latency: float) -> None:
    ranks, batches, keep = 3, 40, 8
    count = 1 if schedule == "pipedream" else 3
    plan = plan_of(schedule, ranks, (count,) * batches)
    timeline = simulate(plan, Costs((1, 1, 2), (2, 2, 4), communication=latency))
    rounds = rounds_of(timeline)
    last = ranks - 1
    whole = [records_of(rank, last, 0, mine) for rank, mine in enumerate(rounds)]
    head = [records_of(rank, last, 0, mine[:keep]) for rank, mine in enumerate(rounds)]
    tail = [records_of(rank, last, 0, mine[-keep:]) for rank, mine in enumerate(rounds)]
    forgotten = [
        sum(
            e - s
            for one in mine[keep:-keep]
            for step, s, e in one.entries
            if hasattr(step, "version") and not isinstance(step, ReceiveActivation) and e > s
        )
        for mine in rounds
    ]

    expected, actual = split_fill([whole]), split_fill([head, tail], forgotten)

    assert_complete(expected, timeline)
    assert_complete(actual, timeline)
    for mine, other in zip(actual, expected, strict=True):
        for kind in ("warm_up", "imbalance", "communication", "cool_down", "overhead"):
            assert mine.share(kind) == pytest.approx(other.share(kind), abs=0.02), kind
    assert expected[0].share("imbalance") > 0.3
    assert (expected[0].share("communication") > 0) == (latency > 0)


@pytest.mark.parametrize(("schedule", "ranks", "count", "stages"), SYNCHRONOUS)
def test_a_replay_is_a_simulation(schedule: str, ranks: int, count: int, stages: int) -> None:
    plan = plan_of(schedule, ranks, count, stages)
    costs = unequal(plan)
    rows = rows_of(simulate(plan))
    by_stage = costs.by_stage(plan.placement.num_stages)

    replayed = replay(
        rows,
        Times(lambda r: by_stage.of(r.step), lambda before, after: 0.0, lambda r: LATENCY),  # type: ignore[arg-type]
    )

    expected = rows_of(simulate(plan, costs))
    assert replayed == [[(r.start, r.end) for r in row] for row in expected]


@pytest.mark.parametrize(("schedule", "ranks", "count", "stages"), SYNCHRONOUS)
def test_a_run_without_noise_is_predicted_exactly(
    schedule: str, ranks: int, count: int, stages: int
) -> None:
    plan = plan_of(schedule, ranks, count, stages)
    timeline = simulate(plan, unequal(plan))
    period = timeline.makespan + 1
    steps = [rows_of(timeline, fill, fill * period) for fill in range(3)]
    rows = [[record for step in steps for record in step[rank]] for rank in range(ranks)]

    prediction = predict(rows)

    assert prediction.measured_step == pytest.approx(period)
    assert prediction.predicted_step == pytest.approx(period)
    events = events_of(rows, prediction.replayed)
    for event, record in zip(events, [r for row in rows for r in row], strict=True):
        assert (event.start, event.end) == pytest.approx((record.start, record.end))


def test_one_disturbed_step_is_no_reason_to_expect_it_again() -> None:
    timeline = simulate(plan_of("1f1b", 2, 4))
    begins = [0.0, 20.0, 40.0, 95.0, 115.0]  # 55 seconds for the third
    steps = [rows_of(timeline, fill, begin) for fill, begin in enumerate(begins)]
    rows = [[record for step in steps for record in step[rank]] for rank in range(2)]

    prediction = predict(rows)

    assert (prediction.measured_step, prediction.predicted_step) == pytest.approx((20, 20))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_report_puts_clocks_right(schedule: str) -> None:
    ranks = 2
    plan = plan_of(schedule, ranks, 4, 2 if schedule == "zero_bubble" else 1)
    timeline = simulate(plan, unequal(plan))
    timing = Timing(schedule, 4, plan.policy, plan.placement)
    records = []
    for rank, behind in enumerate((0.0, 1000.0)):
        row = rows_of(timeline)[rank]
        entries = [(r.step, r.start - behind, r.end - behind) for r in row]
        stages = plan.placement.stages_of(rank)
        fill = Fill(0, [Round(0, entries)])
        peaks = {stage: timeline.peak_in_flight[stage] for stage in stages}
        records.append(RankRecords([fill], behind, peaks, dict.fromkeys(stages, 1)))

    report = MonitorReport(records, timing)

    for actual, expected in zip(report.bubbles, split_fill([rows_of(timeline)]), strict=True):
        assert astuple(actual) == pytest.approx(astuple(expected))
    assert report.metrics["pipeline/bubble"] == pytest.approx(timeline.mean_bubble)
    assert report.peak_in_flight == timeline.peak_in_flight
    assert report.timeline().makespan == pytest.approx(timeline.makespan)
    measured, _ = report.events()
    assert measured[0].start == 0
    assert max(event.end for event in measured) == pytest.approx(timeline.makespan)
