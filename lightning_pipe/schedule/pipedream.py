"""PipeDream and PipeDream-2BW: 1F1B that never drains between batches, so it has no bubble.

Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP), and
Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (ICML; PipeDream-2BW).
"""

from __future__ import annotations

from lightning_pipe.schedule.one_f_one_b import one_f_one_b
from lightning_pipe.schedule.programs import ComputeOrder, Placement


def pipedream(placement: Placement, num_microbatches: int) -> ComputeOrder:
    """Run one 1F1B over all batches of a fill, whether they update by micro-batch or by batch.

    Drawn with the version that each compute reads, with weight stashing, and with a backward as
    long as a forward::

        rank 0 | F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@0 F4@2 B2@0 ..   B3@1 ..   B4@2
        rank 1 | ..   F0@0 F1@0 ..   B0@0 F2@1 B1@0 F3@2 B2@1 F4@3 B3@2 ..   B4@3 ..
        rank 2 | ..   ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3 F4@4 B4@4 ..   ..

    Every backward updates its stage, so stage s has made i - (P-1-s) updates when it turns to the
    forward of i. PipeDream-2BW runs the same computes with an update for each batch.

    Args:
        placement: One stage per rank.
        num_microbatches: Of the whole fill, any number.

    Returns:
        The compute order of each rank.
    """
    return one_f_one_b(placement, num_microbatches)


def pipedream_refusal(placement: Placement, batches: tuple[int, ...]) -> str | None:
    """Say why PipeDream cannot run, None if it can."""
    return _placement_refusal("pipedream", placement)


def pipedream_2bw_refusal(placement: Placement, batches: tuple[int, ...]) -> str | None:
    """Say why PipeDream-2BW cannot run, None if it can."""
    fewest = placement.num_stages
    short = next((count for count in batches[:-1] if count < fewest), None)
    if short is None:
        return _placement_refusal("pipedream_2bw", placement)
    return (
        f"num_microbatches={short}, but 'pipedream_2bw' needs at least as many as its {fewest} "
        "stages in each batch but a fill's last, so that an update comes exactly one batch late: "
        f"set num_microbatches={fewest} or more"
    )


def _placement_refusal(schedule: str, placement: Placement) -> str | None:
    """Say why a placement does not fit, None if it does."""
    if placement.num_stages == placement.num_ranks:
        return None
    return (
        f"{placement.num_stages} stages on {placement.num_ranks} ranks, but {schedule!r} takes one "
        "stage per rank only: set stages_per_rank=1"
    )
