"""Calls of the pipelined module outside the training step."""

import threading
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from .harness import (
    Layout,
    Module,
    Rank,
    Trained,
    assert_equal,
    errors_on_ranks,
    on_ranks,
    one_device,
)

WIDTH = 3


class Output(NamedTuple):
    logits: Any
    details: Any


class Last(nn.Module):
    """Returns more than one tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return Output(self.linear(x), {"hidden": x, "mean": x.mean(), "version": 3, "none": None})


def make_model(last=Last):
    torch.manual_seed(0)
    return Module(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), last())


def make_input(samples, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, WIDTH, generator=generator).double()


def on_pipelines(layout, work, last=Last):
    """Run `work(rank)` on all ranks of a pipeline."""
    models = [make_model(last) for _ in range(layout.num_ranks)]
    return on_ranks(layout.num_ranks, lambda t: work(Rank(models[t.rank], layout, t)))


LAYOUTS = [
    Layout(num_ranks=1),
    Layout(num_ranks=4),
    Layout(num_ranks=2, checkpointing="stage"),
    Layout("interleaved", num_ranks=2, stages_per_rank=2),
    Layout("gpipe", num_ranks=2, num_microbatches=3, stages_per_rank=2),
    Layout("naive", num_ranks=3, num_microbatches=1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_whole_output_is_on_every_rank(layout):
    """Also of a batch that does not divide, and of one with fewer samples than micro-batches."""
    sizes = (8, 5, 1, 8)
    whole = make_model()
    for outputs in on_pipelines(layout, lambda r: [r.model.net(make_input(n)) for n in sizes]):
        for samples, output in zip(sizes, outputs, strict=True):
            expected = whole.net(make_input(samples))
            assert isinstance(output, Output)
            torch.testing.assert_close(output.logits, expected.logits)
            torch.testing.assert_close(output.details["hidden"], expected.details["hidden"])
            torch.testing.assert_close(output.details["mean"], expected.details["mean"])
            assert output.details["version"] == 3
            assert output.details["none"] is None
            assert not output.logits.requires_grad


def test_calls_before_between_and_after_training_change_nothing():
    batches = [(make_input(n, seed), make_input(n, seed + 9)) for seed, n in enumerate((8, 5, 8))]

    def make():
        return make_model(lambda: nn.Linear(WIDTH, WIDTH))

    def work(rank):
        losses = []
        for batch in batches:
            rank.model.eval()
            rank.model.net(batch[1])
            rank.model.train()
            losses += rank.fit([batch])
        rank.model.net(batches[0][0])
        return Trained(rank.weights(), losses)

    first, second = on_pipelines(Layout(), work, lambda: nn.Linear(WIDTH, WIDTH))
    ours = Trained({**first.weights, **second.weights}, first.losses)
    assert_equal(ours, one_device(make, batches))


def evaluate(rank, samples=8):
    """A validation step: what it returned, or that it was left at the call."""
    with rank.pipeline.evaluating("validation", "val_dataloader", 0):
        return rank.model.net(make_input(samples)).logits
    return "left the step"


def test_a_step_may_call_several_times():
    def work(rank):
        with rank.pipeline.evaluating("validation", "val_dataloader", 0):
            return rank.model.net(make_input(8)).logits - rank.model.net(make_input(8)).logits

    for output in on_pipelines(Layout(), work):
        assert not output.any()


def test_last_leaves_the_step_on_all_ranks_but_the_last():
    first, second, last = on_pipelines(Layout(num_ranks=3, evaluation_outputs="last"), evaluate)
    assert first == second == "left the step"
    torch.testing.assert_close(last, make_model().net(make_input(8)).logits)


def test_a_call_outside_the_steps_has_its_output_everywhere():
    layout = Layout(evaluation_outputs="last")
    first, last = on_pipelines(layout, lambda rank: rank.model.net(make_input(8)).logits)
    assert torch.equal(first, last)


def test_batches_overlap_where_only_the_last_rank_has_outputs():
    """Stage 0 does not wait for what comes after it."""
    first_is_done = threading.Event()

    def work(rank):
        if rank.index == 1:
            assert first_is_done.wait(10), "rank 0 waited for rank 1"
        for _ in range(3):
            evaluate(rank)
        first_is_done.set()

    on_pipelines(Layout(evaluation_outputs="last"), work)


def test_an_output_that_cannot_be_put_together_is_refused():
    class Reduces(nn.Module):
        def forward(self, x):
            return x.sum(0)

    models = [make_model(Reduces) for _ in range(2)]
    errors = errors_on_ranks(
        2, lambda t: Rank(models[t.rank], Layout(), t).model.net(make_input(8))
    )
    assert isinstance(errors[1], MisconfigurationException)
    assert "Return one row per sample" in str(errors[1])
