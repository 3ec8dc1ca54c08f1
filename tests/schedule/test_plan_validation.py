"""Break valid plans on purpose: the validator must agree with the independent interpreter."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import cast

import pytest

from lightning_pipe.schedule import (
    Backward,
    Forward,
    Instruction,
    Placement,
    Plan,
    Receive,
    ReceiveActivation,
    ReceiveModel,
    Reduce,
    ScheduleError,
    SendActivation,
    Update,
    VersionPolicy,
    make_plan,
    validate,
)

Programs = list[list[Instruction]]
Shape = tuple[str, Placement, tuple[int, ...], VersionPolicy | None]

SHAPES: list[Shape] = [
    ("naive", Placement.round_robin(3), (1,), None),
    ("gpipe", Placement.round_robin(3), (3,), None),
    ("gpipe", Placement.round_robin(2, 2), (3,), None),
    ("1f1b", Placement.round_robin(3), (4,), None),
    ("interleaved", Placement.round_robin(2, 2), (4,), None),
    ("interleaved", Placement.round_robin(3, 2), (3,), None),
    ("interleaved", Placement.round_robin(1, 3), (2,), None),
    ("zero_bubble", Placement.round_robin(3), (4,), None),
    ("zero_bubble", Placement.v_shaped(2), (4,), None),
    ("forward", Placement.round_robin(2, 2), (3,), None),
    ("pipedream", Placement.round_robin(3), (2, 2), VersionPolicy.STASHING),
    ("pipedream", Placement.round_robin(3), (2, 2), VersionPolicy.VERTICAL_SYNC),
    ("pipedream", Placement.round_robin(3), (2, 2), VersionPolicy.NO_STASHING),
    ("pipedream_2bw", Placement.round_robin(2), (2, 2, 2, 1), VersionPolicy.DOUBLE_BUFFERED),
]


def plan_of(shape: Shape, receive_model: ReceiveModel = "posted") -> Plan:
    schedule, placement, batches, policy = shape
    return make_plan(schedule, placement, batches, receive_model, policy)


def drop(programs: Programs, rng: random.Random) -> None:
    program = rng.choice(programs)
    del program[rng.randrange(len(program))]


def duplicate(programs: Programs, rng: random.Random) -> None:
    program = rng.choice(programs)
    program.insert(rng.randrange(len(program) + 1), rng.choice(program))


def swap_neighbours(programs: Programs, rng: random.Random) -> None:
    program = rng.choice(programs)
    i = rng.randrange(len(program) - 1)
    program[i], program[i + 1] = program[i + 1], program[i]


def swap(programs: Programs, rng: random.Random) -> None:
    program = rng.choice(programs)
    i, j = rng.randrange(len(program)), rng.randrange(len(program))
    program[i], program[j] = program[j], program[i]


def advance(programs: Programs, rng: random.Random) -> None:
    """Move one instruction a few places forward; for a receive that is often harmless."""
    program = rng.choice(programs)
    i = rng.randrange(len(program))
    program.insert(max(0, i - rng.randrange(4)), program.pop(i))


def alter(programs: Programs, rng: random.Random) -> None:
    """Change one field. An update that keeps more than is read would be harmless."""
    program = rng.choice(programs)
    i = rng.randrange(len(program))
    name = rng.choice(fields(program[i])).name
    change = rng.choice([1, 100] if name == "keeps" else [-1, 1, 100])
    value = getattr(program[i], name) + change
    program[i] = replace(program[i], **{name: value})


def give_away(programs: Programs, rng: random.Random) -> None:
    giver, taker = rng.choice(programs), rng.choice(programs)
    step = giver.pop(rng.randrange(len(giver)))
    taker.insert(rng.randrange(len(taker) + 1), step)


MUTATIONS = [drop, duplicate, swap_neighbours, swap, advance, alter, give_away]


def mutated(plan: Plan, mutate: Callable[[Programs, random.Random], None], seed: int) -> Plan:
    programs = [list(program) for program in plan.programs]
    mutate(programs, random.Random(seed))
    return replace(plan, programs=tuple(map(tuple, programs)))


def refusal(plan: Plan, receive_model: ReceiveModel = "posted") -> str:
    try:
        validate(plan, receive_model)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("receive_model", ["posted", "rendezvous"])
def test_validator_agrees_with_the_interpreter(
    mutate: Callable[[Programs, random.Random], None],
    receive_model: str,
    broken: Callable[..., str],
) -> None:
    model = cast(ReceiveModel, receive_model)
    verdicts: Counter[bool] = Counter()
    for shape in SHAPES:
        for seed in range(40):
            plan = mutated(plan_of(shape, model), mutate, seed)
            # "rendezvous" asks for more than "posted", even where one batch would save a bad order
            problem = broken(plan) or broken(plan, model)
            message = refusal(plan, model)
            assert bool(problem) == bool(message), (shape, seed, problem, message)
            verdicts[bool(problem)] += 1
    assert verdicts[True] > 0.2 * verdicts.total()
    if mutate in (drop, duplicate, alter):
        assert not verdicts[False]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_validator_agrees_after_two_mutations(
    mutate: Callable[[Programs, random.Random], None], broken: Callable[..., str]
) -> None:
    for shape in SHAPES:
        for seed in range(30):
            plan = mutated(mutated(plan_of(shape), mutate, seed), swap_neighbours, seed)
            assert bool(broken(plan)) == bool(refusal(plan)), (shape, seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_single_instruction_is_needed(shape: Shape) -> None:
    plan = plan_of(shape)
    for rank, program in enumerate(plan.programs):
        for i in range(len(program)):
            programs = list(plan.programs)
            programs[rank] = program[:i] + program[i + 1 :]
            assert f"rank {rank}: {program[i]} is missing" in refusal(
                replace(plan, programs=tuple(programs))
            )


# Errors, word by word. Each draws the plan with the bad cell marked.

TWO = make_plan("1f1b", Placement.round_robin(2), 2)


def edited(rank: int, edit: Callable[[list[Instruction]], object], plan: Plan = TWO) -> Plan:
    programs = [list(program) for program in plan.programs]
    edit(programs[rank])
    return replace(plan, programs=tuple(map(tuple, programs)))


def test_missing_receive() -> None:
    plan = edited(1, lambda program: program.remove(ReceiveActivation(1, 1, peer=0)))
    assert refusal(plan) == (
        "1f1b, rank 1: 1RECV_F1 is missing; 1F1 needs it\n"
        "rank 0 | F0   F1   B0   B1\n"
        "rank 1 | F0   B0   [F1] B1"
    )


def test_missing_forward() -> None:
    plan = edited(0, lambda program: program.remove(Forward(0, 1)))
    assert refusal(plan).startswith("1f1b, rank 0: 0F1 is missing; ")
    assert "rank 0 | F0    B0    B1    [F1?]\n" in refusal(plan)


def test_missing_update() -> None:
    plan = edited(0, lambda program: program.remove(Update(0)))
    assert "rank 0: 0UPDATE is missing; every stage needs one" in refusal(plan)


def test_twice() -> None:
    plan = edited(0, lambda program: program.append(Reduce(0)))
    assert "rank 0: 0REDUCE_GRAD comes twice" in refusal(plan)


def test_wrong_rank() -> None:
    plan = edited(0, lambda program: program.append(Backward(1, 1)))
    assert "rank 0: 1B1 belongs on rank 1" in refusal(plan)


@pytest.mark.parametrize("step", [Forward(2, 0), Forward(0, 2), SendActivation(0, 0, peer=0)])
def test_no_place(step: Instruction) -> None:
    plan = edited(0, lambda program: program.append(step))
    assert f"rank 0: {step!r} has no place in a plan of 2 stages on ranks (0, 1)" in refusal(plan)


def test_wrong_number_of_programs() -> None:
    assert refusal(replace(TWO, programs=TWO.programs[:1])) == "1f1b: 1 programs for 2 ranks"


def test_order_on_a_rank() -> None:
    plan = edited(1, lambda program: program.reverse())
    assert "rank 1: 1UPDATE comes before 1REDUCE_GRAD, which it needs" in refusal(plan)


def test_deadlock_names_every_rank_that_waits() -> None:
    """Rank 0 waits for the gradient of what it sends only afterwards."""
    plan = edited(
        0,
        lambda program: program.insert(
            0, program.pop([str(step) for step in program].index("0RECV_B0"))
        ),
    )
    assert refusal(plan) == (
        "1f1b, rank 0: 0RECV_B0 waits for ever, a deadlock: "
        "rank 0 at 0RECV_B0 for 1SEND_B0; rank 1 at 1RECV_F0 for 0SEND_F0\n"
        "rank 0 | F0   F1   [B0] B1\n"
        "rank 1 | F0   B0   F1   B1"
    )


def test_channel_order() -> None:
    """Both messages are there, but a receive takes the one that comes first."""
    plan = make_plan("gpipe", Placement.round_robin(2), 2)
    first, second = [step for step in plan.programs[1] if isinstance(step, Receive)]

    def exchange(program: list[Instruction]) -> None:
        program.remove(second)
        program.insert(program.index(first), second)

    message = refusal(edited(1, exchange, plan))
    assert "rank 1: 1RECV_F1 would take 0SEND_F0, sent earlier by the same rank" in message


def test_in_flight_bound() -> None:
    plan = replace(make_plan("gpipe", Placement.round_robin(2), 2), schedule="1f1b")
    assert "rank 1: 1F1 is number 2 in flight; the bound is 1" in refusal(plan)
    assert not refusal(replace(plan, schedule="my own"))


def test_version() -> None:
    plan = edited(0, lambda program: program.__setitem__(0, Forward(0, 0, version=3)))
    assert "rank 0: 0F0 reads version 3; its stage holds only 0" in refusal(plan)


def test_rendezvous_deadlock() -> None:
    message = refusal(make_plan("interleaved", Placement.round_robin(2, 2), 4), "rendezvous")
    assert re.match(r"interleaved, rank 0: 2SEND_B0 waits for ever, a deadlock: rank 0", message)


def test_long_plans_are_drawn_around_the_bad_cell() -> None:
    plan = make_plan("1f1b", Placement.round_robin(4), 64)
    message = refusal(edited(2, lambda program: program.remove(Backward(2, 40)), plan))
    assert max(map(len, message.splitlines())) < 130


def test_unknown_receive_model() -> None:
    with pytest.raises(ValueError, match="receive_model='tagged' must be one of"):
        validate(TWO, cast(ReceiveModel, "tagged"))


# Versions: three stages, five micro-batches of one each; two stages, four batches of two.

STASHING = make_plan("pipedream", Placement.round_robin(3), (1,) * 5)
VERTICAL_SYNC = make_plan(
    "pipedream", Placement.round_robin(3), (1,) * 5, policy=VersionPolicy.VERTICAL_SYNC
)
NO_STASHING = make_plan(
    "pipedream", Placement.round_robin(3), (1,) * 5, policy=VersionPolicy.NO_STASHING
)
DOUBLE_BUFFERED = make_plan("pipedream_2bw", Placement.round_robin(2), (2,) * 4)


def with_step(plan: Plan, step: Instruction) -> Plan:
    """Put another spelling of a step into its place."""
    rank = plan.placement.rank_of[step.stage]
    position = plan.programs[rank].index(step)
    return edited(rank, lambda program: program.__setitem__(position, step), plan)


def moved(plan: Plan, step: Instruction, before: Instruction) -> Plan:
    """Move a step to right before another one of its rank."""

    def move(program: list[Instruction]) -> None:
        found = program.pop(program.index(step))
        program.insert(program.index(before), found)

    return edited(plan.placement.rank_of[step.stage], move, plan)


@pytest.mark.parametrize(
    ("plan", "step", "message"),
    [
        # not made yet, or dropped
        (STASHING, Forward(0, 3, version=2), "rank 0: 0F3 reads version 2; its stage holds 0 to 1"),
        (
            STASHING,
            Backward(2, 1, version=0),
            "rank 2: 2B1 reads version 0; its stage holds only 1",
        ),
        (STASHING, Update(0, 1, keeps=1), "rank 0: 0B2 reads version 0; its stage holds 1 to 2"),
        (NO_STASHING, Backward(0, 3, version=1), "0B3 reads version 1; its stage holds only 3"),
        (DOUBLE_BUFFERED, Forward(1, 6, version=1), "1F6 reads version 1; its stage holds only 2"),
        # not what the policy says
        (STASHING, Forward(0, 4, version=1), "0F4 reads weights that are 3 updates old; the bound"),
        (STASHING, Backward(0, 3, version=2), "0B3 is of version 2, but 0F3 reads 1"),
        (VERTICAL_SYNC, Forward(2, 3, version=3), "2F3 is of version 3, but 0F3 reads 1"),
        (STASHING, SendActivation(0, 3, peer=1), "0SEND_F3 is of version 0, but 0F3 reads 1"),
        (STASHING, ReceiveActivation(1, 3, peer=0), "1RECV_F3 is of version 0, but 0F3 reads 1"),
        # held in vain
        (STASHING, Update(2, 2, keeps=2), "2UPDATE2 makes its stage hold versions 2 to 3; the bou"),
        (STASHING, Update(2, 4, keeps=6), "2UPDATE4 keeps version 6 on, newer than the one it mak"),
    ],
)
def test_wrong_version(plan: Plan, step: Instruction, message: str) -> None:
    assert message in refusal(with_step(plan, step))


@pytest.mark.parametrize(
    ("plan", "step", "before", "message"),
    [
        (STASHING, Update(0, 0), Backward(0, 1), "0F3 reads version 1; its stage holds only 0"),
        (STASHING, Update(0, 3), Reduce(0, 3), "0UPDATE3 comes before 0REDUCE_GRAD3, which it"),
        (NO_STASHING, Update(0, 3), Reduce(0, 4), "0B4 reads version 4; its stage holds only 3"),
        (DOUBLE_BUFFERED, Update(0, 0), Backward(0, 3), "0F4 reads version 1; its stage holds on"),
        (DOUBLE_BUFFERED, Update(0, 3), Update(0, 2), "0UPDATE3 is out of order; its stage is at"),
    ],
)
def test_misplaced_update(plan: Plan, step: Instruction, before: Instruction, message: str) -> None:
    assert message in refusal(moved(plan, step, before))


@pytest.mark.parametrize("plan", [STASHING, VERTICAL_SYNC, NO_STASHING, DOUBLE_BUFFERED])
def test_missing_or_doubled_update(plan: Plan) -> None:
    missing = edited(1, lambda program: program.remove(Update(1, 2)), plan)
    assert "rank 1: 1UPDATE2 is missing; every stage needs one" in refusal(missing)
    doubled = edited(1, lambda program: program.append(Update(1, 2)), plan)
    assert "rank 1: 1UPDATE2 comes twice" in refusal(doubled)


def test_the_policy_of_a_plan_is_proven() -> None:
    plans = [STASHING, VERTICAL_SYNC, NO_STASHING]
    for plan in plans:
        for other in plans:
            assert bool(refusal(replace(plan, policy=other.policy))) == (plan is not other)
