"""The cuts against all cuts there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from lightning_pipe.partition import balance
from lightning_pipe.partition.profile import LayerProfile, Profile
from lightning_pipe.planning.cuts import Cuts
from lightning_pipe.planning.memory import Checkpointing, StageMemory
from lightning_pipe.schedule import VersionPolicy


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Where stages begin, and the end."""
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [(0, *cuts, num_layers) for cuts in inner]


def a_profile(rng: random.Random, num_layers: int) -> Profile:
    def layer(index: int) -> LayerProfile:
        numbers = [rng.choice([0, rng.randint(0, 9)]) for _ in range(5)]
        return LayerProfile(str(index), rng.randint(0, 5), rng.randint(0, 9), *numbers)

    layers = tuple(layer(i) for i in range(num_layers))
    return Profile(layers, 1, rng.randint(0, 9), loss_activation_bytes=rng.randint(0, 9))


def by_hand(
    profile: Profile, start: int, stop: int, place: int, in_flight: int, checkpointing: str
) -> float:
    """Bytes of a stage of a PipeDream with weight stashing, layer by layer."""
    layers = profile.layers[start:stop]
    total = 0.0
    for layer in layers:
        total += (place + 1) * layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes
    enters = [profile.input_bytes, *(layer.output_bytes for layer in profile.layers)]
    activations = [layer.activation_bytes for layer in layers]
    if checkpointing == "none":
        kept, again = sum(activations), 0
    elif checkpointing == "stage":
        kept, again = enters[start], sum(activations)
    else:
        kept, again = sum(enters[start:stop]), max(activations)
    if stop == len(profile.layers):
        kept += profile.loss_activation_bytes
    return total + in_flight * kept + again


def test_optimal_within_memory() -> None:
    """Compute, transfers in and out, and a memory that depends on the place, for all depths."""
    outcomes = [outcome for seed in range(60) for outcome in compared(seed)]
    assert len(outcomes) > 200
    assert 0.2 < sum(outcomes) / len(outcomes) < 0.95  # some fit, some do not


def compared(seed: int) -> Iterator[bool]:
    """Compare one random case at every depth, and say which of them fit."""
    rng = random.Random(seed)
    num_layers = rng.randint(1, 9)
    profile = a_profile(rng, num_layers)
    checkpointing: Checkpointing = rng.choice(["none", "stage", "layer"])
    m = rng.randint(1, 6)
    capacity = rng.choice([inf, rng.randint(20, 150)])
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in profile.layers]
    transfer = [0.0, *(rng.choice([0, 3, 20]) * rng.random() for _ in range(num_layers - 1))]

    memory = StageMemory(profile, 1, checkpointing, VersionPolicy.STASHING)
    sums = np.append(0.0, np.cumsum(seconds))

    def cost(place: int, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        fits = memory.of_stages(start, stop, place, min(place + 1, m)) <= capacity
        return np.where(fits, sums[stop] - sums[start], inf)

    found = Cuts(num_layers, num_layers, cost, np.array(transfer))

    def cost_by_hand(cuts: Sequence[int]) -> float:
        worst = 0.0
        for stage, (start, stop) in enumerate(pairwise(cuts)):
            place = len(cuts) - 2 - stage
            fits = (
                by_hand(profile, start, stop, place, min(place + 1, m), checkpointing) <= capacity
            )
            out = transfer[stop] if stop < num_layers else 0.0
            worst = max(worst, sum(seconds[start:stop]), transfer[start], out)
            worst = worst if fits else inf
        return worst

    for num_stages in range(1, num_layers + 1):
        best = min(cost_by_hand(cuts) for cuts in all_cuts(num_layers, num_stages))
        assert found.costs[num_stages - 1] == pytest.approx(best, rel=1e-12)
        if best == inf:
            with pytest.raises(ValueError, match=f"no cut into {num_stages} stages"):
                found.sizes(num_stages)
            yield False
            continue
        sizes = found.sizes(num_stages)
        assert len(sizes) == num_stages
        cuts = [0, *np.cumsum(sizes).tolist()]
        assert cost_by_hand(cuts) == pytest.approx(best, rel=1e-12)
        yield True


@pytest.mark.parametrize("seed", range(5))
def test_without_transfers_as_good_as_the_balanced_partition(seed: int) -> None:
    """Which finds the least largest stage by bisection, over exact fractions."""
    rng = random.Random(seed)
    seconds = [rng.choice([0.0, rng.random() ** 3]) for _ in range(200)]
    sums = np.append(0.0, np.cumsum(seconds))
    found = Cuts(200, 40, lambda place, start, stop: sums[stop] - sums[start])
    for num_stages in (1, 2, 7, 40):
        expected = _largest(seconds, balance(seconds, num_stages))
        assert _largest(seconds, found.sizes(num_stages)) == pytest.approx(expected, rel=1e-12)
        assert found.costs[num_stages - 1] == pytest.approx(expected, rel=1e-12)


def _largest(seconds: Sequence[float], sizes: Sequence[int]) -> float:
    ends = np.cumsum(sizes)
    return max(sum(seconds[end - size : end]) for end, size in zip(ends, sizes, strict=True))
