"""Cut an ordered list of layer costs into stages. Pure: no modules, no tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm

from lightning.fabric.utilities.exceptions import MisconfigurationException


def partition(spec: str | Sequence[int], costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the number of layers of each stage.

    Args:
        spec: "uniform" (equally many layers), "parameters", "time" or the name of a profile
            ("....json") (stages that cost equally much, see `balance`), or the number of layers of
            each stage.
        costs: one number per layer: its number of parameter elements, or its seconds.
        num_stages: the number of stages, virtual ones included.

    Raises:
        MisconfigurationException: if `spec` is unknown or does not fit the numbers of layers and
            stages, or there are more stages than layers.
    """
    if spec == "uniform":
        return uniform(len(costs), num_stages)
    if isinstance(spec, str) and (spec in ("parameters", "time") or spec.endswith(".json")):
        return balance(costs, num_stages)
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return _explicit(spec, len(costs), num_stages)
    raise MisconfigurationException(
        f"`partition={spec!r}` was given; expected 'uniform', 'parameters', 'time', a saved profile"
        f" ('profile.json'), or the number of layers of each stage, e.g."
        f" {_example(len(costs), num_stages)}."
    )


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """Return layer counts that differ by at most one.

    The later stages get the larger ones: the earlier a stage, the more activations it keeps in
    flight.

    Raises:
        MisconfigurationException: if there are more stages than layers.
    """
    _check_stages(num_layers, num_stages)
    small, num_large = divmod(num_layers, num_stages)
    return [small] * (num_stages - num_large) + [small + 1] * num_large


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the layer counts whose most expensive stage is as cheap as possible, found exactly.

    The slowest stage sets the pace of a pipeline, so the largest stage sum comes first. Of the cuts
    that share the least largest sum, those with the least sum of squares are taken: the other
    stages are even too. Of those that are still equal, the one with the most layers in the last
    stage, then in the one before it, and so on (as `uniform` does).

    Args:
        costs: one cost per layer, in any unit; zero for a layer that costs nothing.
        num_stages: the number of stages; each gets at least one layer.

    Raises:
        MisconfigurationException: if there are more stages than layers, or a cost is negative or
            not finite.
    """
    _check_stages(len(costs), num_stages)
    ends = [0, *accumulate(_as_integers(costs))]
    limit = _least_limit(ends, num_stages)
    cuts = _most_even_cuts(ends, num_stages, limit)
    return [stop - start for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Scale the costs to integers, so that sums are exact and equal cuts compare equal."""
    for layer, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise MisconfigurationException(
                f"The cost of layer {layer} is {cost}; expected a finite number that is not"
                " negative."
            )
    fractions = [Fraction(cost) for cost in costs]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def _least_limit(ends: list[int], num_stages: int) -> int:
    """Return the least cost per stage with which all layers fit into the stages.

    Args:
        ends: `ends[i]` is the cost of the first i layers.
        num_stages: the number of stages. Fewer always do if more do: a stage can be split, as
            there are enough layers.
    """
    low, high = max(b - a for a, b in zip(ends[:-1], ends[1:], strict=True)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _furthest(ends, num_stages, middle)[-1] == len(ends) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def _furthest(ends: list[int], num_stages: int, limit: int) -> list[int]:
    """Return how many layers k stages within `limit` can hold, for k = 0 .. `num_stages`."""
    reached = [0]
    for _ in range(num_stages):
        budget = ends[reached[-1]] + limit
        reached.append(bisect_left(ends, budget + 1) - 1)
    return reached


def _most_even_cuts(ends: list[int], num_stages: int, limit: int) -> list[int]:
    """Return the cut points 0 .. n with the least sum of squares, all stages within `limit`.

    Dynamic programming over stages: `best[i]` is the least sum of squares of the first i layers in
    k stages. The square of a segment's sum fulfils the quadrangle inequality, so the best cut moves
    to the right as i does, and divide and conquer finds a whole row in O(n log n) instead of
    O(n^2).
    """
    num_layers = len(ends) - 1
    furthest = _furthest(ends, num_stages, limit)
    # `nearest[i]`: the earliest cut that keeps a stage which ends at i within the limit.
    nearest = [bisect_left(ends, end - limit) for end in ends]
    best: dict[int, int] = {0: 0}
    rows: list[dict[int, int]] = []
    for stage in range(1, num_stages + 1):
        # No stage is empty: leave one layer for each stage before and each stage after this one.
        last = min(furthest[stage], num_layers - (num_stages - stage))
        best, cut = _row(ends, best, nearest, stage, last)
        rows.append(cut)
    cuts = [num_layers]
    for cut in reversed(rows):
        cuts.append(cut[cuts[-1]])
    return cuts[::-1]


def _row(
    ends: list[int], previous: dict[int, int], nearest: list[int], first: int, last: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Extend `previous` by one stage that ends at `first` .. `last`.

    Returns:
        For each end the least sum of squares, and the cut before the stage that gives it.
    """
    best: dict[int, int] = {}
    cut: dict[int, int] = {}
    leftmost, rightmost = min(previous), max(previous)
    pending = [(first, last, leftmost, rightmost)]
    while pending:
        low, high, left, right = pending.pop()
        if low > high:
            continue
        end = (low + high) // 2
        best[end], cut[end] = min(
            (previous[c] + (ends[end] - ends[c]) ** 2, c)
            for c in range(max(left, nearest[end]), min(right, end - 1) + 1)
        )
        pending += [(low, end - 1, left, cut[end]), (end + 1, high, cut[end], right)]
    return best, cut


def _explicit(sizes: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    given = f"`partition={list(sizes)!r}` was given"
    example = f"e.g. {_example(num_layers, num_stages)}"
    if len(sizes) != num_stages:
        raise MisconfigurationException(
            f"{given}, {len(sizes)} numbers; expected one for each of the {num_stages} stages,"
            f" {example}."
        )
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise MisconfigurationException(
            f"{given}; expected whole numbers of at least 1, the layers of each stage, {example}."
        )
    if sum(sizes) != num_layers:
        raise MisconfigurationException(
            f"{given}, {sum(sizes)} layers in all; the model has {num_layers}: change the numbers"
            f" so that they add up to it, {example}."
        )
    return list(sizes)


def _example(num_layers: int, num_stages: int) -> list[int]:
    return uniform(num_layers, num_stages) if 1 <= num_stages <= num_layers else [1] * num_layers


def _check_stages(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise MisconfigurationException(f"{num_stages} stages were asked for; expected at least 1.")
    if num_stages > num_layers:
        raise MisconfigurationException(
            f"{num_stages} stages were asked for, but the pipelined module has only {num_layers}"
            " layers and no stage may be empty: use fewer devices (`pipeline_parallel_size`),"
            " fewer `stages_per_rank`, or cut the model into more layers."
        )
