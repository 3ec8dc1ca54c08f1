"""Better cuts than those for the slowest stage, where a batch has few micro-batches.

While a pipeline fills and empties, stages do not weigh alike: 1F1B on 3 ranks with 2 micro-batches
is up to 5% faster with fewer layers on the last rank. No formula says so for every schedule, but
the simulation does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.planning.search import Choice, Search

_SIMULATIONS = 100  # of one choice, at most
_COMPUTES = 300_000  # to simulate for it, at most


def polished(search: Search, choice: Choice, capacity: float) -> Choice:
    """Make stages larger and smaller by a layer as long as that shortens the step and fits.

    Args:
        search: Simulates.
        choice: To begin with.
        capacity: Bytes of a device.
    """
    best, _ = search.step(choice)
    each = 2 * choice.setting.num_microbatches * choice.setting.num_stages
    left = min(_SIMULATIONS, _COMPUTES // each)
    moved = True
    while moved:
        moved = False
        for sizes in _neighbours(choice.sizes):
            if left == 0:
                return choice
            left -= 1
            other = replace(choice, sizes=sizes)
            seconds, _ = search.step(other)
            if seconds < best * (1 - 1e-9) and max(search.peak_bytes(other)) <= capacity:
                choice, best, moved = other, seconds, True
                break
    return choice


def _neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Give the cuts with a layer less in one stage and one more in another, near ones first.

    What is between them moves by a layer.
    """
    num_stages = len(sizes)
    for distance in range(1, num_stages):
        for left in range(num_stages - distance):
            right = left + distance
            for giver, taker in ((left, right), (right, left)):
                if sizes[giver] > 1:
                    moved = list(sizes)
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield tuple(moved)
