"""The programs of one rank, batch by batch, in a fill that goes on over batches.

A round is cut out of the plan of a whole fill, which is validated. A plan cannot be as long as a
training run, nor need it: once the pipeline is full and no version is clamped at 0 any more, each
round is the one before it with all numbers moved on by one batch.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from lightning_pipe.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
)
from lightning_pipe.schedule.plan import make_plan
from lightning_pipe.schedule.programs import Placement, VersionPolicy
from lightning_pipe.schedule.progress import ReceiveModel


class Rounds:
    """What one rank does in each batch of a fill, all of which but the last are of one size.

    Args:
        schedule: A continuous schedule, which has one stage per rank.
        placement: Which rank holds which stage.
        rank: Whose programs to give.
        size: Number of micro-batches of each batch but the last.
        policy: One of the schedule's version policies.
        receive_model: What the transport does.

    Raises:
        ScheduleError: If the schedule cannot take the placement, the size or the policy.
    """

    def __init__(
        self,
        schedule: str,
        placement: Placement,
        rank: int,
        size: int,
        policy: VersionPolicy,
        receive_model: ReceiveModel = "posted",
    ) -> None:
        self._schedule, self._placement, self._rank = schedule, placement, rank
        self._size, self._policy, self._receive_model = size, policy, receive_model
        # From here on no version is clamped at 0: the oldest that a round reads is that of 2 w_0
        # micro-batches (vertical sync) or 2 batches (PipeDream-2BW) before it.
        self._steady = max(2, ceil(2 * (placement.num_stages - 1) / size))
        self._rounds = self._cut()
        self._endings: dict[tuple[int, int], tuple[Instruction, ...]] = {}

    def of(self, index: int, count: int, drains: bool) -> tuple[Instruction, ...]:
        """Give the program of one batch.

        Args:
            index: Number of the batch, from 0 in the fill.
            count: Number of its micro-batches: the size, unless it drains.
            drains: Whether the round goes on until the pipeline is empty. If not, it ends before
                what serves the first forward of the next batch.

        Returns:
            The instructions, from what serves the first forward of the batch on.
        """
        assert drains or count == self._size, "only the last batch of a fill may be shorter"
        known = min(index, self._steady)
        program = self._ending(known, count) if drains else self._rounds[known]
        return self._later(program, index - known)

    def drain(self, index: int) -> tuple[Instruction, ...]:
        """Give what is left after ``index`` rounds of the full size that did not drain."""
        known = min(index, self._steady)
        return self._later(self._ending(known, 0), index - known)

    def _cut(self) -> list[tuple[Instruction, ...]]:
        """Cut the rounds up to the first steady one out of a fill that goes on after it."""
        program = self._program((self._size,) * (self._steady + 2))
        starts = [0]
        for position, step in enumerate(program):
            first = len(starts) * self._size  # micro-batch of the next round
            if isinstance(step, Forward | ReceiveActivation) and step.microbatch == first:
                starts.append(position)
        return [program[start:end] for start, end in pairwise(starts)]

    def _ending(self, index: int, count: int) -> tuple[Instruction, ...]:
        """Give what follows ``index`` rounds if a batch of ``count`` ends the fill; 0 for none."""
        if (index, count) not in self._endings:
            batches = (self._size,) * index + ((count,) if count else ())
            done = {step for program in self._rounds[:index] for step in program}
            left = (step for step in self._program(batches) if step not in done)
            self._endings[index, count] = tuple(left)
        return self._endings[index, count]

    def _program(self, batches: tuple[int, ...]) -> tuple[Instruction, ...]:
        """Give the program of the rank for a whole fill."""
        if not batches:
            return ()
        plan = make_plan(
            self._schedule, self._placement, batches, self._receive_model, self._policy
        )
        return plan.programs[self._rank]

    def _later(self, program: tuple[Instruction, ...], batches: int) -> tuple[Instruction, ...]:
        """Give the same program so many batches later."""
        if batches == 0:
            return program
        microbatches = batches * self._size
        updates = batches if self._policy is VersionPolicy.DOUBLE_BUFFERED else microbatches
        return tuple(_shifted(step, microbatches, updates) for step in program)


def _shifted(step: Instruction, microbatches: int, updates: int) -> Instruction:
    """Move an instruction on by so many micro-batches and so many updates."""
    match step:
        case Forward() | Backward() | BackwardInput() | BackwardWeight():
            i, version = step.microbatch + microbatches, step.version + updates
            return type(step)(step.stage, i, version)
        case SendActivation() | ReceiveActivation():
            i, version = step.microbatch + microbatches, step.version + updates
            return type(step)(step.stage, i, step.peer, version)
        case SendGradient() | ReceiveGradient():
            return type(step)(step.stage, step.microbatch + microbatches, step.peer)
        case Reduce():
            return Reduce(step.stage, step.update + updates)
        case Update():
            return Update(step.stage, step.update + updates, step.keeps + updates)
