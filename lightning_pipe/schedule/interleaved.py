"""Interleaved 1F1B: each rank holds v stages, which divides the bubble by v.

Narayanan et al. 2021 (Megatron-LM), section 2.2.
"""

from __future__ import annotations

from lightning_pipe.schedule.instructions import Backward, Forward
from lightning_pipe.schedule.one_f_one_b import alternate
from lightning_pipe.schedule.programs import ComputeOrder, Placement


def interleaved(placement: Placement, num_microbatches: int) -> ComputeOrder:
    """Run groups of P micro-batches through one stage of a rank after the other, in 1F1B order.

    Two ranks with two stages each, drawn with a backward as long as a forward::

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ..  2B2 ..  2B3 0B2 0B3
        rank 1 | ..  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ..

    Bubble (P-1) / (v*m+P-1). The warm-up of rank r is long enough for the first backward to find
    its gradient: v-1 rounds of P forwards, and two more for each rank behind it.

    Args:
        placement: v >= 2 stages per rank, stage s on rank s % P.
        num_microbatches: A multiple of P.

    Yields:
        The compute order of each rank.
    """
    num_ranks = placement.num_ranks
    groups = [range(i, i + num_ranks) for i in range(0, num_microbatches, num_ranks)]
    for rank in range(num_ranks):
        stages = placement.stages_of(rank)
        forwards = [Forward(stage, i) for group in groups for stage in stages for i in group]
        backwards = [
            Backward(stage, i) for group in groups for stage in reversed(stages) for i in group
        ]
        yield alternate(forwards, backwards, _warm_up(placement, rank))


def _warm_up(placement: Placement, rank: int) -> int:
    """Count the forwards of a rank's warm-up, if its batch has that many."""
    num_ranks = placement.num_ranks
    stages_per_rank = placement.num_stages // num_ranks
    return (num_ranks - rank - 1) * 2 + (stages_per_rank - 1) * num_ranks


def interleaved_in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """Bound the micro-batches in flight on each rank, over its stages: the warm-up and one more."""
    stages_per_rank = placement.num_stages // placement.num_ranks
    return tuple(
        min(_warm_up(placement, rank) + 1, num_microbatches * stages_per_rank)
        for rank in range(placement.num_ranks)
    )


def interleaved_refusal(placement: Placement, batches: tuple[int, ...]) -> str | None:
    """Say why the interleaved schedule cannot run, None if it can."""
    num_ranks, num_stages = placement.num_ranks, placement.num_stages
    (num_microbatches,) = batches
    if num_stages == num_ranks:
        return (
            f"one stage on each of {num_ranks} ranks, but 'interleaved' needs at least two per "
            "rank: set stages_per_rank=2, or choose '1f1b'"
        )
    if num_stages % num_ranks or placement != Placement.round_robin(
        num_ranks, num_stages // num_ranks
    ):
        return (
            f"rank_of={placement.rank_of}, but 'interleaved' needs stage s on rank s % {num_ranks} "
            "and as many stages on each rank: use Placement.round_robin, or choose 'gpipe'"
        )
    if num_microbatches % num_ranks:
        below = num_microbatches // num_ranks * num_ranks
        nearest = f"{below} or {below + num_ranks}" if below else f"{num_ranks}"
        return (
            f"num_microbatches={num_microbatches}, but 'interleaved' needs a multiple of the "
            f"{num_ranks} ranks: the nearest is {nearest}"
        )
    return None
