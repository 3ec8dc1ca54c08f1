"""Cut points against brute force, and the texts of the errors."""

import itertools
import random
import time

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pipe.partition import balance, partition, uniform


def brute_force(costs, num_stages):
    """Try all cut points; the order of preference is that of the docstring of `balance`."""

    def preference(sizes):
        stops = list(itertools.accumulate(sizes))
        sums = [sum(costs[stop - n : stop]) for n, stop in zip(sizes, stops, strict=True)]
        return max(sums), sum(s * s for s in sums), [-n for n in reversed(sizes)]

    num_layers = len(costs)
    all_sizes = []
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        cuts = [0, *inner, num_layers]
        all_sizes.append([b - a for a, b in itertools.pairwise(cuts)])
    return min(all_sizes, key=preference)


@pytest.mark.parametrize("seed", range(400))
def test_balance_is_the_best_of_all_cuts(seed):
    rng = random.Random(seed)
    num_layers = rng.randint(1, 10)
    num_stages = rng.randint(1, num_layers)
    largest = rng.choice([1, 3, 10, 10**9])
    costs = [rng.randint(0, largest) for _ in range(num_layers)]
    assert balance(costs, num_stages) == brute_force(costs, num_stages)


def test_balance_adds_floats_exactly():
    # In floating point 0.1 + 0.2 > 0.3, and 1e16 + 1.0 == 1e16.
    assert balance([1e16, 1.0, 1e16, 1.0, 1.0], 2) == [2, 3]
    assert balance([0.5, 0.5, 1.0], 2) == [2, 1]


def test_balance_keeps_the_cheap_stages_even():
    assert balance([100, 1, 1, 1, 1, 1, 1], 4) == [1, 2, 2, 2]


@pytest.mark.parametrize("skewed", [False, True])
def test_balance_is_fast(skewed):
    costs = [1.0 + (i * 7919 % 101) / 7 for i in range(1000)]
    if skewed:  # one dominant layer: nearly every cut is within the limit
        costs[500] = 1e9
    start = time.perf_counter()
    sizes = balance(costs, 64)
    assert time.perf_counter() - start < 1
    assert len(sizes) == 64
    assert sum(sizes) == 1000


def test_balance_of_equal_costs_is_uniform():
    for num_layers in range(1, 12):
        for num_stages in range(1, num_layers + 1):
            expected = uniform(num_layers, num_stages)
            assert balance([3] * num_layers, num_stages) == expected
            free = [0] * num_layers
            assert balance(free, num_stages) == brute_force(free, num_stages)


def test_uniform_gives_the_rest_to_the_later_stages():
    assert uniform(7, 3) == [2, 2, 3]
    assert uniform(6, 3) == [2, 2, 2]


@pytest.mark.parametrize("cut", [lambda: uniform(2, 4), lambda: balance([1, 1], 4)])
def test_more_stages_than_layers(cut):
    with pytest.raises(MisconfigurationException, match=r"4 stages .* only 2 layers .*use fewer"):
        cut()


def test_no_stage():
    with pytest.raises(MisconfigurationException, match=r"0 stages .* at least 1"):
        uniform(2, 0)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_impossible_costs(cost):
    with pytest.raises(MisconfigurationException, match=f"cost of layer 1 is {cost}"):
        balance([1, cost], 1)


def test_partition_takes_each_kind():
    costs = [10, 1, 1, 1]
    assert partition("uniform", costs, 2) == [2, 2]
    assert partition("parameters", costs, 2) == [1, 3]
    assert partition([3, 1], costs, 2) == [3, 1]
    assert partition((3, 1), costs, 2) == [3, 1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flops", r"'flops'.*'uniform', 'parameters', 'time'.*\[2, 2\]"),
        (2, r"`partition=2`.*expected"),
        ([4], r"\[4\].*, 1 numbers; expected one for each of the 2 stages, e.g. \[2, 2\]"),
        ([4, 0], r"\[4, 0\].*at least 1"),
        ([3.0, 1.0], r"\[3.0, 1.0\].*whole numbers"),
        ([True, 3], r"\[True, 3\].*whole numbers"),
        ([3, 2], r"\[3, 2\].*, 5 layers in all; the model has 4: change"),
    ],
)
def test_partition_errors(spec, message):
    with pytest.raises(MisconfigurationException, match=message):
        partition(spec, [1, 1, 1, 1], 2)
