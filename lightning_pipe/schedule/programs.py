"""Placement and Plan: the data that every generator and every pass reads and writes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TypeAlias

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import Compute, Instruction

ComputeOrder: TypeAlias = Iterable[list[Compute]]
"""The forwards and backwards of each rank, in the order in which it runs them.

Generators may yield rank by rank: an order for a thousand ranks need not be in memory as a whole.
"""

FORWARD_ONLY = "forward"
"""Name of the internal schedule of evaluation and inference."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which pipeline rank holds which stage.

    Attributes:
        rank_of: Pipeline rank of each stage, by stage. Ranks are 0..num_ranks-1 and each holds a
            stage.

    Raises:
        ScheduleError: If a rank has no stage, or there are no stages at all.
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a placement with holes: an empty rank would wait for nothing, for ever."""
        if not self.rank_of or set(self.rank_of) != set(range(max(self.rank_of) + 1)):
            raise ScheduleError(
                f"rank_of={self.rank_of} must give each rank from 0 to the highest a stage"
            )

    @classmethod
    def round_robin(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Place stage s on rank s % num_ranks, as Megatron-LM does.

        Args:
            num_ranks: Number of pipeline ranks, at least 1.
            stages_per_rank: Stages that each rank holds, at least 1.

        Raises:
            ScheduleError: If one of the two is below 1.
        """
        if num_ranks < 1 or stages_per_rank < 1:
            raise ScheduleError(
                f"num_ranks={num_ranks} and stages_per_rank={stages_per_rank} must be at least 1"
            )
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def v_shaped(cls, num_ranks: int) -> Placement:
        """Place two stages on each rank, there and back: the first and the last on rank 0.

        Args:
            num_ranks: Number of pipeline ranks, at least 1.

        Raises:
            ScheduleError: If it is below 1.
        """
        there = cls.round_robin(num_ranks).rank_of
        return cls(there + there[::-1])

    @property
    def num_stages(self) -> int:
        """Number of stages over the whole model."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return max(self.rank_of) + 1

    @property
    def in_order(self) -> bool:
        """Whether a micro-batch first reaches rank 0, then rank 1, and so on."""
        return list(dict.fromkeys(self.rank_of)) == list(range(self.num_ranks))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Give the stages that a rank holds, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)


class VersionPolicy(Enum):
    """When a stage's weights are updated, and which of their versions a micro-batch reads.

    `lightning_pipe.schedule.versions` has the rule of each.

    Attributes:
        SYNCHRONOUS: One update, by the whole batch, when the pipeline is empty.
        STASHING: PipeDream: an update by every micro-batch. A forward reads the newest version and
            its backward the same one.
        VERTICAL_SYNC: As STASHING, but all stages read the version that stage 0 read.
        NO_STASHING: As STASHING, but a backward reads the newest version too: not the one of its
            forward.
        DOUBLE_BUFFERED: PipeDream-2BW: an update by every batch, which the batch after the next is
            the first to read. All stages read the same version.
    """

    SYNCHRONOUS = "synchronous"
    STASHING = "weight stashing"
    VERTICAL_SYNC = "vertical sync"
    NO_STASHING = "no weight stashing"
    DOUBLE_BUFFERED = "double buffering"


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank does in one fill, in order.

    Attributes:
        schedule: Name of the schedule that it follows.
        placement: Which rank holds which stage.
        batches: Number of micro-batches of each batch of the fill. A synchronous plan has one.
        programs: The instructions of each rank, by rank.
        policy: When the weights are updated, and which version a micro-batch reads.
        split: Stages and micro-batches whose backward is a `BackwardInput` and a `BackwardWeight`.
    """

    schedule: str
    placement: Placement
    batches: tuple[int, ...]
    programs: tuple[tuple[Instruction, ...], ...] = ()
    policy: VersionPolicy = VersionPolicy.SYNCHRONOUS
    split: frozenset[tuple[int, int]] = frozenset()

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of the whole fill."""
        return sum(self.batches)

    @property
    def num_updates(self) -> int:
        """Number of updates of each stage."""
        if self.forward_only:
            return 0
        match self.policy:
            case VersionPolicy.SYNCHRONOUS:
                return 1
            case VersionPolicy.DOUBLE_BUFFERED:
                return len(self.batches)
            case _:
                return self.num_microbatches

    def update_of(self, microbatch: int) -> int:
        """Give the number of the update that the gradient of a micro-batch belongs to."""
        match self.policy:
            case VersionPolicy.SYNCHRONOUS:
                return 0
            case VersionPolicy.DOUBLE_BUFFERED:
                return bisect_right(list(accumulate(self.batches)), microbatch)
            case _:
                return microbatch

    def microbatches_of(self, update: int) -> range:
        """Give the micro-batches whose gradients belong to an update."""
        match self.policy:
            case VersionPolicy.SYNCHRONOUS:
                return range(self.num_microbatches)
            case VersionPolicy.DOUBLE_BUFFERED:
                first = sum(self.batches[:update])
                return range(first, first + self.batches[update])
            case _:
                return range(update, update + 1)

    @property
    def forward_only(self) -> bool:
        """Whether the plan serves evaluation: no backward, no update, nothing kept in flight."""
        return self.schedule == FORWARD_ONLY
