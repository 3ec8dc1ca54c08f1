"""Where sends, receives, reductions and updates go; every plan must run on the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from lightning_pipe.schedule import (
    SCHEDULES,
    Backward,
    BackwardWeight,
    Communication,
    Forward,
    Placement,
    Plan,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    ScheduleError,
    SendActivation,
    SendGradient,
    Update,
    VersionPolicy,
    accepts,
    make_plan,
    validate,
)

OTHER_PLACEMENTS = [(0, 0, 1, 1), (0, 1, 1, 0), (1, 0, 2), (0, 1, 0, 2, 2, 1), (0, 0, 0)]


def spelled(plan: Plan) -> list[str]:
    return [" ".join(map(str, program)) for program in plan.programs]


def all_shapes(most_ranks: int = 4, most_stages: int = 3) -> Iterator[tuple[str, Placement, int]]:
    """Every schedule, with the counts that it takes: multiples of P up to 4P, and around them."""
    for num_ranks in range(1, most_ranks + 1):
        for stages_per_rank in range(1, most_stages + 1):
            placements = {Placement.round_robin(num_ranks, stages_per_rank)}
            if stages_per_rank == 2:
                placements.add(Placement.v_shaped(num_ranks))
            multiples = [num_ranks * factor for factor in range(1, 5)]
            for num_microbatches in sorted({1, num_ranks + 1, 2 * num_ranks - 1, *multiples}):
                for schedule, placement in product(SCHEDULES, placements):
                    if accepts(schedule, placement, num_microbatches):
                        yield schedule, placement, num_microbatches


def test_program_of_two_ranks() -> None:
    assert spelled(make_plan("1f1b", Placement.round_robin(2), 2)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0UPDATE",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1UPDATE",
    ]


def test_peers() -> None:
    plan = make_plan("naive", Placement((1, 0)), 1)
    assert plan.programs == (
        (
            ReceiveActivation(1, 0, peer=1),
            Forward(1, 0),
            Backward(1, 0),
            SendGradient(1, 0, peer=1),
            Reduce(1),
            Update(1),
        ),
        (
            Forward(0, 0),
            SendActivation(0, 0, peer=0),
            ReceiveGradient(0, 0, peer=0),
            Backward(0, 0),
            Reduce(0),
            Update(0),
        ),
    )


def test_forward_only_has_neither_gradients_nor_updates() -> None:
    assert spelled(make_plan("forward", Placement.round_robin(2), 2)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1F0 1RECV_F1 1F1",
    ]


def test_stages_reduce_as_soon_as_their_last_backward_is_done() -> None:
    (program,) = spelled(make_plan("gpipe", Placement.round_robin(1, 2), 1))
    assert program == "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0UPDATE 1UPDATE"


def test_1f1b_sends_and_receives_in_one_exchange_in_the_steady_state() -> None:
    program = spelled(make_plan("1f1b", Placement.round_robin(3), 4))[1]
    assert "1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_F2 1F2 1SEND_F2 1RECV_B1 1B1" in program


PIPEDREAM = [
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0REDUCE_GRAD 0UPDATE "
    "0F2 0SEND_F2 0RECV_B1 0B1 0REDUCE_GRAD1 0UPDATE1 0RECV_B2 0B2 0REDUCE_GRAD2 0UPDATE2",
    "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1UPDATE "
    "1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD1 1UPDATE1 "
    "1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD2 1UPDATE2",
]


@pytest.mark.parametrize("batches", [3, (3,), (1, 1, 1), (2, 1)])
@pytest.mark.parametrize("policy", SCHEDULES["pipedream"].policies)
def test_pipedream_updates_right_after_each_backward(
    batches: int | tuple[int, ...], policy: VersionPolicy
) -> None:
    plan = make_plan("pipedream", Placement.round_robin(2), batches, policy=policy)
    assert spelled(plan) == PIPEDREAM


def test_2bw_updates_by_a_batch_once_the_next_one_has_gone_forward() -> None:
    assert spelled(make_plan("pipedream_2bw", Placement.round_robin(2), (2, 2, 1))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 "
        "0F2 0SEND_F2 0RECV_B1 0B1 0REDUCE_GRAD 0F3 0SEND_F3 0RECV_B2 0B2 0UPDATE "
        "0F4 0SEND_F4 0RECV_B3 0B3 0REDUCE_GRAD1 0RECV_B4 0B4 0REDUCE_GRAD2 0UPDATE1 0UPDATE2",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD "
        "1RECV_F2 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3 1REDUCE_GRAD1 1UPDATE "
        "1RECV_F4 1F4 1B4 1SEND_B4 1REDUCE_GRAD2 1UPDATE1 1UPDATE2",
    ]


def test_an_update_keeps_what_is_read_after_it() -> None:
    def keeps(plan: Plan) -> list[list[int]]:
        return [[x.keeps for x in program if isinstance(x, Update)] for program in plan.programs]

    three = Placement.round_robin(3)
    stashing, vertical_sync, no_stashing = (
        make_plan("pipedream", three, (1,) * 6, policy=policy)
        for policy in SCHEDULES["pipedream"].policies
    )
    assert keeps(stashing) == [[0, 0, 1, 2, 3, 6], [0, 1, 2, 3, 4, 6], [1, 2, 3, 4, 5, 6]]
    assert keeps(vertical_sync) == [[0, 0, 1, 2, 3, 6]] * 3
    assert keeps(no_stashing) == [[1, 2, 3, 4, 5, 6]] * 3
    double_buffered = make_plan("pipedream_2bw", three, (3,) * 4)
    assert keeps(double_buffered) == [[0, 1, 3, 4], [0, 1, 3, 4], [1, 2, 3, 4]]
    assert keeps(make_plan("1f1b", three, 6)) == [[1]] * 3


def test_every_plan_runs(broken: Callable[..., str]) -> None:
    count = 0
    for schedule, placement, num_microbatches in all_shapes(most_ranks=5):
        for receive_model in ("posted", "rendezvous"):
            plan = make_plan(schedule, placement, num_microbatches, receive_model)
            problem = broken(plan, receive_model)
            assert not problem, (schedule, placement, num_microbatches, receive_model, problem)
            count += 1
    assert count == 886


@pytest.mark.parametrize("rank_of", OTHER_PLACEMENTS)
@pytest.mark.parametrize("schedule", ["gpipe", "forward"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_f_then_b_runs_on_any_placement(
    schedule: str, rank_of: tuple[int, ...], num_microbatches: int, broken: Callable[..., str]
) -> None:
    for receive_model in ("posted", "rendezvous"):
        plan = make_plan(schedule, Placement(rank_of), num_microbatches, receive_model)
        assert not broken(plan, receive_model)


def test_a_posted_receive_is_never_waited_for_by_a_compute_that_does_not_need_it() -> None:
    for schedule, placement, num_microbatches in all_shapes():
        for program in make_plan(schedule, placement, num_microbatches).programs:
            for receive, user in zip(program, program[1:], strict=False):
                if isinstance(receive, Receive):
                    assert not isinstance(user, BackwardWeight)
                    assert isinstance(user, Forward) == isinstance(receive, ReceiveActivation)
                    assert (user.stage, user.microbatch) == (receive.stage, receive.microbatch)


def test_rendezvous_changes_nothing_with_one_stage_per_rank() -> None:
    for schedule, placement, num_microbatches in all_shapes():
        if placement.num_stages == placement.num_ranks:
            posted = make_plan(schedule, placement, num_microbatches)
            assert make_plan(schedule, placement, num_microbatches, "rendezvous") == posted


def test_rendezvous_keeps_the_order_of_everything_but_receives() -> None:
    for schedule, placement, num_microbatches in all_shapes():
        plans = (
            make_plan(schedule, placement, num_microbatches, "posted"),
            make_plan(schedule, placement, num_microbatches, "rendezvous"),
        )
        posted, paired = (
            [[x for x in program if not isinstance(x, Receive)] for program in plan.programs]
            for plan in plans
        )
        assert posted == paired


def test_interleaved_needs_its_own_lowering_under_rendezvous(broken: Callable[..., str]) -> None:
    """Otherwise rank 1 holds on to a gradient that rank 0 takes only after its next activation."""
    plan = make_plan("interleaved", Placement.round_robin(2, 2), 4)
    assert broken(plan, "rendezvous") == "deadlock"
    with pytest.raises(ScheduleError, match="a deadlock"):
        validate(plan, "rendezvous")


def test_communication_is_between_different_ranks() -> None:
    for schedule, placement, num_microbatches in all_shapes():
        plan = make_plan(schedule, placement, num_microbatches)
        for rank, program in enumerate(plan.programs):
            assert all(x.peer != rank for x in program if isinstance(x, Communication))
