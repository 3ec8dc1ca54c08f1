"""Placement and Plan: the data that every generator and every pass reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import Compute, Instruction

ComputeOrder: TypeAlias = list[list[Compute]]
"""The forwards and backwards of each rank, in the order in which it runs them."""

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

    @property
    def num_stages(self) -> int:
        """Number of stages over the whole model."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return max(self.rank_of) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Give the stages that a rank holds, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank does for one batch, in order.

    Attributes:
        schedule: Name of the schedule that it follows.
        placement: Which rank holds which stage.
        num_microbatches: Number of micro-batches that the batch is split into.
        programs: The instructions of each rank, by rank.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    programs: tuple[tuple[Instruction, ...], ...]

    @property
    def forward_only(self) -> bool:
        """Whether the plan serves evaluation: no backward, no update, nothing kept in flight."""
        return self.schedule == FORWARD_ONLY
