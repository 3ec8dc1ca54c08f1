"""Even out ranks that hold several stages: a large stage beside a small one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_SWEEPS = 20
_STAGES = 4  # weight of the stages' evenness against the ranks'


def even_ranks(
    sizes: Sequence[int], ends: NDArray[np.float64], rank_of: Sequence[int]
) -> tuple[int, ...]:
    """Move single layers over boundaries as long as that evens ranks and stages.

    The best cuts make no stage slow, but a rank may get two of the slower ones. A move is made if
    it lessens the sum of squares of the ranks' seconds, plus four times that of the stages': of
    the weights 0, 1, 4 and 16, that gave the shortest steps over eight models, 2 to 64 ranks, and
    2 to 4 stages per rank, by up to 4%.

    Args:
        sizes: Number of layers of each stage; each keeps at least one.
        ends: Seconds of the first 0, 1, 2, ... layers.
        rank_of: Rank of each stage.

    Returns:
        The new sizes.
    """
    cuts = [0, *np.cumsum(sizes).tolist()]
    seconds = ends.tolist()
    tiny = 1e-9 * seconds[-1] ** 2
    stages = [seconds[b] - seconds[a] for a, b in pairwise(cuts)]
    ranks = [0.0] * (max(rank_of) + 1)
    for rank, stage in zip(rank_of, stages, strict=True):
        ranks[rank] += stage
    for _ in range(_SWEEPS):
        moved = False
        for left in range(len(stages) - 1):
            right, cut = left + 1, cuts[left + 1]
            giver, taker = rank_of[left], rank_of[right]
            for new in (cut - 1, cut + 1):
                if not cuts[left] < new < cuts[right + 1]:
                    continue
                shift = seconds[cut] - seconds[new]  # from the left to the right stage
                gain = _STAGES * _gain(stages[left], stages[right], shift)
                if giver != taker:
                    gain += _gain(ranks[giver], ranks[taker], shift)
                if gain > tiny:
                    stages[left] -= shift
                    stages[right] += shift
                    ranks[giver] -= shift
                    ranks[taker] += shift
                    cuts[left + 1] = cut = new
                    moved = True
        if not moved:
            break
    return tuple(b - a for a, b in pairwise(cuts))


def _gain(left: float, right: float, shift: float) -> float:
    """Give by how much a shift lessens the sum of squares of two numbers."""
    return 2 * shift * (left - right - shift)
