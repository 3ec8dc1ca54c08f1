"""The weights of a pipeline are those of plain Lightning on one device.

Over schedules, stages, micro-batches, batch sizes, checkpointing and accumulation, in float64.
"""

import itertools
from functools import lru_cache

import pytest
import torch
from torch import nn

from lightning_pipe.schedule import accepts, look_up

from .harness import Layout, Module, difference, one_device, pipelined

WIDTH = 3
# 24 samples can be cut evenly into 1, 3, 4 or 8 micro-batches, 13 cannot; 2 are fewer than most.
SIZES = (24, 13, 24, 13, 2)
NUM_MICROBATCHES = (1, 3, 4, 8)
CHECKPOINTING = ("none", "stage", "layer")
ACCUMULATE = (1, 2, 3)


def make_model():
    torch.manual_seed(0)
    # One layer for each of 4 ranks x 3 stages: some stages have no parameters then.
    return Module(*itertools.chain(*((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))))


@lru_cache
def batches():
    torch.manual_seed(1)
    shape = (WIDTH,)
    return [(torch.randn(n, *shape).double(), torch.randn(n, *shape).double()) for n in SIZES]


@lru_cache
def expected(accumulate):
    return one_device(make_model, batches(), accumulate)


def layouts(schedule, num_ranks, stages_per_rank):
    placement = look_up(schedule).place(num_ranks, stages_per_rank)
    checkpointing = ("none",) if schedule == "zero_bubble" else CHECKPOINTING
    for count, way in itertools.product(NUM_MICROBATCHES, checkpointing):
        if accepts(schedule, placement, count):
            yield Layout(schedule, num_ranks, count, stages_per_rank, way)


SHAPES = [
    (schedule, num_ranks, stages_per_rank)
    for schedule, stages_per_rank in [
        ("naive", 1),
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
    ]
    for num_ranks in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("schedule", "num_ranks", "stages_per_rank"), SHAPES)
def test_weights_equal_one_device(schedule, num_ranks, stages_per_rank):
    differences = []
    # Each layout with one of them; together every two options meet.
    accumulations = itertools.cycle(ACCUMULATE[num_ranks % 3 :] + ACCUMULATE[: num_ranks % 3])
    for layout, accumulate in zip(
        layouts(schedule, num_ranks, stages_per_rank), accumulations, strict=False
    ):
        ours = pipelined(make_model, batches(), layout, accumulate)
        found = difference(ours, expected(accumulate))
        if found is not None:
            differences.append(f"{layout}, accumulate={accumulate}: {found}")
    assert not differences, "\n".join(differences)
