"""Pass: turn a compute order into programs, by inserting Send, Receive, Reduce and Update.

A message between two ranks has no tag: each ordered pair of ranks has one channel for activations
and one for gradients, first in, first out. So the sends on a channel must come in the order of its
receives. Sends stand right behind the compute that makes them and receives right before the compute
that needs them, hence the channels are in order whenever both ranks go through their micro-batches
in the same order. All our generators do, and the validator proves it for each plan.

The same rule makes neighbours of what a rendezvous transport has to exchange in one batch: between
two computes stand the sends of the one, then the receives of the other. With one stage per rank
that is all such a transport needs; with several, exchange.py has to move some receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
    Reduce,
    Send,
    SendActivation,
    Update,
    requirements,
)
from lightning_pipe.schedule.programs import Plan, VersionPolicy


def lower(plan: Plan, order: list[list[Compute]]) -> Plan:
    """Insert everything that is not compute.

    Args:
        plan: A plan without programs; ``split`` is found here.
        order: Annotated compute order of all ranks.

    Returns:
        The plan with programs. A `Reduce` comes right after the last backward of its update. The
        `Update` comes

        - right after its reduce, if each micro-batch makes one (PipeDream);
        - before all that serves the first forward of the second batch behind its own, or at the
          end if there is none (PipeDream-2BW);
        - at the end (synchronous).
    """
    plan = replace(plan, split=_split(order))
    required = requirements(plan)
    sends: dict[Instruction, Send] = {
        needed[0]: step for step, needed in required.items() if isinstance(step, Send)
    }
    version_of = {
        (step.stage, step.microbatch): step.version
        for steps in order
        for step in steps
        if isinstance(step, Forward)
    }
    programs = []
    for rank, steps in enumerate(order):
        reduces = _reduces(plan, steps)
        program: list[Instruction] = []
        for step in steps:
            program += _updates_before(plan, step)
            program += [needed for needed in required[step] if isinstance(needed, Receive)]
            program.append(step)
            if step in sends:
                program.append(sends[step])
            if step in reduces:
                program.append(reduces[step])
                program += _updates_after(plan, reduces[step])
        program += _updates_left(plan, rank, program)
        programs.append(tuple(_annotated(program, version_of))[::-1])
    return replace(plan, programs=tuple(programs))


def _split(order: list[list[Compute]]) -> frozenset[tuple[int, int]]:
    """Find the backwards that come in two parts."""
    return frozenset(
        (step.stage, step.microbatch)
        for steps in order
        for step in steps
        if isinstance(step, BackwardInput)
    )


def _reduces(plan: Plan, steps: list[Compute]) -> dict[Compute, Reduce]:
    """Give the last backward of each update of each stage on a rank, with its reduce."""
    backwards = [step for step in steps if isinstance(step, LastBackward)]
    last = {Reduce(step.stage, plan.update_of(step.microbatch)): step for step in backwards}
    return {step: reduce for reduce, step in last.items()}


def _updates_before(plan: Plan, step: Compute) -> list[Instruction]:
    """PipeDream-2BW: give the update that must come before a batch, if a compute opens one."""
    if plan.policy is not VersionPolicy.DOUBLE_BUFFERED or not isinstance(step, Forward):
        return []
    batch = plan.update_of(step.microbatch)
    opens = step.microbatch == plan.microbatches_of(batch)[0]
    return [Update(step.stage, batch - 2)] if opens and batch >= 2 else []


def _updates_after(plan: Plan, reduce: Reduce) -> list[Instruction]:
    """PipeDream: give the update that a reduce is for."""
    waits = plan.policy in (VersionPolicy.SYNCHRONOUS, VersionPolicy.DOUBLE_BUFFERED)
    return [] if waits else [Update(reduce.stage, reduce.update)]


def _updates_left(plan: Plan, rank: int, program: list[Instruction]) -> list[Instruction]:
    """Give the updates that a rank has not made yet."""
    made = {step for step in program if isinstance(step, Update)}
    updates = (
        Update(s, k) for s in plan.placement.stages_of(rank) for k in range(plan.num_updates)
    )
    return [update for update in updates if update not in made]


def _annotated(
    program: list[Instruction], version_of: dict[tuple[int, int], int]
) -> Iterator[Instruction]:
    """Tell messages which version their forward reads, and updates which is read after them.

    Args:
        program: The program of a rank.
        version_of: By stage and micro-batch, the version that the forward reads.

    Yields:
        The instructions, the last one first.
    """
    oldest: dict[int, int] = {}  # version that is still to be read, by stage
    for step in reversed(program):
        match step:
            case Forward(stage) | Backward(stage) | BackwardInput(stage) | BackwardWeight(stage):
                oldest[stage] = min(step.version, oldest.get(stage, step.version))
                yield step
            case SendActivation(stage, i, peer):
                yield SendActivation(stage, i, peer, version_of[stage, i])
            case ReceiveActivation(stage, i, peer):
                yield ReceiveActivation(stage, i, peer, version_of[stage - 1, i])
            case Update(stage, k):
                yield Update(stage, k, keeps=min(k + 1, oldest.get(stage, k + 1)))
            case _:
                yield step
