"""Parameters outside the layers, and keyword arguments that reach the layers of every stage."""

import pytest
import torch
from torch import nn

from .harness import Layout, Module, Rank, assert_equal, on_ranks, one_device, pipelined

WIDTH = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, gate):
        return torch.tanh(self.linear(x)) * gate


class Shift(nn.Module):
    """Takes only one of the call's keyword arguments, and not by that name alone."""

    def forward(self, x, *, shift=0.0):
        return x + shift


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Shift(), Block(), Shift(), Block()])

    def forward(self, x, gate, shift):
        for block in self.blocks:
            x = block(x, gate=gate) if isinstance(block, Block) else block(x, shift=shift)
        return x


class Outside(Module):
    """Uses parameters of its own before the call, by keyword, and after the call."""

    def __init__(self):
        super().__init__()
        del self.net
        self.embed, self.body = nn.Linear(WIDTH, WIDTH), Body()
        self.gate = nn.Parameter(torch.rand(WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.unused = nn.Parameter(torch.rand(WIDTH))  # no gradient: must not even decay
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.double()

    def configure_pipeline(self):
        return list(self.body.blocks)

    def training_step(self, batch, batch_idx):
        x, y = batch
        # The gate's gradient comes from every stage; the shift is another for each sample.
        output = self.body(self.embed(x), gate=self.gate, shift=y * self.frozen)
        return nn.functional.mse_loss(output * self.scale * self.gate, y)


def make_model():
    torch.manual_seed(0)
    return Outside()


def make_batches():
    torch.manual_seed(1)
    return [(torch.randn(n, WIDTH).double(), torch.randn(n, WIDTH).double()) for n in (8, 5, 8)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(num_ranks=1),
        Layout(num_ranks=2),
        Layout(num_ranks=4, checkpointing="stage"),
        Layout(num_ranks=3, checkpointing="layer"),
        Layout("interleaved", num_ranks=2, stages_per_rank=2),
    ],
    ids=str,
)
def test_parameters_outside_the_layers_train_as_on_one_device(layout, accumulate):
    ours = pipelined(make_model, make_batches(), layout, accumulate)  # checks the ranks' equality
    expected = one_device(make_model, make_batches(), accumulate)
    assert_equal(ours, expected)
    before = dict(make_model().named_parameters())
    for name in ("embed.weight", "gate", "scale"):
        assert not torch.equal(expected.weights[name], before[name]), f"{name} was never trained"
    assert torch.equal(ours.weights["unused"], before["unused"])


def test_gradients_outside_the_layers_are_summed_once():
    """All ranks get the whole gradient, whichever of them have a part of it."""
    batch = make_batches()[0]
    models = [make_model() for _ in range(3)]

    def work(transport):
        rank = Rank(models[transport.rank], Layout(num_ranks=3), transport)
        rank.step(batch).deliver()
        return {name: parameter.grad for name, parameter in rank.model.named_parameters()}

    whole = make_model()
    whole.training_step(batch, 0).backward()
    for gradients in on_ranks(3, work):
        for name in ("embed.weight", "embed.bias", "gate", "scale"):
            torch.testing.assert_close(gradients[name], whole.get_parameter(name).grad)
        assert gradients["unused"] is None
        assert gradients["frozen"] is None


def test_keywords_reach_the_layers_in_a_call_outside_training():
    torch.manual_seed(2)
    x, shift = torch.randn(6, WIDTH).double(), torch.randn(6, WIDTH).double()
    gate = torch.rand(WIDTH).double()
    models = [make_model() for _ in range(3)]

    def work(transport):
        rank = Rank(models[transport.rank], Layout(num_ranks=3), transport)
        return rank.model.body(x, gate=gate, shift=shift)

    expected = make_model().body(x, gate, shift)
    for output in on_ranks(3, work):
        torch.testing.assert_close(output, expected)
