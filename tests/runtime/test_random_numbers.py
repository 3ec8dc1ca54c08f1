"""Random numbers depend neither on the cut nor on the schedule nor on recomputation.

Threads share torch's generator, so ranks in threads would disturb each other's streams. These tests
put all stages on one rank, which is one thread; ranks in processes are tested with the Trainer.
"""

import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipe.runtime.random_state import RandomStates, mix
from lightning_pipe.runtime.transport import LocalHub, LocalTransport

from .harness import Layout, Module, Rank, assert_equal, pipelined

WIDTH = 4
CUTS = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("gpipe", 3),
    ("gpipe", 4),
    ("interleaved", 2),
    ("interleaved", 4),
]


def one_rank(schedule, stages, checkpointing="none"):
    return Layout(schedule, 1, 3, stages, checkpointing)


def make_batches():
    torch.manual_seed(1)
    return [(torch.randn(n, WIDTH).double(), torch.randn(n, WIDTH).double()) for n in (6, 5, 6)]


def with_dropout():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4))
    return Module(*blocks)


@pytest.mark.parametrize("checkpointing", ["stage", "layer"])
@pytest.mark.parametrize(("schedule", "stages"), CUTS)
def test_recomputation_repeats_dropout(schedule, stages, checkpointing):
    plain = pipelined(with_dropout, make_batches(), one_rank(schedule, stages))
    again = pipelined(with_dropout, make_batches(), one_rank(schedule, stages, checkpointing))
    assert again.losses == plain.losses
    for name, weight in plain.weights.items():
        assert torch.equal(again.weights[name], weight), name


@pytest.mark.parametrize(("schedule", "stages"), CUTS[1:])
def test_dropout_does_not_depend_on_the_cut(schedule, stages):
    whole = pipelined(with_dropout, make_batches(), one_rank("gpipe", 1))
    assert_equal(pipelined(with_dropout, make_batches(), one_rank(schedule, stages)), whole)


class Draws(nn.Module):
    """Writes down what it draws."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.drawn = draw, []
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.drawn.append(self.draw())
        return self.linear(x) * self.drawn[-1]


SOURCES = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": np.random.rand}


def draws_by_layer(source, layout):
    """What each layer drew in three batches of three micro-batches."""
    model = Module(*(Draws(SOURCES[source]) for _ in range(4)))
    layers = list(model.net)
    Rank(model, layout, transport=alone()).fit(make_batches())
    return [layer.drawn for layer in layers]


def alone():
    return LocalTransport(0, LocalHub(1))


def test_each_layer_draws_other_numbers_for_each_microbatch_of_each_batch():
    drawn = draws_by_layer("torch", one_rank("gpipe", 2))
    numbers = [number for of_layer in drawn for number in of_layer]
    assert len(set(numbers)) == len(numbers) == 4 * 3 * 3


@pytest.mark.parametrize("checkpointing", ["stage", "layer"])
@pytest.mark.parametrize("source", SOURCES)
def test_recomputation_repeats_what_layers_draw(source, checkpointing):
    for of_layer in draws_by_layer(source, one_rank("gpipe", 2, checkpointing)):
        assert len(of_layer) == 2 * len(set(of_layer)) == 2 * 3 * 3


class DrawingStep(Module):
    """Draws noise before the call and after it."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.before, self.after = defaultdict(list), []

    def draw(self):
        return tuple(draw() for draw in SOURCES.values())

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.before[batch_idx, x[0, 0].item()].append(self.draw())
        output = self.net(x)
        self.after.append(self.draw())
        return nn.functional.mse_loss(output, y)


def draws_of_step(schedule, stages):
    torch.manual_seed(0)
    model = DrawingStep(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4))
    )
    Rank(model, one_rank(schedule, stages), alone()).fit(make_batches())
    return model.before, model.after


@pytest.mark.parametrize(("schedule", "stages"), CUTS)
def test_the_step_draws_the_same_on_every_stage_at_every_microbatch(schedule, stages):
    before, _ = draws_of_step(schedule, stages)
    assert len(before) == 3 * 3
    for drawn in before.values():
        assert len(drawn) == stages
        assert len(set(drawn)) == 1
    numbers = [number for drawn in before.values() for number in drawn[0]]
    assert len(set(numbers)) == len(numbers), "two micro-batches draw the same"


@pytest.mark.parametrize(("schedule", "stages"), CUTS[1:])
def test_the_steps_draws_do_not_depend_on_the_cut(schedule, stages):
    before, after = draws_of_step(schedule, stages)
    before_whole, after_whole = draws_of_step("gpipe", 1)
    assert {key: drawn[0] for key, drawn in before.items()} == {
        key: drawn[0] for key, drawn in before_whole.items()
    }
    assert after == after_whole
    assert not set(after) & {drawn[0] for drawn in before.values()}


def test_a_round_leaves_the_process_its_random_states():
    """Else ranks would shuffle differently after it, since their layers draw differently."""
    model = DrawingStep(*with_dropout().net)
    rank, data = Rank(model, one_rank("gpipe", 2), alone()), make_batches()
    states = RandomStates(0)
    before = states.get()
    rank.fit(data)
    rank.model.net(data[0][0])
    expected = [draw() for draw in SOURCES.values()]
    states.set(before)
    assert [draw() for draw in SOURCES.values()] == expected


def test_mix_tells_its_arguments_apart():
    """Also their order, their number and their sign: a batch of -1 is an evaluation."""
    near = range(-3, 12)
    hashes = {mix(a, b) for a in near for b in near} | {mix(a) for a in near}
    hashes |= {mix(a, b, 0) for a in near for b in near} | {mix()}
    assert len(hashes) == 2 * 15**2 + 15 + 1
    assert all(0 <= value < 2**64 for value in hashes)


def test_seed_and_replica_make_other_streams():
    def first_draws(*arguments):
        RandomStates(*arguments).seed_step(0, 0)
        return tuple(draw() for draw in SOURCES.values())

    with RandomStates(0).restored():
        draws = {first_draws(0), first_draws(1), first_draws(0, 1), first_draws(1, 1)}
        assert len(draws) == 4
        assert first_draws(0, 1) in draws


def test_restored_puts_all_states_back_after_an_error_too():
    states = RandomStates(0)
    before = states.get()

    def fails():
        with states.restored():
            states.seed_step(1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    drawn = [draw() for draw in SOURCES.values()]
    states.set(before)
    assert [draw() for draw in SOURCES.values()] == drawn
