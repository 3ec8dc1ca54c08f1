"""1F1B: one forward, one backward, as soon as the pipeline is full.

Narayanan et al. 2019 (PipeDream), with the flush at the end of each batch of Fan et al. 2021
(DAPPLE).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.schedule.instructions import Backward, Compute, Forward, GradientSource
from lightning_pipe.schedule.programs import ComputeOrder, Placement


def one_f_one_b(placement: Placement, num_microbatches: int) -> ComputeOrder:
    """Run P-1-s forwards on stage s, then a forward and a backward in turn, then the rest.

    Drawn with a backward as long as a forward::

        rank 0 | F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
        rank 1 | .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..
        rank 2 | .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 .. ..
        rank 3 | .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. .. ..

    Bubble (P-1) / (m+P-1), as GPipe's; but at most P-s micro-batches are in flight on stage s.

    Args:
        placement: One stage per rank.
        num_microbatches: Any number.

    Yields:
        The compute order of each rank.
    """
    microbatches = range(num_microbatches)
    for rank in range(placement.num_ranks):
        (stage,) = placement.stages_of(rank)
        forwards = [Forward(stage, i) for i in microbatches]
        backwards = [Backward(stage, i) for i in microbatches]
        yield alternate(forwards, backwards, warm_up=placement.num_stages - 1 - stage)


def alternate(
    forwards: Sequence[Forward], backwards: Sequence[GradientSource], warm_up: int
) -> list[Compute]:
    """Merge a rank's forwards and backwards: warm-up, steady state, cool-down.

    Args:
        forwards: All forwards of the rank, in order.
        backwards: As many backwards, in order.
        warm_up: Number of forwards before the steady state begins, if there are that many.

    Returns:
        The compute order of the rank.
    """
    warm_up = min(warm_up, len(forwards))
    steps: list[Compute] = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        steps += [forward, backward]
    cool_down = backwards[len(backwards) - warm_up :]
    return [*steps, *cool_down]


def one_f_one_b_in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """Bound the micro-batches in flight on each rank: min(P-s, m) for the rank of stage s."""
    return tuple(
        min(placement.num_stages - stage, num_microbatches)
        for rank in range(placement.num_ranks)
        for stage in placement.stages_of(rank)
    )


def one_f_one_b_refusal(placement: Placement, batches: tuple[int, ...]) -> str | None:
    """Say why 1F1B cannot run, None if it can."""
    if placement.num_stages == placement.num_ranks:
        return None
    return (
        f"{placement.num_stages} stages on {placement.num_ranks} ranks, but '1f1b' needs one stage "
        "per rank: set stages_per_rank=1, or choose 'interleaved'"
    )
