"""What may travel between stages, and what is refused.

Each case is a pair of layers, cut between them; the weights must be those of one device.
"""

from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils import _pytree as pytree

from .harness import (
    Layout,
    Module,
    Rank,
    assert_equal,
    errors_on_ranks,
    one_device,
    pipelined,
    the_cause,
)

WIDTH = 3


class Pair(NamedTuple):
    left: Any
    right: Any


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y


pytree.register_pytree_node(
    Point,
    lambda point: ([point.x, point.y], None),
    lambda children, _: Point(*children),
    serialized_type_name="runtime.test_activations.Point",
)


class Layer(nn.Module):
    """Two linear layers and a parameter, for a function to use."""

    def __init__(self, function):
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.function = function

    def forward(self, value):
        return self.function(self, value)


def make_model(*functions):
    torch.manual_seed(0)
    return Module(*map(Layer, functions))


def batches(sizes=(8, 5, 8), shape=(WIDTH,)):
    torch.manual_seed(1)
    return [(torch.randn(n, *shape).double(), torch.randn(n, *shape).double()) for n in sizes]


CASES = {
    "tensor": (lambda m, x: m.f(x), lambda m, h: m.g(h)),
    "tuple": (lambda m, x: (m.f(x), m.g(x)), lambda m, h: m.f(h[0]) * m.g(h[1])),
    "list": (lambda m, x: [m.f(x), m.g(x)], lambda m, h: m.f(h[0]) * m.g(h[1])),
    "dict": (lambda m, x: {"b": m.f(x), "a": m.g(x)}, lambda m, h: m.f(h["b"]) - h["a"]),
    "nested": (
        lambda m, x: ({"h": [m.f(x), (m.g(x),)]}, x),
        lambda m, h: m.f(h[0]["h"][0]) + h[0]["h"][1][0] * h[1],
    ),
    "named tuple": (lambda m, x: Pair(m.f(x), m.g(x)), lambda m, h: m.f(h.left) - h.right),
    "registered class": (lambda m, x: Point(m.f(x), m.g(x)), lambda m, h: m.f(h.x) - h.y),
    "None": (lambda m, x: (None, m.f(x), None), lambda m, h: m.f(h[1])),
    "numbers": (
        lambda m, x: (m.f(x), 2, 0.5, True, 1 + 2j, torch.float64),
        lambda m, h: m.f(h[0]).to(h[5]) * h[1] * h[2] + abs(h[4]) * h[3],
    ),
    "strings": (
        lambda m, x: {"h": m.f(x), "name": "tanh"},
        lambda m, h: m.f(getattr(torch, h["name"])(h["h"])),
    ),
    "bool and integer tensors": (
        lambda m, x: (x > 0, m.f(x), x.long(), x.to(torch.uint8)),
        lambda m, h: m.f(h[1] * h[0] + h[2] + h[3]),
    ),
    "a float tensor without gradient first": (
        lambda m, x: (2 * x, m.f(x)),
        lambda m, h: m.f(h[0]) * h[1],
    ),
    "no gradient at all": (lambda m, x: 2 * x, lambda m, h: m.f(h)),
    "one output is not used": (
        # m.g has no gradient then, and AdamW's weight decay leaves it alone.
        lambda m, x: (m.g(x), m.f(x)),
        lambda m, h: m.f(h[1]),
    ),
    "no output is used": (lambda m, x: m.f(x), lambda m, h: m.f(m.scale * torch.ones_like(h))),
    "one tensor twice": (lambda m, x: (m.f(x),) * 2, lambda m, h: m.f(h[0]) * m.g(h[1])),
    "a parameter": (lambda m, x: (m.f(x), m.scale), lambda m, h: m.f(h[0]) * h[1]),
    "a scalar": (lambda m, x: (m.f(x), m.scale.sum()), lambda m, h: m.f(h[0]) * h[1]),
    "no elements": (lambda m, x: (m.f(x), m.g(x)[:, :0]), lambda m, h: m.f(h[0]) + h[1].sum()),
    "not contiguous": (lambda m, x: m.f(x).t(), lambda m, h: m.f(h.t())),
    "expanded": (
        lambda m, x: (m.f(x), m.scale.expand_as(x)),
        lambda m, h: m.f(h[0]) * h[1],
    ),
    "float16": (lambda m, x: m.f(x).half(), lambda m, h: m.f(h.double())),
    "bfloat16": (lambda m, x: m.f(x).bfloat16(), lambda m, h: m.f(h.double())),
    "complex": (lambda m, x: torch.complex(m.f(x), m.g(x)), lambda m, h: m.f(h.real * h.imag)),
}

LAYOUTS = {
    "two ranks": Layout(),
    "one rank": Layout("gpipe", num_ranks=1, stages_per_rank=2),
    "recomputed stages": Layout(checkpointing="stage"),
    "recomputed layers": Layout(checkpointing="layer"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("functions", CASES.values(), ids=CASES)
def test_activations_travel(functions, layout):
    data = batches()
    ours = pipelined(lambda: make_model(*functions), data, layout)
    assert_equal(ours, one_device(lambda: make_model(*functions), data))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "functions",
    [
        (
            lambda m, x: (m.f(x), float(x.sum()), int(x[0, 0] > 0), bool(x[0, 1] > 0)),
            lambda m, h: m.f(h[0]) * h[1] + h[2] * (1 if h[3] else 2),
        ),
        (
            lambda m, x: {"h": m.f(x), "name": "tanh" if x[0, 0] > 0 else "sigmoid"},
            lambda m, h: m.f(getattr(torch, h["name"])(h["h"])),
        ),
        (lambda m, x: (m.f(x), m.g(x).mean()), lambda m, h: m.f(h[0]) * h[1]),
    ],
    ids=["numbers", "strings", "a scalar"],
)
def test_each_microbatch_has_its_own_constants(functions, layout):
    """One device would do the same with micro-batches for batches, accumulating over them."""
    data = batches(sizes=(8, 8, 8))
    pieces = [piece for x, y in data for piece in zip(x.split(2), y.split(2), strict=True)]
    expected = one_device(lambda: make_model(*functions), pieces, accumulate=4)
    expected.losses = [sum(expected.losses[i : i + 4]) / 4 for i in range(0, len(pieces), 4)]
    assert_equal(pipelined(lambda: make_model(*functions), data, layout), expected)


def test_what_a_middle_stage_passes_on_keeps_its_gradient():
    def functions():
        yield lambda m, x: (m.f(x), m.g(x), x > 0)
        yield lambda m, h: (m.f(h[0]), h[1], h[2])
        yield lambda m, h: (m.f(h[0]), h[1], None)
        yield lambda m, h: m.f(h[0]) * h[1]

    data = batches()
    ours = pipelined(lambda: make_model(*functions()), data, Layout(num_ranks=4))
    assert_equal(ours, one_device(lambda: make_model(*functions()), data))


@pytest.mark.parametrize(
    "in_place",
    [
        lambda m, h: torch.relu_(h),
        lambda m, h: m.f(h.add_(1)),
        lambda m, h: h.mul_(m.scale),
    ],
    ids=["activation function", "before a layer", "times a parameter"],
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_stage_may_begin_in_place(layout, in_place):
    functions = (lambda m, x: m.f(x), in_place)
    data = batches()
    ours = pipelined(lambda: make_model(*functions), data, layout)
    assert_equal(ours, one_device(lambda: make_model(*functions), data))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_stage_may_change_one_of_several_tensors_in_place(layout):
    functions = (
        lambda m, x: (m.f(x), m.g(x), x.clone()),
        lambda m, h: m.f(h[0].add_(1)) * h[1] + h[2].add_(1),
    )
    data = batches()
    ours = pipelined(lambda: make_model(*functions), data, layout)
    assert_equal(ours, one_device(lambda: make_model(*functions), data))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shapes_may_change_and_come_back(layout):
    functions = CASES["tuple"]
    lengths = (4, 6, 4, 2, 6)
    data = [
        batches(sizes=(size,), shape=(t, WIDTH))[0]
        for t, size in zip(lengths, (8, 8, 5, 3, 8), strict=True)
    ]
    ours = pipelined(lambda: make_model(*functions), data, layout)
    assert_equal(ours, one_device(lambda: make_model(*functions), data))


class ThawsLater(Module):
    """Freezes some layers for some batches, as a finetuning callback does."""

    def on_train_batch_start(self, batch, batch_idx):
        for layer, first_batch in zip(self.net, (1, 2, 0), strict=True):
            layer.requires_grad_(batch_idx >= first_batch)


@pytest.mark.parametrize("layout", [Layout(num_ranks=3), Layout(checkpointing="stage")], ids=str)
def test_layers_may_be_frozen_for_a_while(layout):
    """Whether an activation needs a gradient changes, though its shape does not."""

    def make():
        torch.manual_seed(0)
        return ThawsLater(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    data = batches(sizes=(8, 8, 8, 8))
    assert_equal(pipelined(make, data, layout), one_device(make, data))


def failure(*functions):
    """The error of the rank that fails in the first batch, and which rank it is."""
    models = [make_model(*functions) for _ in range(2)]
    batch = batches()[0]

    def work(transport):
        Rank(models[transport.rank], Layout(), transport).step(batch)

    return the_cause(errors_on_ranks(2, work))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (lambda m, x: (m.f(x), object()), "an object of type builtins.object"),
        (lambda m, x: (m.f(x), {1, 2}), "an object of type builtins.set"),
        (lambda m, x: (m.f(x), nn.ReLU()), "torch.nn.modules.activation.ReLU"),
        (lambda m, x: m.f(x).to_sparse(), "layout torch.sparse_coo"),
        (lambda m, x: (m.f(x), x.to("meta")), "on the meta device"),
    ],
    ids=["object", "set", "module", "sparse", "meta"],
)
def test_what_cannot_be_sent_is_named(sent, message):
    rank, error = failure(sent, lambda m, h: m.f(h[0]))
    assert rank == 0
    assert isinstance(error, MisconfigurationException)
    assert message in str(error)
    assert "cut the model at another layer" in str(error)


@pytest.mark.parametrize(
    ("sent", "was", "now"),
    [
        (lambda m, x: m.f(x[: 2 - m.calls]), "[2, 3]", "[1, 3]"),
        (lambda m, x: m.f(x).float() if m.calls else m.f(x), "torch.float64", "torch.float32"),
        (lambda m, x: [m.f(x)] if m.calls else (m.f(x),), "torch.float64", "torch.float64"),
        (lambda m, x: m.f(x).detach() if m.calls else m.f(x), "with gradient", "torch.float64"),
        (lambda m, x: (m.f(x), None if m.calls else x), "gradient, torch.float64", ", None"),
    ],
    ids=["rows", "dtype", "structure", "gradient", "missing"],
)
def test_outputs_that_depend_on_data_are_refused(sent, was, now):
    """The receiver has posted buffers of the promised shape: it would get rubbish, or crash."""

    def counted(layer, x):
        layer.calls = getattr(layer, "calls", -1) + 1
        return sent(layer, x)

    rank, error = failure(counted, lambda m, h: m.f(h if isinstance(h, torch.Tensor) else h[0]))
    assert rank == 0
    assert isinstance(error, MisconfigurationException)
    assert "may depend only on the shapes" in str(error)
    given, promised = str(error).split("but was")
    assert now in given
    assert was in promised


def test_a_layer_inside_a_stage_may_work_in_place():
    functions = (CASES["tensor"][0], lambda m, h: torch.relu_(h), *CASES["tensor"])
    data = batches()
    expected = one_device(lambda: make_model(*functions), data)
    for layout in LAYOUTS.values():
        assert_equal(pipelined(lambda: make_model(*functions), data, layout), expected)


def test_a_gradient_that_is_missing_for_the_first_microbatch_only_is_refused():
    """A limit: the first gradient of a shape promises which outputs have one."""
    models = [
        make_model(
            lambda m, x: (m.f(x), m.g(x), x[0, 0] >= 0),
            lambda m, h: m.f(h[0]) * (h[1] if h[2] else 1),
        )
        for _ in range(2)
    ]
    ((x, y),) = batches(sizes=(4,))
    x[:, 0] = torch.tensor([-1.0, 1.0, 1.0, 1.0])

    def work(transport):
        Rank(models[transport.rank], Layout(), transport).step((x, y))

    rank, error = the_cause(errors_on_ranks(2, work))
    assert rank == 1
    assert isinstance(error, MisconfigurationException)
    assert "was torch.float64[1, 3], None for an earlier micro-batch of the same shapes" in str(
        error
    )


def test_an_output_that_only_some_microbatches_use():
    """Its gradient is missing for the others, which counts as zero, as on one device."""
    functions = (
        lambda m, x: (m.f(x), m.g(x), x[0, 0] >= 0),
        lambda m, h: m.f(h[0]) * (h[1] if h[2] else 1),
    )
    data = batches(sizes=(4,))
    # One sample per micro-batch, and the first one uses both outputs.
    data[0][0][:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    ours = pipelined(lambda: make_model(*functions), data, Layout())

    def on_one_device(m, h):
        return m.f(h[0]) * torch.where(h[3][:, :1] >= 0, h[1], torch.ones_like(h[1]))

    whole = (lambda m, x: (m.f(x), m.g(x), None, x), on_one_device)
    assert_equal(ours, one_device(lambda: make_model(*whole), data))
