"""The oracle itself: against numbers and gradients written out by hand."""

import itertools

import pytest
import torch
from torch import nn

from .harness import Module, assert_equal, difference
from .oracle import train

PIPEDREAM = ("stashing", "vertical_sync", "no_stashing")
CHECKPOINTING = ("none", "layer", "stage")


class Descent(Module):
    """Plain SGD with a learning rate of 1/8."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125)


def three_factors():
    model = Descent(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    for layer in model.net:
        nn.init.ones_(layer.weight)
    return model


ONE = (torch.ones(1, 1).double(), torch.zeros(1, 1).double())
TWO = (torch.ones(2, 1).double(), torch.zeros(2, 1).double())


# The output is a*b*c, its target 0: every gradient is 2abc times the two other factors. Stage 0 has
# a and b. The first update makes all three 1 - 2/8 = 3/4.
@pytest.mark.parametrize(
    ("policy", "checkpointing", "second_loss", "weights"),
    [
        # c is 3/4, a and b still 1: the loss is 9/16, the gradients are 3/2 * (3/4, 3/4, 1).
        ("stashing", "none", 9 / 16, (0.609375, 0.609375, 0.5625)),
        # All are 1 still, as in the first micro-batch.
        ("vertical_sync", "none", 1, (0.5, 0.5, 0.5)),
        # The same loss as with stashing, but a's gradient comes through the new b.
        ("no_stashing", "none", 9 / 16, (0.64453125, 0.609375, 0.5625)),
        ("no_stashing", "layer", 9 / 16, (0.64453125, 0.609375, 0.5625)),
        # Recomputed, b's input is 3/4 as well.
        ("no_stashing", "stage", 9 / 16, (0.64453125, 0.64453125, 0.5625)),
    ],
)
def test_two_micro_batches_by_hand(policy, checkpointing, second_loss, weights):
    ours = train(three_factors, [ONE, ONE], (2, 1), policy, 1, checkpointing=checkpointing)
    assert ours.losses == [1, second_loss]
    assert tuple(weight.item() for weight in ours.weights.values()) == weights


def test_2bw_by_hand():
    ours = train(three_factors, [TWO] * 3, (2, 1), "2bw", 2)
    assert ours.losses == [1, 1, (27 / 64) ** 2]
    expected = 1 / 2 - (2 * 27 / 64 * 9 / 16) / 8
    assert [weight.item() for weight in ours.weights.values()] == [expected] * 3


@pytest.mark.parametrize(
    ("policy", "batch", "count"), [*((p, ONE, 1) for p in PIPEDREAM), ("2bw", TWO, 2)]
)
def test_after_a_drain_the_newest_weights_are_read(policy, batch, count):
    ours = train(three_factors, [batch] * 2, (2, 1), policy, count, drains={0})
    assert ours.losses == [1, (27 / 64) ** 2]
    expected = 3 / 4 - (2 * 27 / 64 * 9 / 16) / 8
    assert [weight.item() for weight in ours.weights.values()] == [expected] * 3


def test_2bw_drains_after_a_batch_with_too_few_micro_batches():
    """The short batch still reads the version before; the one after it the newest."""
    whole = train(three_factors, [TWO, TWO, ONE, TWO], (2, 1), "2bw", 2)
    assert_equal(whole, train(three_factors, [TWO, TWO, ONE, TWO], (2, 1), "2bw", 2, drains={2}))
    for drains in ({0}, {1}):
        other = train(three_factors, [TWO, TWO, ONE, TWO], (2, 1), "2bw", 2, drains=drains)
        assert difference(whole, other)


def mlp():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]
    return Descent(*blocks, nn.Linear(3, 3))


def make_batches(sizes=(6, 7, 5, 2, 6)):
    torch.manual_seed(1)
    return [(torch.randn(n, 3).double(), torch.randn(n, 3).double()) for n in sizes]


def gradients(weights, x, y):
    model = mlp()
    model.load_state_dict(weights)
    nn.functional.mse_loss(model.net(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def descend(weights, gradients, lr=0.125):
    return {name: weight - lr * gradients[name] for name, weight in weights.items()}


def assert_close(ours, expected):
    torch.testing.assert_close([*ours.weights.values()], [*expected], rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", PIPEDREAM)
def test_pipedream_on_one_stage_is_sgd_over_micro_batches(policy):
    expected = mlp().state_dict()
    for x, y in make_batches():
        count = min(3, len(x))
        for xs, ys in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            expected = descend(expected, gradients(expected, xs, ys))
    ours = train(mlp, make_batches(), (5,), policy, 3)
    assert_close(ours, expected.values())


def test_2bw_on_one_stage_is_sgd_one_update_late():
    versions = [mlp().state_dict()]
    for n, (x, y) in enumerate(make_batches()):
        versions.append(descend(versions[n], gradients(versions[max(0, n - 1)], x, y)))
    ours = train(mlp, make_batches(), (5,), "2bw", 2)
    assert_close(ours, versions[-1].values())


def test_no_stashing_by_hand_written_gradients():
    """Of Linear and Tanh; each stage's backward reads the weights that are there then."""
    stage_of, last = (0, 0, 1, 2, 2), 2
    start = mlp().net
    versions = [[(layer.weight, layer.bias) for layer in (*(b[0] for b in start[:4]), start[4])]]
    for i, (x, y) in enumerate(make_batches()):
        inputs = [x]
        for layer, stage in enumerate(stage_of):
            weight, bias = versions[max(0, i - (last - stage))][layer]
            z = inputs[layer] @ weight.T + bias
            inputs.append(z if layer == 4 else z.tanh())
        g = 2 * (inputs[5] - y) / y.numel()
        updated = []
        for layer in reversed(range(5)):
            if layer != 4:
                g = g * (1 - inputs[layer + 1] ** 2)
            weight, bias = versions[i][layer]
            updated.append((weight - 0.125 * g.T @ inputs[layer], bias - 0.125 * g.sum(0)))
            g = g @ weight
        versions.append(updated[::-1])
    ours = train(mlp, make_batches(), (2, 1, 2), "no_stashing", 1)
    assert_close(ours, [tensor for layer in versions[-1] for tensor in layer])


def test_policies_can_be_told_apart():
    runs = {
        (policy, checkpointing, drains): train(
            mlp, make_batches(), (2, 2, 1), policy, 3, drains, checkpointing=checkpointing
        )
        for policy, checkpointing in [
            ("stashing", "none"),
            ("vertical_sync", "none"),
            ("2bw", "none"),
            *(("no_stashing", checkpointing) for checkpointing in CHECKPOINTING),
        ]
        for drains in [(), (1,)]
    }
    for a, b in itertools.combinations(runs, 2):
        assert difference(runs[a], runs[b]), f"{a} and {b} are alike"
