"""Zero-bubble schedules: gradients of weights, for which nobody waits, fill the bubble.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (ICLR): the schedule H1, with the memory of 1F1B,
for one stage per rank; ZB-V for two, placed there and back.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pipe.schedule.instructions import BackwardInput, BackwardWeight, Compute, Forward
from lightning_pipe.schedule.one_f_one_b import alternate
from lightning_pipe.schedule.programs import ComputeOrder, Placement


def zero_bubble_placement(num_ranks: int, stages_per_rank: int) -> Placement:
    """Place one stage on each rank, or two there and back."""
    if stages_per_rank == 2:
        return Placement.v_shaped(num_ranks)
    return Placement.round_robin(num_ranks, stages_per_rank)


def zero_bubble(placement: Placement, num_microbatches: int) -> ComputeOrder:
    """Run 1F1B with split backwards; the second parts come late enough to fill the gaps.

    H1, drawn with forward and both parts of a backward equally long. ``I0`` and ``W0`` are the
    parts for the input and the weights::

        rank 0 | F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1 | .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    It takes (P-1) (F+I-W) longer than m (F+I+W), for the costs of F, I and W, if m is at least P;
    P micro-batches are in flight at most, until their W.

    ZB-V, if the costs are equal, has no gap between a rank's first and last compute, of which
    there are twice as many of half the length: it takes P-1 of these longer. `_zb_v` draws it.

    Args:
        placement: One stage per rank, or `Placement.v_shaped`.
        num_microbatches: Any number; for ZB-V, 2P-1 or more.

    Yields:
        The compute order of each rank.
    """
    one_stage = placement.num_stages == placement.num_ranks
    for rank in range(placement.num_ranks):
        yield list((_h1 if one_stage else _zb_v)(placement, rank, num_microbatches))


def _h1(placement: Placement, stage: int, num_microbatches: int) -> Iterator[Compute]:
    """Put the weights' part of micro-batch i behind the input's part of i+s on stage s."""
    microbatches = range(num_microbatches)
    forwards = [Forward(stage, i) for i in microbatches]
    inputs = [BackwardInput(stage, i) for i in microbatches]
    weights = iter([BackwardWeight(stage, i) for i in microbatches])
    for step in alternate(forwards, inputs, warm_up=placement.num_stages - 1 - stage):
        yield step
        if isinstance(step, BackwardInput) and step.microbatch >= stage:
            yield next(weights)
    yield from weights


def _zb_v(placement: Placement, rank: int, num_microbatches: int) -> Iterator[Compute]:
    """Go through nine phases, in each of which a rank repeats a pattern over its two stages.

    Two ranks and three micro-batches, stages 0 and 3 on rank 0::

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ..
        rank 1 | ..  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    behind = placement.num_ranks - rank  # this rank and all after it
    f0, i0, w0 = _steps(placement.stages_of(rank)[0], num_microbatches)
    f1, i1, w1 = _steps(placement.stages_of(rank)[1], num_microbatches)
    phases = (
        (2 * behind - 1, (f0,)),
        (rank, (f1, f0)),
        (behind, (f1, i1, w1)),
        (num_microbatches - placement.num_ranks - behind + 1, (f0, i0, w0, f1, i1, w1)),
        (behind - 1, (i0, w0, f1, i1, w1)),
        (rank, (i0, i1)),
        (behind, (i0, w0)),
        (rank, (w1,)),
        (rank, (w0,)),
    )
    for repetitions, pattern in phases:
        for _ in range(repetitions):
            for steps in pattern:
                yield next(steps)


def _steps(stage: int, num_microbatches: int) -> list[Iterator[Compute]]:
    """Give the forwards of a stage, and the two parts of its backwards."""
    kinds = (Forward, BackwardInput, BackwardWeight)
    return [iter([kind(stage, i) for i in range(num_microbatches)]) for kind in kinds]


def zero_bubble_in_flight(placement: Placement, num_microbatches: int) -> tuple[int, ...]:
    """Bound the micro-batches in flight on each rank, over its stages: as 1F1B on rank 0."""
    stages_per_rank = placement.num_stages // placement.num_ranks
    most = min(placement.num_ranks, num_microbatches) * stages_per_rank
    return (most,) * placement.num_ranks


def zero_bubble_refusal(placement: Placement, batches: tuple[int, ...]) -> str | None:
    """Say why a zero-bubble schedule cannot run, None if it can."""
    num_ranks, (num_microbatches,) = placement.num_ranks, batches
    if placement == Placement.round_robin(num_ranks):
        return None
    if placement != Placement.v_shaped(num_ranks):
        return (
            f"rank_of={placement.rank_of}, but 'zero_bubble' needs one stage per rank, or two "
            "placed there and back: set stages_per_rank=1 or 2"
        )
    if num_microbatches < 2 * num_ranks - 1:
        return (
            f"num_microbatches={num_microbatches}, but 'zero_bubble' with two stages on each of "
            f"{num_ranks} ranks needs {2 * num_ranks - 1} or more"
        )
    return None
