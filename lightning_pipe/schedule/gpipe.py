"""GPipe: all forwards, then all backwards (Huang et al. 2019); naive is GPipe with one micro-batch.

It is the one schedule that takes any placement and any number of micro-batches, hence what a short
last batch falls back to when its own schedule cannot take it.
"""

from __future__ import annotations

from lightning_pipe.schedule.instructions import Backward, Compute, Forward
from lightning_pipe.schedule.programs import ComputeOrder, Placement


def gpipe(placement: Placement, num_microbatches: int) -> ComputeOrder:
    """Run all forwards, then all backwards, micro-batches in ascending order in both.

    Drawn with a backward as long as a forward::

        rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
        rank 1 | .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 ..
        rank 2 | .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 .. ..
        rank 3 | .. .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. .. ..

    Bubble (P-1) / (m+P-1). A rank with several stages finishes one before it takes up the next.

    Args:
        placement: Any placement.
        num_microbatches: Any number.

    Yields:
        The compute order of each rank.
    """
    microbatches = range(num_microbatches)
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        steps: list[Compute] = [Forward(stage, i) for stage in stages for i in microbatches]
        steps += [Backward(stage, i) for stage in reversed(stages) for i in microbatches]
        yield steps


def gpipe_in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """Bound the micro-batches in flight on each rank: all of them, on each of its stages."""
    ranks = range(placement.num_ranks)
    return tuple(num_microbatches * len(placement.stages_of(rank)) for rank in ranks)


def gpipe_refusal(placement: Placement, batches: tuple[int, ...]) -> str | None:
    """Say why GPipe cannot run: it always can."""
    return None


def naive_refusal(placement: Placement, batches: tuple[int, ...]) -> str | None:
    """Say why the naive schedule cannot run, None if it can."""
    (num_microbatches,) = batches
    if num_microbatches == 1:
        return None
    return (
        f"num_microbatches={num_microbatches}, but 'naive' takes the batch as a whole: "
        "set num_microbatches=1, or choose 'gpipe'"
    )
