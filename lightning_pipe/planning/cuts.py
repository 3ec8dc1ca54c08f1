"""Where to cut a chain of layers, so that the worst stage is as good as possible.

The dynamic programming of PipeDream (Narayanan et al. 2019, section 3.1), with transfers and the
memory of every stage in it. It goes from the last stage to the first: what a stage must keep in
flight is counted from the end of the pipeline, so one pass serves pipelines of every depth.

A row of the table takes O(n log n) instead of O(n^2): the cost of a stage grows with its end, hence
the best end is where that cost and the least of what remains, up to there, cross.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planning.ranges import RangeMinimum

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

StageCost: TypeAlias = Callable[[int, Integers, Integers], Floats]
"""What stages cost that have so many stages behind them, and hold layers start to stop - 1.

It must not fall with the stop. Infinite: such a stage cannot be, since it needs too much memory.
"""


class Cuts:
    """The best cuts for every number of stages.

    The cost of a pipeline is the largest of the costs of its stages and of its boundaries.

    Args:
        num_layers: At least 1.
        max_stages: The most stages; 1 to ``num_layers``.
        cost: Of a stage.
        boundary: Cost of a boundary in front of each layer; 0 for the first, where there is none.
    """

    def __init__(
        self, num_layers: int, max_stages: int, cost: StageCost, boundary: Floats | None = None
    ) -> None:
        self._num_layers = num_layers
        self._stops: list[Integers] = []  # by stages behind: where a stage ends, by its start
        starts = np.arange(num_layers)
        remaining = np.full(num_layers + 1, np.inf)  # by start: the cost of what is behind
        remaining[num_layers] = 0.0
        costs = []
        for place in range(max_stages):
            stops, least = _best_stops(place, starts, remaining, cost)
            if boundary is not None:
                least = np.maximum(least, boundary)
            remaining = np.append(least, np.inf)
            self._stops.append(stops)
            costs.append(float(least[0]))
        self.costs = tuple(costs)
        """By number of stages, less one: the least cost; infinite if no cut is possible."""

    def sizes(self, num_stages: int) -> tuple[int, ...]:
        """Give the number of layers of each stage of the best cut into so many stages.

        Raises:
            ValueError: If there is none.
        """
        if not np.isfinite(self.costs[num_stages - 1]):
            raise ValueError(f"there is no cut into {num_stages} stages")
        sizes, start = [], 0
        for place in reversed(range(num_stages)):
            stop = int(self._stops[place][start])
            sizes.append(stop - start)
            start = stop
        return tuple(sizes)


def _best_stops(
    place: int, starts: Integers, remaining: Floats, cost: StageCost
) -> tuple[Integers, Floats]:
    """Find where a stage should end, for each start, and what it and all behind it cost then."""
    num_layers = len(starts)
    behind = RangeMinimum(remaining)
    # The first stop at which the stage costs no less than the best behind any stop up to there.
    low, high = starts + 1, np.full(num_layers, num_layers)
    while (low < high).any():
        middle = (low + high) // 2
        crossed = cost(place, starts, middle) >= behind.least(starts + 1, middle + 1)
        high = np.where(crossed, middle, high)
        low = np.where(crossed, low, np.minimum(middle + 1, high))
    best_stops, best = low, np.full(num_layers, np.inf)
    for last in (low, np.maximum(low - 1, starts + 1)):
        stops = behind.where(starts + 1, last + 1)
        costs = np.maximum(cost(place, starts, stops), remaining[stops])
        better = costs < best
        best_stops = np.where(better, stops, best_stops)
        best = np.where(better, costs, best)
    return best_stops, best
