"""A step that returns its own weight: micro-batches of different numbers of tokens."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

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

WIDTH, LENGTH, CLASSES, PADDING = 3, 6, 5, -100


class Tagger(Module):
    """Classifies each token; padding counts for nothing."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=PADDING)
        return {"loss": loss, "weight": (y != PADDING).sum()}


def make_model(cls=Tagger):
    torch.manual_seed(0)
    return cls(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def make_batch(tokens):
    """A batch with `tokens[i]` tokens in sample i."""
    x = torch.randn(len(tokens), LENGTH, WIDTH).double()
    y = torch.randint(CLASSES, (len(tokens), LENGTH))
    for row, count in zip(y, tokens, strict=True):
        row[count:] = PADDING
    return x, y


def make_batches():
    torch.manual_seed(1)
    return [make_batch(tokens) for tokens in ((6, 1, 2, 6, 1), (1, 1, 6, 3), (2, 6, 6, 5, 1, 1))]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(num_ranks=1),
        Layout(num_ranks=3),
        Layout("gpipe", num_ranks=3, num_microbatches=3, checkpointing="stage"),
    ],
    ids=str,
)
def test_every_token_counts_the_same(layout, accumulate):
    data = make_batches()
    ours = pipelined(make_model, data, layout, accumulate)
    assert_equal(ours, one_device(make_model, data, accumulate))


def test_without_a_weight_the_token_mean_would_be_another():
    """Otherwise the test above would show nothing."""

    class Unweighted(Tagger):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"]

    data = make_batches()
    ours = pipelined(lambda: make_model(Unweighted), data, Layout())
    assert abs(ours.losses[0] - one_device(make_model, data).losses[0]) > 1e-3


def test_a_microbatch_without_tokens_counts_for_nothing():
    """Its mean is not a number, as a mean over nothing is."""
    torch.manual_seed(1)
    data = [make_batch((0, 0, 3, 5)), make_batch((2, 0, 0, 1))]
    ours = pipelined(make_model, data, Layout(num_microbatches=2))
    assert_equal(ours, one_device(make_model, data))


def test_the_weight_of_the_batch_reaches_all_ranks():
    models, batch = [make_model() for _ in range(2)], make_batches()[0]

    def work(transport):
        return Rank(models[transport.rank], Layout(), transport).step(batch)

    for result in on_ranks(2, work):
        assert result.finished[0].own_weight
        assert result.weight == 16


@pytest.mark.parametrize("weight_of", [0, 3], ids=["first only", "last only"])
def test_a_weight_for_some_microbatches_is_refused(weight_of):
    class Sometimes(Tagger):
        def training_step(self, batch, batch_idx):
            result = super().training_step(batch, batch_idx)
            return result if batch[0][0, 0, 0] == weight_of else result["loss"]

    x, y = make_batch((6,) * 4)
    x[:, 0, 0] = torch.arange(4)
    models = [make_model(Sometimes) for _ in range(2)]

    def work(transport):
        Rank(models[transport.rank], Layout(), transport).step((x, y))

    rank, error = the_cause(errors_on_ranks(2, work))
    assert rank == 1
    assert isinstance(error, MisconfigurationException)
    assert "Return {'loss': ..., 'weight': ...} always, or never" in str(error)
