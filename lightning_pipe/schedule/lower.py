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

from dataclasses import replace

from lightning_pipe.schedule.instructions import (
    Backward,
    Compute,
    Instruction,
    Receive,
    Reduce,
    Send,
    Update,
    requirements,
)
from lightning_pipe.schedule.programs import ComputeOrder, Plan


def lower(plan: Plan, order: ComputeOrder) -> Plan:
    """Insert everything that is not compute.

    Args:
        plan: A plan without programs.
        order: Annotated compute order of all ranks.

    Returns:
        The plan with programs. Each stage has a `Reduce` right after its last backward, and each
        rank ends with the `Update` of its stages, unless the plan is forward-only.
    """
    required = requirements(plan)
    sends: dict[Instruction, Send] = {
        needed[0]: step for step, needed in required.items() if isinstance(step, Send)
    }
    programs = []
    for rank, steps in enumerate(order):
        last_backwards = _last_backwards(steps)
        program: list[Instruction] = []
        for step in steps:
            program += [needed for needed in required[step] if isinstance(needed, Receive)]
            program.append(step)
            if step in sends:
                program.append(sends[step])
            if step in last_backwards:
                program.append(Reduce(step.stage))
        if not plan.forward_only:
            program += [Update(stage) for stage in plan.placement.stages_of(rank)]
        programs.append(tuple(program))
    return replace(plan, programs=tuple(programs))


def _last_backwards(steps: list[Compute]) -> set[Compute]:
    """Give the last backward of each stage on a rank."""
    return set({step.stage: step for step in steps if isinstance(step, Backward)}.values())
