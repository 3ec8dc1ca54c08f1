"""An asynchronous pipeline computes what the replay of its versions on one device computes.

Over policies, stages, micro-batches, batch sizes, drains, checkpointing, layers and optimizers, in
float64.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import oracle
from .harness import Layout, Module, difference, pipelined

WIDTH = 3
# Layers per stage, by number of stages.
SIZES = {1: (6,), 2: (3, 3), 3: (2, 3, 1), 4: (2, 1, 2, 1)}
# The pipeline drains after its first batch, which may not even fill it, after the tenth, which has
# fewer samples than there are micro-batches, and at the end.
BATCH_SIZES, DRAINS = (8, 8, 7, 8, 8, 8, 8, 8, 8, 3, 8, 2), (0, 9)
NUM_MICROBATCHES = {"2bw": (4, 6)}
POLICIES = ("stashing", "vertical_sync", "no_stashing", "2bw")
CHECKPOINTING = ("none", "stage", "layer")


class Momentum(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def make_batches(sizes, shape=(WIDTH,)):
    torch.manual_seed(1)
    return [(torch.randn(n, *shape).double(), torch.randn(n, *shape).double()) for n in sizes]


def linear():
    return nn.Linear(WIDTH, WIDTH)


def block():
    return nn.Sequential(linear(), nn.Tanh())


def perceptron():
    return nn.Sequential(linear(), nn.Tanh(), linear())


def mlp(kind):
    torch.manual_seed(0)
    return kind(*(block() for _ in range(5)), linear())


def wrong(make_model, batches, sizes, policy, count, drains=(), lr_of=None, checkpointing="none"):
    """Where the pipeline differs from the oracle; empty if nowhere."""
    layout = Layout(
        "pipedream_2bw" if policy == "2bw" else "pipedream",
        num_ranks=len(sizes),
        num_microbatches=count,
        checkpointing=checkpointing,
        partition=list(sizes),
        weight_stashing=policy != "no_stashing",
        vertical_sync=policy == "vertical_sync",
    )
    ours = pipelined(make_model, batches, layout, drains=drains, lr_of=lr_of)
    expected = oracle.train(make_model, batches, sizes, policy, count, drains, lr_of, checkpointing)
    found = difference(ours, expected)
    return "" if found is None else f"{policy}, {count}, {sizes}, {checkpointing}: {found}\n"


@pytest.mark.parametrize("num_stages", SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_and_losses(policy, num_stages):
    differences = [
        wrong(
            partial(mlp, kind),
            make_batches(BATCH_SIZES),
            SIZES[num_stages],
            policy,
            count,
            DRAINS,
            checkpointing=checkpointing,
        )
        for count in NUM_MICROBATCHES.get(policy, (1, 4))
        for kind, checkpointing in [(Momentum, "none"), *((Module, c) for c in CHECKPOINTING)]
    ]
    assert not any(differences), "".join(differences)


@pytest.mark.parametrize("sizes", [(8, 8, 8, 3, 8, 8), (8, 8, 8, 2, 8, 8), (2, 8, 8, 8)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_short_batches(policy, sizes):
    """A batch that gives fewer micro-batches than others drains the pipeline."""
    differences = wrong(partial(mlp, Module), make_batches(sizes), SIZES[3], policy, 4)
    assert not differences, differences


@pytest.mark.parametrize("policy", POLICIES)
def test_an_update_has_the_learning_rate_of_its_own_batch(policy):
    """Also where a later batch makes it, or the drain."""
    rates = [0.05, 0.01, 0.03, 0.02, 0.06]
    batches = make_batches((8, 8, 8, 8, 3))
    differences = [
        wrong(partial(mlp, Momentum), batches, SIZES[4], policy, count, drains, rates.__getitem__)
        for count in NUM_MICROBATCHES.get(policy, (1, 4))
        for drains in [(), (1,)]
    ]
    assert not any(differences), "".join(differences)


class Recomputed(nn.Module):
    """Calls torch's checkpoint by itself."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = perceptron()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def conv1d():
    return nn.Conv1d(WIDTH, WIDTH, 3, padding=1)


def conv2d():
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1)


def tied(stage):
    first, second = linear(), linear()
    second.weight = first.weight
    return first, nn.Tanh(), second


def frozen_weight(stage):
    layer = linear()
    layer.weight.requires_grad_(False)
    return layer, nn.Tanh(), linear()


# Each makes the layers of a stage. A backward of single operations reads their inputs and weights,
# so it is known what it computes without stashing; of what composed ones save it is not.
SINGLE_OPERATIONS = {
    "LayerNorm": lambda stage: (linear(), nn.LayerNorm(WIDTH), nn.Tanh()),
    "Conv1d": lambda stage: (conv1d(), nn.Tanh(), conv1d()),
    "Conv2d": lambda stage: (conv2d(), nn.Tanh(), conv2d()),
    "checkpoint": lambda stage: (linear(), Recomputed(use_reentrant=False)),
    "reentrant checkpoint": lambda stage: (linear(), Recomputed(use_reentrant=True)),
    "tied": tied,
    "frozen weight": frozen_weight,
    "frozen stage": lambda stage: (perceptron().requires_grad_(stage > 0),),
    "stage without parameters": lambda stage: (nn.Tanh() if stage == 1 else perceptron(),),
}
COMPOSED = {
    "MultiheadAttention": lambda stage: (Attention(), nn.Tanh()),
    "LSTM": lambda stage: (Recurrent(), linear()),
    "weight_norm": lambda stage: (nn.utils.parametrizations.weight_norm(linear()), nn.Tanh()),
}
SHAPES = {
    "Conv1d": (WIDTH, 4),
    "Conv2d": (WIDTH, 4, 4),
    "MultiheadAttention": (4, WIDTH),
    "LSTM": (4, WIDTH),
}
STASHING = [
    ("stashing", "none"),
    ("stashing", "stage"),
    ("vertical_sync", "layer"),
    ("2bw", "none"),
]
NO_STASHING = [("no_stashing", checkpointing) for checkpointing in CHECKPOINTING]


def wrong_layers(layers_of, modes, batches):
    """Where the pipeline of three such stages differs from the oracle."""

    def make_model():
        torch.manual_seed(0)
        return Module(*itertools.chain(*map(layers_of, range(3))))

    sizes = [len(layers_of(stage)) for stage in range(3)]
    differences = [
        wrong(
            make_model,
            batches,
            sizes,
            policy,
            4 if policy == "2bw" else 2,
            drains=(2,),
            checkpointing=checkpointing,
        )
        for policy, checkpointing in modes
    ]
    return "".join(differences)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", [*SINGLE_OPERATIONS, *COMPOSED])
def test_layers(name):
    modes = STASHING + (NO_STASHING if name in SINGLE_OPERATIONS else NO_STASHING[1:])
    layers_of = (SINGLE_OPERATIONS | COMPOSED)[name]
    batches = make_batches((4, 5, 4, 4, 4, 4, 4), SHAPES.get(name, (WIDTH,)))
    differences = wrong_layers(layers_of, modes, batches)
    assert not differences, differences


def test_batch_norm():
    """Its running statistics are those of the forwards, one after the other."""
    modes = [(policy, "none") for policy in ("stashing", "vertical_sync", "2bw")]
    batches = make_batches((8, 9, 8, 8, 8, 8, 8))
    differences = wrong_layers(lambda stage: (linear(), nn.BatchNorm1d(WIDTH)), modes, batches)
    assert not differences, differences
