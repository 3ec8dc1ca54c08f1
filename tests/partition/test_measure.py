"""What layers cost, measured: right, and without a trace in the model."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pipe.partition import find_layers
from lightning_pipe.partition.call_arguments import call_arguments
from lightning_pipe.partition.measure import measure
from lightning_pipe.partition.profile import Profile

N, WIDTH = 8, 16
F32 = 4  # bytes


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """Sleeps for so long, half of it for each sample."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.times = forward, backward
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = (t / 2 + t / 2 * len(x) / N for t in self.times)
        y: Tensor = Sleep.apply(x + self.weight, forward, backward)
        return y


class Model(L.LightningModule):
    def __init__(self, *layers: nn.Module, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.ones(()))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("scale", self.scale)
        return nn.functional.mse_loss(self.net(x * self.scale + torch.randn_like(x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.optimizer(self.parameters(), lr=0.1)
        return optimizer


def profile(model: L.LightningModule, repeats: int = 1, batch: Any = None) -> Profile:
    found = find_layers(model)
    batch = (torch.randn(N, WIDTH), torch.zeros(N, WIDTH)) if batch is None else batch
    args, kwargs, size = call_arguments(model, found, batch)
    return measure(model, found, args, kwargs, size, repeats, batch=batch)


def test_times_are_those_of_the_layers() -> None:
    times = [(0.01, 0.02), (0.03, 0.01), (0.02, 0.04)]
    measured = profile(Model(*(Sleeping(*t) for t in times)), repeats=3)
    for layer, (forward, backward) in zip(measured.layers, times, strict=True):
        assert forward <= layer.forward_seconds < forward + 0.005
        assert backward <= layer.backward_seconds < backward + 0.005
        assert layer.forward_overhead == pytest.approx(forward / 2, abs=0.006)
        assert layer.backward_overhead == pytest.approx(backward / 2, abs=0.006)
    assert measured.batch_size == N


def test_bytes_of_a_chain() -> None:
    """Linear keeps its input, ReLU its output, LayerNorm its input and two numbers a sample."""
    linear, norm = nn.Linear(WIDTH, 32), nn.LayerNorm(32)
    measured = profile(Model(linear, nn.ReLU(), norm, nn.Linear(32, WIDTH, bias=False)))
    first, relu, third, last = measured.layers
    assert measured.input_bytes == N * WIDTH * F32
    assert [layer.output_bytes for layer in measured.layers] == [N * 32 * F32] * 3 + [
        N * WIDTH * F32
    ]
    assert first.activation_bytes == N * WIDTH * F32
    assert relu.activation_bytes == N * 32 * F32
    assert third.activation_bytes == 2 * N * F32  # its input is ReLU's output
    assert last.activation_bytes == N * 32 * F32
    assert first.parameter_bytes == (WIDTH * 32 + 32) * F32
    assert last.parameter_bytes == last.gradient_bytes == WIDTH * 32 * F32
    assert relu.parameter_bytes == 0
    assert last.optimizer_bytes == 2 * last.parameter_bytes + F32  # and the number of steps
    assert measured.loss_activation_bytes == 2 * N * WIDTH * F32  # the scaled input, the target
    assert [layer.name for layer in measured.layers] == ["net.0", "net.1", "net.2", "net.3"]


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (torch.optim.SGD, 0),
        (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), 1),
        (lambda p, lr: (_ for _ in ()).throw(RuntimeError("needs a trainer")), 2),
    ],
    ids=["SGD", "momentum", "it cannot be built"],
)
def test_bytes_of_optimizers(optimizer: Any, factor: int) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    (measured,) = profile(Model(layer, optimizer=optimizer)).layers
    assert measured.optimizer_bytes == factor * measured.parameter_bytes


def test_frozen_and_shared_parameters() -> None:
    shared = nn.Linear(WIDTH, WIDTH, bias=False)
    frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    one, two, three = profile(Model(shared, shared, frozen)).layers
    size = WIDTH * WIDTH * F32
    assert (one.parameter_bytes, two.parameter_bytes, three.parameter_bytes) == (size, 0, size)
    assert (one.gradient_bytes, three.gradient_bytes, three.optimizer_bytes) == (size, 0, 0)


def test_nothing_is_changed() -> None:
    model = Model(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.5)
    )
    model.net[1].eval()
    model.net[0].weight.grad = torch.ones(WIDTH, WIDTH)
    calls: list[int] = []
    model.net[0].register_forward_hook(lambda *_: calls.append(1))
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    batch = (torch.randn(N, WIDTH), torch.zeros(N, WIDTH))
    kept = [tensor.clone() for tensor in batch]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    version = model.net[0].weight._version

    profile(model, batch=batch)

    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert [module.training for module in model.modules()] == modes
    assert model.net[0].weight._version == version
    assert torch.equal(model.net[0].weight.grad, torch.ones(WIDTH, WIDTH))
    assert model.net[1].weight.grad is None
    assert model.scale.grad is None
    assert "forward" not in vars(model.net)
    assert "log" not in vars(model)
    assert not calls
    assert all(map(torch.equal, batch, kept))


def test_layers_without_memory() -> None:
    with torch.device("meta"):
        layers = [nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
    model = Model(*layers)
    model.example_input_array = torch.zeros(N, dtype=torch.long)
    found = find_layers(model)
    measured = measure(model, found, *call_arguments(model, found), repeats=1)
    assert measured.layers[1].activation_bytes == N * WIDTH * F32
    assert all(parameter.is_meta for parameter in model.net.parameters())


class Listed(L.LightningModule):
    """Layers of its own, with a keyword that reaches one of them, and a tuple on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = First(), Last()
        self.example_input_array = {"x": torch.zeros(N, WIDTH), "mask": torch.ones(N, WIDTH)}

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.first, self.last]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.arange(len(x))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, both: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        assert both[0].shape == mask.shape  # also with a part of the batch
        y: Tensor = self.linear(both[0] * mask)
        return y


def test_listed_layers_with_keywords() -> None:
    model = Listed()
    found = find_layers(model)
    args, kwargs, size = call_arguments(model, found)
    assert (args, size) == ((), N)
    # A keyword for layer 0: it is named in the call, as the pipeline would have it.
    measured = measure(model, found, (kwargs.pop("x"),), kwargs, size, repeats=1)
    assert measured.layers[0].output_bytes == N * WIDTH * F32 + N * 8
    assert measured.layers[1].output_bytes == N * F32


def test_what_cannot_be_measured_says_why() -> None:
    model = Model(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(MisconfigurationException, match="no example_input_array, and no batch"):
        call_arguments(model, find_layers(model))
    model.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match="did not call its pipelined module 'net'"):
        call_arguments(model, find_layers(model), (torch.zeros(N, WIDTH), None))
