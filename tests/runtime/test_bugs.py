"""Each past bug, told by a test."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from lightning_pipe.assembly import Assembly
from lightning_pipe.runtime.executor import Measurements

from .harness import (
    Layout,
    Module,
    Rank,
    assert_equal,
    errors_on_ranks,
    on_ranks,
    one_device,
    pipelined,
    the_cause,
)


def chain(cls=Module, width=3, depth=4):
    torch.manual_seed(0)
    return cls(*[nn.Linear(width, width) for _ in range(depth)])


def batch(rows=8, width=3):
    torch.manual_seed(1)
    return torch.randn(rows, width).double(), torch.randn(rows, width).double()


def evaluate(cls, argument, **layout):
    """What the call of a model returns on every rank."""
    models = [chain(cls).eval() for _ in range(2)]

    def work(transport):
        rank = Rank(models[transport.rank], Layout(**layout), transport)
        return rank.model(argument)

    return on_ranks(2, work)


class TimeMajor(Module):
    """Its samples lie along dimension 1, so it cuts its batches by itself."""

    def forward(self, x):
        return self.net(x)

    def split_batch(self, batch, num_microbatches):
        return list(zip(*(part.chunk(num_microbatches, dim=1) for part in batch), strict=True))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)


class OverTime(nn.Module):
    def forward(self, x):
        return x.cumsum(0)


def test_a_module_that_cuts_its_batches_is_evaluated_whole():
    """Cut along dimension 0, the sums over time would start anew in each micro-batch."""
    x = torch.randn(4, 2, 3).double()

    def make():
        return [nn.Linear(3, 3), OverTime(), nn.Linear(3, 3), nn.Linear(3, 3)]

    torch.manual_seed(0)
    expected = TimeMajor(*make())(x)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(TimeMajor(*make()).eval())

    def work(transport):
        return Rank(models[transport.rank], Layout(num_microbatches=2), transport).model.net(x)

    for output in on_ranks(2, work):
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


class MaskedMean(Module):
    """Its loss is a quotient, whose gradient is not a number where nothing counts."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        counts = y[:, :1] > 0
        error = ((self.net(x) - y) ** 2).mean(1, keepdim=True)
        return {"loss": (error * counts).sum() / counts.sum(), "weight": counts.sum()}


@pytest.mark.parametrize("empty", [0, 1], ids=["first", "second"])
def test_a_microbatch_that_counts_for_nothing_spoils_no_gradient(empty):
    x, y = batch()
    y[:, 0] = y[:, 0].abs() + 0.1
    y[2 * empty : 2 * empty + 2, 0] *= -1
    ours = pipelined(lambda: chain(MaskedMean), [(x, y)], Layout(num_microbatches=4))
    assert_equal(ours, one_device(lambda: chain(MaskedMean), [(x, y)]))


class Frozen(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


def test_a_loss_without_a_gradient_is_refused_as_on_one_device():
    models, data = [chain(Frozen) for _ in range(2)], batch()
    errors = errors_on_ranks(2, lambda t: Rank(models[t.rank], Layout(), t).step(data))
    rank, error = the_cause(errors)
    assert rank == 1
    assert "does not depend on any parameter that requires a gradient" in str(error)


class Boxes(nn.Module):
    """As many outputs as it finds."""

    def forward(self, x):
        return x[x[:, 0] > 0]


def test_evaluation_outputs_may_depend_on_the_data():
    class Detector(Module):
        def __init__(self, *layers):
            super().__init__(*layers[:-1], Boxes())

    models = [chain(Detector).eval() for _ in range(2)]
    inputs = [torch.randn(6, 3).double() for _ in range(5)]
    expected = [chain(Detector).eval().net(x) for x in inputs]
    assert len({len(output) for output in expected}) > 1, "or the test shows nothing"

    def work(transport):
        rank = Rank(models[transport.rank], Layout(num_microbatches=1), transport)
        return [rank.model.net(x) for x in inputs]

    for outputs in on_ranks(2, work):
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)


class Keyword(Module):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0], mask=batch[1]).sum()


def test_keywords_that_a_sequential_does_not_take_are_refused():
    models = [chain(Keyword) for _ in range(2)]
    errors = errors_on_ranks(2, lambda t: Rank(models[t.rank], Layout(), t).step(batch()))
    assert any("keyword arguments ['mask']" in str(error) for error in errors.values())


class TwoCalls(Module):
    """Calls the model twice in a validation step."""

    def forward(self, x):
        return self.net(self.net(x))


def test_two_calls_in_a_step_need_the_output_on_all_ranks():
    models = [chain(TwoCalls).eval() for _ in range(2)]
    layout = Layout(evaluation_outputs="last")

    def work(transport):
        rank = Rank(models[transport.rank], layout, transport)
        with rank.pipeline.evaluating("validation", "val_dataloader", 0):
            rank.model(batch()[0])

    rank, error = the_cause(errors_on_ranks(2, work))
    assert rank == 1
    assert isinstance(error, MisconfigurationException)
    assert "Use evaluation_outputs='all'" in str(error)


class Position(nn.Module):
    """Autograd may let its parameter's gradient share the memory of the input's."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x + self.offset.unsqueeze(0)


def test_a_gradient_on_its_way_is_not_added_to():
    """The next micro-batch adds to the parameter's gradient before the other was used.

    Here both stages are on one rank, which finishes the second before it turns to the first.
    """

    def make():
        torch.manual_seed(0)
        return Module(nn.Linear(3, 3), nn.Linear(3, 3), Position(), nn.Linear(3, 3))

    batches = [batch(rows=4)]
    layout = Layout("gpipe", num_ranks=1, stages_per_rank=2, num_microbatches=4)
    assert_equal(pipelined(make, batches, layout), one_device(make, batches))


def test_the_bubble_counts_the_time_when_only_others_work():
    """The last rank is done while the first is still cooling down."""
    assembly = Assembly(chain(), Layout(num_microbatches=2).settings, 0, 2)
    measured = [
        Measurements(wall=wall, busy=6.0, updates={rank: 1}, weights={rank: (1, 0)})
        for rank, wall in enumerate((9.0, 7.0))
    ]
    assert assembly.report(measured, 8).measured_bubble == pytest.approx((1 / 3, 1 / 3))
