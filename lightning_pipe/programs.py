"""Which program a rank runs, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from lightning_pipe.runtime.executor import Program
from lightning_pipe.runtime.transport import ReceiveModel
from lightning_pipe.schedule import (
    Placement,
    Rounds,
    VersionPolicy,
    accepts,
    look_up,
    make_plan,
)


@dataclass(frozen=True)
class Timing:
    """The options of PipelineStrategy that say what runs when.

    Attributes:
        schedule: Its name.
        num_microbatches: Of a batch, or ``"auto"``.
        policy: Which version of the weights a micro-batch reads.
        placement: Which rank holds which stage.
    """

    schedule: str
    num_microbatches: int | Literal["auto"]
    policy: VersionPolicy
    placement: Placement

    @property
    def continuous(self) -> bool:
        """Whether the pipeline stays full between batches."""
        return look_up(self.schedule).continuous

    def count(self, batch_size: int | None) -> int:
        """Into how many micro-batches a batch is cut; ``None``: one that is large enough."""
        if self.num_microbatches != "auto":
            return self.num_microbatches
        most = look_up(self.schedule).most_microbatches(self.placement)
        most = most if batch_size is None else min(most, batch_size)
        fitting = (
            count for count in range(most, 0, -1) if accepts(self.schedule, self.placement, count)
        )
        return next(fitting, most)

    def schedule_for(self, count: int) -> str:
        """The schedule, or F-then-B over the same stages for a count that it cannot take."""
        return self.schedule if accepts(self.schedule, self.placement, count) else "gpipe"


class RankPrograms:
    """The programs of one rank.

    Args:
        timing: What runs when.
        rank: Of the pipeline.
        receive_model: Of the transport.
    """

    def __init__(self, timing: Timing, rank: int, receive_model: ReceiveModel) -> None:
        self._timing, self._rank, self._receive_model = timing, rank, receive_model
        self._warm_up = timing.placement.num_stages - 1  # of stage 0, the longest
        self._rounds = cache(self._make_rounds)
        self.continuous = timing.continuous
        self.per_microbatch = timing.policy is not VersionPolicy.DOUBLE_BUFFERED

    def fill_size(self, count: int) -> int:
        """See :class:`~lightning_pipe.runtime.rounds.TrainingPrograms`."""
        return max(count, self._timing.count(None))

    def drains(self, size: int, count: int) -> bool:
        """See :class:`~lightning_pipe.runtime.rounds.TrainingPrograms`."""
        return not self.continuous or count != size

    def lag(self, size: int) -> int:
        """See :class:`~lightning_pipe.runtime.rounds.TrainingPrograms`: w_0 micro-batches."""
        return -(-self._warm_up // size) if self.continuous else 0

    def round(self, index: int, size: int, count: int, drains: bool) -> Program:
        """See :class:`~lightning_pipe.runtime.rounds.TrainingPrograms`."""
        if self.continuous:
            return self._rounds(size).of(index, count, drains)
        timing = self._timing
        plan = make_plan(timing.schedule_for(count), timing.placement, count, self._receive_model)
        return plan.programs[self._rank]

    def drain(self, index: int, size: int) -> Program:
        """See :class:`~lightning_pipe.runtime.rounds.TrainingPrograms`."""
        return self._rounds(size).drain(index)

    def evaluation(self, count: int) -> Program:
        """See :class:`~lightning_pipe.runtime.pipeline.Programs`."""
        plan = make_plan("forward", self._timing.placement, count, self._receive_model)
        return plan.programs[self._rank]

    def _make_rounds(self, size: int) -> Rounds:
        timing = self._timing
        return Rounds(
            timing.schedule, timing.placement, self._rank, size, timing.policy, self._receive_model
        )
