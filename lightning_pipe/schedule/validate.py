"""Prove a plan before it runs: a broken one would hang, or train on wrong numbers in silence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NoReturn, get_args

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    LastBackward,
    Receive,
    ReceiveActivation,
    Send,
    SendActivation,
    Update,
    requirements,
)
from lightning_pipe.schedule.programs import Plan, VersionPolicy
from lightning_pipe.schedule.progress import ReceiveModel, posted_order, stuck_exchanges
from lightning_pipe.schedule.registry import SCHEDULES
from lightning_pipe.schedule.render import text_grid

_DRAWN_SLOTS = 16  # about a line of a terminal


def validate(plan: Plan, receive_model: ReceiveModel = "posted") -> None:
    """Raise unless a plan is complete, in order, free of deadlock, and within its bounds.

    - complete: each rank has all instructions of its stages exactly once, and no others;
    - in order: each instruction comes after those on its rank that it depends on;
    - its versions held: what is read has been made and not dropped yet, and no stage holds more
      versions than its policy allows;
    - its versions right: a micro-batch reads what its policy says, on its way back too;
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
    _check_versions_held(plan)
    _check_versions_read(plan)
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
    missing = [instruction for instruction in required if instruction not in seen]
    if missing:  # lowering inserts nothing for a compute that is not there
        instruction = min(missing, key=lambda step: not isinstance(step, Compute))
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


def _version_bounds(plan: Plan, stage: int) -> tuple[int, int]:
    """Bound a stage's staleness and its live versions."""
    whole = plan.placement.num_stages - 1
    behind = whole - stage
    return {
        VersionPolicy.SYNCHRONOUS: (0, 1),
        VersionPolicy.STASHING: (behind, behind + 1),
        VersionPolicy.VERTICAL_SYNC: (whole, whole + 1),
        VersionPolicy.NO_STASHING: (behind, 1),
        VersionPolicy.DOUBLE_BUFFERED: (1, 2),
    }[plan.policy]


def _check_versions_held(plan: Plan) -> None:
    """Each version that is read has been made and not dropped; updates come in order."""
    held_by = [range(1) for _ in plan.placement.rank_of]  # by stage
    for rank, program in enumerate(plan.programs):
        for step in program:
            held = held_by[step.stage]
            if isinstance(step, Compute) and step.version not in held:
                problem = f"reads version {step.version}; its stage holds {_spelled(held)}"
                _refuse(plan, rank, step, problem)
            if isinstance(step, Update):
                held_by[step.stage] = _held_after(plan, rank, step, held)


def _held_after(plan: Plan, rank: int, update: Update, held: range) -> range:
    """Give the versions that a stage holds after an update, if that is in order."""
    if update.update != held[-1]:
        _refuse(plan, rank, update, f"is out of order; its stage is at version {held[-1]}")
    held = range(max(held[0], update.keeps), update.update + 2)
    if not held:
        _refuse(plan, rank, update, f"keeps version {update.keeps} on, newer than the one it makes")
    _, bound = _version_bounds(plan, update.stage)
    if len(held) > bound:
        problem = f"makes its stage hold versions {_spelled(held)}; the bound is {bound} of them"
        _refuse(plan, rank, update, problem)
    return held


def _spelled(held: range) -> str:
    """Spell the versions that a stage holds."""
    return f"{held[0]} to {held[-1]}" if len(held) > 1 else f"only {held[0]}"


def _check_versions_read(plan: Plan) -> None:
    """No forward reads staler weights than its policy allows, and what belongs to it reads them."""
    read = {
        (step.stage, step.microbatch): step.version
        for program in plan.programs
        for step in program
        if isinstance(step, Forward)
    }
    for rank, program in enumerate(plan.programs):
        for step in program:
            if isinstance(step, Forward):
                stale = plan.update_of(step.microbatch) - step.version
                bound, _ = _version_bounds(plan, step.stage)
                if stale > bound:
                    problem = f"reads weights that are {stale} updates old; the bound is {bound}"
                    _refuse(plan, rank, step, problem)
            if isinstance(step, Compute | SendActivation | ReceiveActivation):
                stage, i = _reads_with(step, plan.policy), step.microbatch
                if stage is not None and step.version != read[stage, i]:
                    forward = f"{Forward(stage, i)} reads {read[stage, i]}"
                    _refuse(plan, rank, step, f"is of version {step.version}, but {forward}")


def _reads_with(
    step: Compute | SendActivation | ReceiveActivation, policy: VersionPolicy
) -> int | None:
    """Name the stage whose forward has the same version, None if none need have."""
    match step:
        case Forward():
            as_stage_0 = policy in (VersionPolicy.VERTICAL_SYNC, VersionPolicy.DOUBLE_BUFFERED)
            return 0 if as_stage_0 else None
        case Backward() | BackwardInput() | BackwardWeight():
            return None if policy is VersionPolicy.NO_STASHING else step.stage
        case SendActivation():
            return step.stage
        case ReceiveActivation():
            return step.stage - 1


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
    bound_of = SCHEDULES[plan.schedule].max_in_flight if plan.schedule in SCHEDULES else None
    if bound_of is None:
        return
    bounds = bound_of(plan.placement, plan.num_microbatches)
    for rank, (program, bound) in enumerate(zip(plan.programs, bounds, strict=True)):
        in_flight = 0
        for step in program:
            in_flight += isinstance(step, Forward)
            in_flight -= isinstance(step, LastBackward)
            if in_flight > bound:
                _refuse(plan, rank, step, f"is number {in_flight} in flight; the bound is {bound}")
