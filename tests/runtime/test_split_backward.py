"""Backwards in two parts: each part computes its own gradients and no others."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_pipe.runtime.payload import Entrance
from lightning_pipe.runtime.split_backward import SplitBackward

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


class Kernels(TorchDispatchMode):
    """Counts the kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def split(layers: nn.Module, x: Tensor) -> tuple[SplitBackward, Entrance, Tensor]:
    """A stage's backward in two parts, where it enters, and the gradient that it starts with."""
    entrance = Entrance([x])
    (entered,) = entrance.enter()
    output = layers(entered)
    gradient = torch.randn_like(output)
    return SplitBackward([(get_gradient_edge(output), gradient)], entrance), entrance, gradient


def whole(layers: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of input and weights in one go."""
    x = x.clone().requires_grad_()
    used = [p for p in layers.parameters() if p.requires_grad]
    output = layers(x.clone())  # no leaf, so that a layer may change it in place
    first, *others = torch.autograd.grad(output, [x, *used], gradient, allow_unused=True)
    return first, others


class Twice(nn.Module):
    """One linear layer, called twice, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(torch.tanh(self.linear(x)))
        return y


class Branches(nn.Module):
    """A weight made of two parameters, an unused layer, and one that is used beside the path."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.unused = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.normed(x)) * torch.sigmoid(self.bias * 2) + self.bias.exp()
        return y


class HookedActivation(nn.Module):
    """A hook changes the gradient of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y.register_hook(lambda gradient: gradient * 3)
        return y.tanh()


class InPlace(nn.Module):
    """Changes in place what enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mul_(2.0).relu_())
        return y


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear, self.use_reentrant = nn.Linear(4, 4), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.linear, x, use_reentrant=self.use_reentrant)
        return y.tanh()


MODULES = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten()),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "gru": lambda: _First(nn.GRU(4, 4)),
    "one layer twice": Twice,
    "branches": Branches,
    "hooked activation": HookedActivation,
    "in place": InPlace,
    "no parameters": nn.Tanh,
    "a checkpoint of its own": lambda: Checkpointed(use_reentrant=False),
}


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y


@pytest.mark.parametrize("name", MODULES)
def test_the_parts_together_are_the_whole(name: str) -> None:
    torch.manual_seed(0)
    layers, x = MODULES[name]().double(), torch.randn(5, 4).double()
    backward, entrance, gradient = split(layers, x.clone())
    backward.input()
    expected_input, expected = whole(layers, x, gradient)
    (ours,) = entrance.gradients
    torch.testing.assert_close(ours, expected_input, rtol=0, atol=1e-12)
    backward.weight()
    trained = [p for p in layers.parameters() if p.requires_grad]
    for parameter, right in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, right, rtol=0, atol=1e-12)


def test_each_part_runs_its_own_kernels_only() -> None:
    """Three linear layers: three products for inputs, then three for weights."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    backward, _, _ = split(layers, torch.randn(5, 4))
    with Kernels() as kernels:
        backward.input()
    assert kernels.counts["mm"] == 3
    assert all(p.grad is None for p in layers.parameters())
    with Kernels() as kernels:
        backward.weight()
    assert kernels.counts["mm"] == 3
    assert all(p.grad is not None for p in layers.parameters())


def test_a_layer_called_twice_runs_no_kernel_twice() -> None:
    backward, _, _ = split(Twice(), torch.randn(5, 4))
    with Kernels() as kernels:
        backward.input()
        backward.weight()
    assert kernels.counts["mm"] == 4


def test_without_a_gradient_for_the_input_all_is_left_to_the_second_part() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    output = layers(torch.randn(5, 4))
    backward = SplitBackward([(get_gradient_edge(output), torch.ones_like(output))], None)
    with Kernels() as kernels:
        backward.input()
    assert not kernels.counts
    backward.weight()
    assert all(p.grad is not None for p in layers.parameters())


def test_an_output_that_needs_no_input_belongs_to_the_second_part() -> None:
    entrance = Entrance([torch.randn(4)])
    (entered,) = entrance.enter()
    weight = torch.randn(4, requires_grad=True)
    outputs = [entered * 2, weight * 3, weight]
    starts = [(get_gradient_edge(output), torch.ones(4)) for output in outputs]
    backward = SplitBackward(starts, entrance)
    backward.input()
    assert torch.equal(entrance.gradients[0], torch.full((4,), 2.0))
    assert weight.grad is None
    backward.weight()
    assert torch.equal(weight.grad, torch.full((4,), 4.0))


def test_the_graph_is_let_go_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        layers = nn.Linear(4, 4)
        x = torch.randn(5, 4)
        backward, entrance, _ = split(layers, x)
        kept = weakref.ref(x)
        backward.input()
        backward.weight()
        del x, entrance, backward
        assert kept() is None
    finally:
        gc.enable()


def test_a_reentrant_checkpoint_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="use_reentrant=False"):
        split(Checkpointed(use_reentrant=True), torch.randn(5, 4))


def test_hooks_that_wait_for_accumulated_gradients_are_refused() -> None:
    def make() -> Module:
        torch.manual_seed(0)
        model = Module(*(nn.Linear(3, 3) for _ in range(2)))
        weight = model.net[1].weight
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return model

    models = [make(), make()]
    batch = (torch.randn(4, 3).double(), torch.randn(4, 3).double())
    layout = Layout("zero_bubble")
    errors = errors_on_ranks(2, lambda end: Rank(models[end.rank], layout, end).step(batch))
    rank, error = the_cause(errors)
    assert rank == 1
    assert "register_post_accumulate_grad_hook" in str(error)
    assert "stage 1, micro-batch 0, in BackwardInput" in "".join(error.__notes__)


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_unusual_layers_train_as_on_one_device(stages_per_rank: int) -> None:
    def make() -> Module:
        torch.manual_seed(0)
        return Module(HookedActivation(), Twice(), InPlace(), Branches(), nn.LayerNorm(4), Twice())

    torch.manual_seed(1)
    batches = [(torch.randn(n, 4).double(), torch.randn(n, 4).double()) for n in (12, 7)]
    layout = Layout("zero_bubble", 2, 4, stages_per_rank)
    assert_equal(pipelined(make, batches, layout), one_device(make, batches))
