"""Pass for rendezvous transports, for plans that would deadlock: meet each send with its receive.

`lower` puts a receive right before the compute that needs it. If sends wait for their receives, a
rank that still has other work to do then holds up its sender, and with several stages per rank two
ranks can hold up each other for ever. If instead every forward and backward took one unit of time
and messages none, all ranks would send and compute in step; a receive placed where its message is
sent in that timeline meets its send. Whatever the true times, no rank then waits for a later
exchange: each exchange of the timeline's time t needs only exchanges up to t.

A posted transport must not use this: its ranks would wait for messages that they do not need yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from lightning_pipe.schedule.instructions import Compute, Instruction, Receive, requirements
from lightning_pipe.schedule.programs import Plan
from lightning_pipe.schedule.simulate import equal_steps, simulate


def pair_exchanges(plan: Plan) -> Plan:
    """Move each receive forward to where its message is sent, in a timeline of equal steps.

    Args:
        plan: A lowered plan.

    Returns:
        The plan with the same computes in the same order.
    """
    events = simulate(plan, equal_steps(plan)).events
    start = {event.instruction: event.start for event in events}
    sent = {  # when the message of each receive is sent
        step: start[needed[0]]
        for step, needed in requirements(plan).items()
        if isinstance(step, Receive)
    }
    programs = []
    for program in plan.programs:
        receives = deque(sorted((step for step in program if step in sent), key=sent.__getitem__))
        paired: list[Instruction] = []
        for step in program:
            if isinstance(step, Receive):
                continue
            while isinstance(step, Compute) and receives and sent[receives[0]] <= start[step]:
                paired.append(receives.popleft())
            paired.append(step)
        assert not receives, "each receive has a compute behind it that needs it"
        programs.append(tuple(paired))
    return replace(plan, programs=tuple(programs))
