"""A schedule's compute order as arrays of small integers: what many ranks and micro-batches need.

A plan of 1024 ranks and 8192 micro-batches has 17 million computes; as objects, with the messages
between them, it would take tens of gigabytes. Generators yield rank by rank, so the objects of one
rank can go before those of the next are made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.schedule import (
    Backward,
    Forward,
    Placement,
    Plan,
    ScheduleError,
    VersionPolicy,
    accepts,
    make_plan,
)
from lightning_pipe.schedule.instructions import BackwardInput, BackwardWeight, Compute
from lightning_pipe.schedule.registry import look_up

KINDS: tuple[type[Compute], ...] = (Forward, Backward, BackwardInput, BackwardWeight)
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
_CODE = {kind: code for code, kind in enumerate(KINDS)}

Integers = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Order:
    """Who computes what in which order.

    A *label* is ``kind * num_stages + stage``, with the kinds in the order of `KINDS`. Ranks with
    fewer computes than others have the label ``len(KINDS) * num_stages`` behind their last one.

    Attributes:
        plan: The plan, without programs.
        labels: Of each compute; ranks x computes.
        microbatches: Of each compute; ranks x computes.
    """

    plan: Plan
    labels: Integers
    microbatches: Integers
    rank_of: Integers = field(init=False)

    def __post_init__(self) -> None:
        """Keep the placement as an array."""
        object.__setattr__(self, "rank_of", np.array(self.plan.placement.rank_of))

    @property
    def num_stages(self) -> int:
        """Number of stages over the whole model."""
        return self.plan.placement.num_stages

    def by_label(self, **of_kind: NDArray[np.float64]) -> NDArray[np.float64]:
        """Spread numbers by stage over the labels.

        Args:
            of_kind: By stage, for ``forward``, ``backward``, ``input`` and ``weight``; 0 for those
                that are left out, and behind the last compute.
        """
        rows = np.zeros((len(KINDS) + 1, self.num_stages))
        for row, kind in enumerate(("forward", "backward", "input", "weight")):
            rows[row] = of_kind.get(kind, 0.0)
        return rows.ravel()

    def peak_kept(self, amount: NDArray[np.float64]) -> NDArray[np.float64]:
        """Find the most that a rank keeps at a time, over all of its stages.

        Args:
            amount: What a stage keeps of one micro-batch from its forward until its last backward,
                by stage.

        Returns:
            By rank; zeros if there is no backward, since nothing is kept then.
        """
        if self.plan.forward_only:
            return np.zeros(len(self.labels))
        change = self.by_label(forward=amount, backward=-amount, weight=-amount)
        return np.array([np.cumsum(change[labels]).max() for labels in self.labels])

    def peak_in_flight(self) -> tuple[int, ...]:
        """Find the most micro-batches in flight at a time on each stage, by stage."""
        peaks = []
        for stage, rank in enumerate(self.plan.placement.rank_of):
            one = np.zeros(self.num_stages)
            one[stage] = 0 if self.plan.forward_only else 1
            change = self.by_label(forward=one, backward=-one, weight=-one)
            peaks.append(int(np.cumsum(change[self.labels[rank]]).max()))
        return tuple(peaks)


def read_order(
    schedule: str,
    placement: Placement,
    num_microbatches: int | tuple[int, ...],
    policy: VersionPolicy | None = None,
) -> Order:
    """Read the order that a schedule's generator gives.

    Args:
        schedule: As `lightning_pipe.schedule.make_plan` takes it.
        placement: Which rank holds which stage.
        num_microbatches: Of the batch, or of each batch of a fill.
        policy: One of the schedule's version policies. Default: its first.

    Raises:
        ScheduleError: If the schedule cannot take these, or if its generator leaves a compute out,
            gives one twice, or a backward before its forward.
    """
    if not accepts(schedule, placement, num_microbatches, policy):
        make_plan(schedule, placement, num_microbatches, policy=policy)  # raises with the reason
    recipe = look_up(schedule)
    batches = (num_microbatches,) if isinstance(num_microbatches, int) else num_microbatches
    plan = Plan(schedule, placement, batches, policy=policy or recipe.policies[0])
    num_stages = placement.num_stages
    small = np.int16 if (len(KINDS) + 1) * num_stages < 2**15 else np.int32
    rows: list[tuple[Integers, Integers]] = []
    with _without_cycle_search():
        for rank, steps in enumerate(recipe.generate(placement, plan.num_microbatches)):
            stages: Integers = np.array([step.stage for step in steps], dtype=small)
            kinds: Integers = np.array([_CODE[type(step)] for step in steps], dtype=small)
            microbatches = np.array([step.microbatch for step in steps], dtype=np.int32)
            _check(plan, rank, kinds, stages, microbatches)
            rows.append(((kinds * num_stages + stages).astype(small), microbatches))
    longest = max(len(labels) for labels, _ in rows)
    labels = np.full((len(rows), longest), len(KINDS) * num_stages, dtype=small)
    numbers = np.zeros((len(rows), longest), dtype=np.int32)
    for rank, (own_labels, own_numbers) in enumerate(rows):
        labels[rank, : len(own_labels)] = own_labels
        numbers[rank, : len(own_numbers)] = own_numbers
    return Order(plan, labels, numbers)


@contextmanager
def _without_cycle_search() -> Iterator[None]:
    """Make many small objects, none in a cycle: Python's search took four fifths of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check(
    plan: Plan, rank: int, kinds: Integers, stages: Integers, microbatches: Integers
) -> None:
    """Refuse what is not one forward and then one backward, in one or two parts, of each."""
    own, count = plan.placement.stages_of(rank), plan.num_microbatches
    row = np.full(plan.placement.num_stages, -1)
    row[list(own)] = range(len(own))
    cells = row[stages] * count + microbatches
    known = bool((row[stages] >= 0).all() and (microbatches >= 0).all())
    complete = known and bool((microbatches < count).all())
    if complete:
        when = []  # by kind: position of each stage and micro-batch, -1 if there is none
        for kind in range(len(KINDS)):
            (positions,) = np.nonzero(kinds == kind)
            found = np.full(len(own) * count, -1)
            found[cells[positions]] = positions
            complete &= int((found >= 0).sum()) == len(positions)
            when.append(found)
        forward, backward, first_part, second_part = when
        complete &= bool((forward >= 0).all())
        if plan.forward_only:
            complete &= bool((kinds == FORWARD).all())
        else:
            whole = (backward > forward) & (first_part < 0) & (second_part < 0)
            parts = (first_part > forward) & (second_part > first_part) & (backward < 0)
            complete &= bool((whole | parts).all())
    if not complete:
        raise ScheduleError(
            f"The generator of {plan.schedule!r} gives rank {rank} a compute twice, none, one of "
            "another rank, or a backward before its forward: make_plan says which, for fewer "
            "ranks and micro-batches"
        )
