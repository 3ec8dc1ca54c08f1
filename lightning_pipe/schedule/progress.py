"""How far a plan gets: the order in which its instructions can run under a receive model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, TypeAlias

from lightning_pipe.schedule.instructions import (
    Communication,
    Instruction,
    Receive,
    requirements,
)
from lightning_pipe.schedule.programs import Plan

ReceiveModel: TypeAlias = Literal["posted", "rendezvous"]
"""What a transport does with a message.

- ``"posted"``: a send returns at once, its message is kept until it is received (gloo).
- ``"rendezvous"``: a send is complete only together with its receive (NCCL). What a rank
  communicates between two other instructions is one exchange: it starts as a whole and is over when
  all of it is (``batch_isend_irecv``). One channel per ordered pair of ranks carries activations
  and gradients alike.
"""


def posted_order(plan: Plan) -> Iterator[tuple[int, Instruction, tuple[Instruction, ...]]]:
    """Run a plan with sends that never block, each rank as far as it gets.

    An instruction runs once all that it depends on has run; one that the plan should not hold never
    does. A plan that cannot complete ends the iteration early, with each rank in front of the
    instruction that it is stuck at.

    Yields:
        Rank, instruction and its dependencies, in an order in which they can run.
    """
    required = requirements(plan)
    done: set[Instruction] = set()
    heads = [0] * len(plan.programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(plan.programs):
            for instruction in program[heads[rank] :]:
                needed = required.get(instruction)
                if needed is None or not done.issuperset(needed):
                    break
                yield rank, instruction, needed
                done.add(instruction)
                heads[rank] += 1
                moved = True


def stuck_exchanges(plan: Plan) -> dict[int, list[Communication]]:
    """Run a plan in which each send waits for its receive, as far as it gets.

    Args:
        plan: A plan that completes under the posted model.

    Returns:
        For each rank that cannot complete, the sends and receives without partner of the exchange
        at which it stands; empty if the plan completes.
    """
    required = requirements(plan)
    exchanges = [_exchanges(program) for program in plan.programs]
    open_now = [next(rank_exchanges, None) for rank_exchanges in exchanges]
    posted: set[Instruction] = set()
    met: set[Instruction] = set()
    moved = True
    while moved:
        moved = False
        for rank, exchange in enumerate(open_now):
            if exchange is None:
                continue
            moved |= not posted.issuperset(exchange)
            posted.update(exchange)
            for receive in exchange:
                if isinstance(receive, Receive) and posted.issuperset(required[receive]):
                    met.update((receive, *required[receive]))
            if met.issuperset(exchange):
                open_now[rank] = next(exchanges[rank], None)
                moved = True
    return {
        rank: [step for step in exchange if step not in met]
        for rank, exchange in enumerate(open_now)
        if exchange is not None
    }


def _exchanges(program: tuple[Instruction, ...]) -> Iterator[list[Communication]]:
    """Cut a program into its exchanges: runs of sends and receives without anything between."""
    for communicates, run in groupby(program, key=lambda step: isinstance(step, Communication)):
        if communicates:
            yield [step for step in run if isinstance(step, Communication)]
