"""Forward only: what evaluation and inference run, whatever the schedule of the training is."""

from __future__ import annotations

from lightning_pipe.schedule.instructions import Forward
from lightning_pipe.schedule.programs import ComputeOrder, Placement


def forward_only(placement: Placement, num_microbatches: int) -> ComputeOrder:
    """Run all forwards, micro-batches in ascending order.

    Drawn for three ranks and four micro-batches::

        rank 0 | F0 F1 F2 F3 .. ..
        rank 1 | .. F0 F1 F2 F3 ..
        rank 2 | .. .. F0 F1 F2 F3

    A rank with several stages finishes one before it takes up the next.

    Args:
        placement: Any placement.
        num_microbatches: Any number.

    Yields:
        The compute order of each rank.
    """
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        yield [Forward(stage, i) for stage in stages for i in range(num_microbatches)]
