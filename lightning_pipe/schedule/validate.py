"""Prove a plan before it runs: a broken one would hang, or train on wrong numbers in silence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NoReturn, get_args

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import (
    Backward,
    Compute,
    Forward,
    Instruction,
    Receive,
    ReceiveActivation,
    Send,
    SendActivation,
    requirements,
)
from lightning_pipe.schedule.programs import Plan
from lightning_pipe.schedule.progress import ReceiveModel, posted_order, stuck_exchanges
from lightning_pipe.schedule.registry import SCHEDULES
from lightning_pipe.schedule.render import text_grid

_DRAWN_SLOTS = 16  # about a line of a terminal


def validate(plan: Plan, receive_model: ReceiveModel = "posted") -> None:
    """Raise unless a plan is complete, in order, free of deadlock, and within its bounds.

    - complete: each rank has all instructions of its stages exactly once, and no others;
    - in order: each instruction comes after those on its rank that it depends on;
    - of one version: all of it reads the weights that the batch began with;
    - free of deadlock under the receive model;
    - first in, first out: a channel's messages are received in the order in which they are sent;
    - within bounds: no rank has more micro-batches in flight than its schedule allows. A plan under
      a name that is not in `SCHEDULES` has no such bound.

    Args:
        plan: A lowered plan.
        receive_model: What the transport does (see `ReceiveModel`). ``"rendezvous"`` asks for
            more than ``"posted"``, never for less.

    Raises:
        ScheduleError: At the first violation, with the rank, the instruction, and what is wrong,
            above a drawing of the plan with the cell marked.
        ValueError: If there is no such receive model.
    """
    if receive_model not in get_args(ReceiveModel):
        raise ValueError(f"receive_model={receive_model!r} must be one of {get_args(ReceiveModel)}")
    _check_complete(plan)
    _check_posted(plan)
    _check_versions(plan)
    _check_channels(plan, receive_model)
    if receive_model == "rendezvous":
        _check_exchanges(plan)
    _check_in_flight(plan)


def _refuse(plan: Plan, rank: int, instruction: Instruction, problem: str) -> NoReturn:
    """Raise with the place, the problem and the picture."""
    grid = text_grid(plan, mark=instruction, max_slots=_DRAWN_SLOTS)
    raise ScheduleError(f"{plan.schedule}, rank {rank}: {instruction} {problem}\n{grid}")


def _check_complete(plan: Plan) -> None:
    """Each rank has all instructions of its stages exactly once, and no others."""
    required = requirements(plan)
    rank_of = plan.placement.rank_of
    if len(plan.programs) != plan.placement.num_ranks:
        raise ScheduleError(
            f"{plan.schedule}: {len(plan.programs)} programs for {plan.placement.num_ranks} ranks"
        )
    seen: set[Instruction] = set()
    for rank, program in enumerate(plan.programs):
        for instruction in program:
            if instruction not in required:
                _refuse_unknown(plan, rank, instruction)
            owner = rank_of[instruction.stage]
            if owner != rank:
                _refuse(plan, rank, instruction, f"belongs on rank {owner}, which has its stage")
            if instruction in seen:
                _refuse(plan, rank, instruction, "comes twice")
            seen.add(instruction)
    for instruction in required:
        if instruction not in seen:
            waiting = [str(other) for other, needed in required.items() if instruction in needed]
            purpose = f"{waiting[0]} needs it" if waiting else "every stage needs one"
            _refuse(plan, rank_of[instruction.stage], instruction, f"is missing; {purpose}")


def _refuse_unknown(plan: Plan, rank: int, instruction: Instruction) -> NoReturn:
    """Raise for an instruction that no correct plan of this shape has; its cell may not exist."""
    raise ScheduleError(
        f"{plan.schedule}, rank {rank}: {instruction!r} has no place in a plan of "
        f"{plan.placement.num_stages} stages on ranks {plan.placement.rank_of} with "
        f"{plan.num_microbatches} micro-batches\n{text_grid(plan, max_slots=_DRAWN_SLOTS)}"
    )


def _check_posted(plan: Plan) -> None:
    """The plan completes if sends never block."""
    required = requirements(plan)
    order = list(posted_order(plan))
    done = {instruction for _, instruction, _ in order}
    heads = Counter(rank for rank, _, _ in order)
    stuck = {
        rank: program[heads[rank]]
        for rank, program in enumerate(plan.programs)
        if heads[rank] < len(program)
    }
    waits = {
        rank: next(needed for needed in required[head] if needed not in done)
        for rank, head in stuck.items()
    }
    for rank, needed in waits.items():
        if plan.placement.rank_of[needed.stage] == rank:
            _refuse(plan, rank, stuck[rank], f"comes before {needed}, which it needs")
    _refuse_deadlock(plan, {rank: f"{stuck[rank]} for {waits[rank]}" for rank in stuck}, stuck)


def _check_exchanges(plan: Plan) -> None:
    """The plan completes if each send waits for its receive."""
    stuck = stuck_exchanges(plan)
    waits = {rank: " and ".join(map(str, steps)) for rank, steps in stuck.items()}
    _refuse_deadlock(plan, waits, {rank: steps[0] for rank, steps in stuck.items()})


def _refuse_deadlock(
    plan: Plan, waits: Mapping[int, str], stuck: Mapping[int, Instruction]
) -> None:
    """Raise if any rank is stuck."""
    if stuck:
        rank = min(stuck)
        everyone = "; ".join(f"rank {rank} at {wait}" for rank, wait in waits.items())
        _refuse(plan, rank, stuck[rank], f"waits for ever, a deadlock: {everyone}")


def _check_versions(plan: Plan) -> None:
    """All of a synchronous plan reads the weights that the batch began with."""
    for rank, program in enumerate(plan.programs):
        for step in program:
            if isinstance(step, Compute) and step.version != 0:
                _refuse(plan, rank, step, f"reads version {step.version}; a batch has only 0")


def _check_channels(plan: Plan, receive_model: ReceiveModel) -> None:
    """A channel's messages are received in the order in which they are sent."""
    sent: dict[tuple[object, ...], list[Send]] = defaultdict(list)
    received: dict[tuple[object, ...], list[Receive]] = defaultdict(list)
    for rank, program in enumerate(plan.programs):
        for step in program:
            if not isinstance(step, Send | Receive):
                continue
            activation = isinstance(step, SendActivation | ReceiveActivation)
            kind = activation if receive_model == "posted" else None
            if isinstance(step, Send):
                sent[rank, step.peer, kind].append(step)
            else:
                received[step.peer, rank, kind].append(step)
    required = requirements(plan)
    for channel, receives in received.items():
        for receive, send in zip(receives, sent[channel], strict=True):
            if (send,) != required[receive]:
                rank = plan.placement.rank_of[receive.stage]
                _refuse(plan, rank, receive, f"would take {send}, sent earlier by the same rank")


def _check_in_flight(plan: Plan) -> None:
    """No rank has more micro-batches in flight than its schedule allows."""
    if plan.schedule not in SCHEDULES:
        return
    bounds = SCHEDULES[plan.schedule].max_in_flight(plan.placement, plan.num_microbatches)
    for rank, (program, bound) in enumerate(zip(plan.programs, bounds, strict=True)):
        in_flight = 0
        for step in program:
            in_flight += isinstance(step, Forward)
            in_flight -= isinstance(step, Backward)
            if in_flight > bound:
                _refuse(plan, rank, step, f"is number {in_flight} in flight; the bound is {bound}")
