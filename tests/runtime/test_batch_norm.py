"""BatchNorm and other layers with a state in buffers: recomputation, and deferred statistics.

The oracle trains on one device, micro-batch by micro-batch, in a few lines of plain torch. For
deferred statistics it keeps what enters each BatchNorm and gives torch's own layer the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import spectral_norm

from .harness import Layout, Module, Trained, assert_equal, one_device, pipelined

WIDTH = 4
CHECKPOINTING = ["none", "stage", "layer"]


class Calls(nn.Module):
    """Counts its calls, in place or by another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x * (1 + self.calls / 8)


class Late(nn.Module):
    """Replaces a buffer, at first in the second batch: where a micro-batch has two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor
        if len(x) == 2:
            self.factor = self.factor + 0.5
        return x


class Channels(nn.Module):
    """A layer for images, on rows that are taken for images."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 2, 1, 2)).reshape(-1, WIDTH)


def model(*layers: Callable[[], nn.Module]) -> Module:
    torch.manual_seed(0)
    return Module(*(make() for make in layers))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def rows(count: int) -> Tensor:
        return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)

    return [(3 * rows(size) + 1, rows(size)) for size in sizes]


def by_hand(module: Module, data: list[Any], count: int, deferred: bool) -> Trained:
    """Train on one device, each batch cut into ``count`` micro-batches."""
    optimizer = module.configure_optimizers()
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)] if deferred else []
    momenta = [norm.momentum for norm in norms]
    entered: list[list[Tensor]] = [[] for _ in norms]
    losses = []
    for x, y in data:
        total = 0.0
        optimizer.zero_grad()
        handles = [
            norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach()))
            for norm, seen in zip(norms, entered, strict=True)
        ]
        for norm in norms:
            norm.track_running_stats = norm.running_mean is None
        for piece, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            loss = module.training_step((piece, target), 0) * len(piece) / len(x)
            loss.backward()
            total += loss.item()
        for handle in handles:
            handle.remove()
        for norm, momentum, seen in zip(norms, momenta, entered, strict=True):
            norm.track_running_stats, norm.momentum = norm.running_mean is not None, momentum
            with torch.no_grad():
                norm(torch.cat(seen))
            seen.clear()
        optimizer.step()
        losses.append(total)
    named = [*module.named_parameters(), *module.named_buffers()]
    return Trained({name: tensor.detach() for name, tensor in named}, losses)


STATEFUL = {
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm2d, cumulative": lambda: Channels(nn.BatchNorm2d(2, momentum=None)),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "InstanceNorm with statistics": lambda: Channels(
        nn.InstanceNorm2d(2, track_running_stats=True)
    ),
    "buffer changed in place": lambda: Calls(in_place=True),
    "buffer replaced": lambda: Calls(in_place=False),
    "buffer replaced, late": Late,
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("layer", STATEFUL)
def test_recomputation_changes_nothing(layer: str, checkpointing: str) -> None:
    """Weights and buffers are those of one device that sees one micro-batch after the other."""
    layers = [linear, STATEFUL[layer], linear, STATEFUL[layer]]
    data = batches(9, 8, 8, 7)
    expected = by_hand(model(*layers), data, 3, deferred=False)

    layout = Layout(num_microbatches=3, checkpointing=checkpointing)
    assert_equal(pipelined(lambda: model(*layers), data, layout), expected)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_recomputation_changes_nothing_without_pauses(schedule: str) -> None:
    layers = [linear, STATEFUL["BatchNorm"], linear, STATEFUL["buffer changed in place"]]
    data = batches(8, 8, 8, 8)
    layouts = [Layout(schedule, num_microbatches=2, checkpointing=c) for c in CHECKPOINTING]

    kept, *recomputed = [pipelined(lambda: model(*layers), data, layout) for layout in layouts]

    for trained in recomputed:
        assert_equal(trained, kept)


class Frozen(nn.BatchNorm1d):
    """Evaluates for ever."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


NORMS = {
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "other momentum": lambda: nn.BatchNorm1d(WIDTH, momentum=0.5, affine=False),
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "BatchNorm2d": lambda: Channels(nn.BatchNorm2d(2)),
    "without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
}


@pytest.mark.parametrize(
    "layout",
    [
        Layout("1f1b", 2, 3, deferred_batchnorm=True),
        Layout("gpipe", 2, 3, checkpointing="stage", deferred_batchnorm=True),
        Layout("1f1b", 3, 3, checkpointing="layer", deferred_batchnorm=True),
        Layout("interleaved", 2, 4, stages_per_rank=2, deferred_batchnorm=True),
    ],
    ids=lambda layout: f"{layout.schedule} {layout.checkpointing}",
)
@pytest.mark.parametrize("norm", NORMS)
def test_deferred_statistics_are_those_of_the_batch(norm: str, layout: Layout) -> None:
    layers = [NORMS[norm], linear, NORMS[norm], linear, NORMS[norm]]
    data = batches(12, 9, 12, 8)
    expected = by_hand(model(*layers), data, layout.num_microbatches, deferred=True)

    assert_equal(pipelined(lambda: model(*layers), data, layout), expected)


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream", "pipedream_2bw"])
def test_deferred_statistics_equal_one_device(schedule: str) -> None:
    """Where no BatchNorm comes before, they do not depend on how a batch is cut."""
    layers = [NORMS["BatchNorm"], linear, linear]
    data = batches(12, 12, 12, 12)
    statistics = ["net.0.running_mean", "net.0.running_var", "net.0.num_batches_tracked"]
    expected = one_device(lambda: model(*layers), data).weights
    layout = Layout(schedule, num_microbatches=3, deferred_batchnorm=True)

    deferred = pipelined(lambda: model(*layers), data, layout).weights

    for name in statistics:
        torch.testing.assert_close(deferred[name], expected[name], rtol=0, atol=1e-10)


def test_a_frozen_layer_stays_as_it_is() -> None:
    layers = [lambda: Frozen(WIDTH), linear]

    def make() -> Module:
        module = model(*layers)
        module.train()
        return module

    layout = Layout(num_microbatches=3, deferred_batchnorm=True)
    trained = pipelined(make, batches(9, 9), layout).weights

    assert torch.equal(trained["net.0.running_mean"], torch.zeros(WIDTH, dtype=torch.float64))
    assert trained["net.0.num_batches_tracked"] == 0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x))


def test_a_layer_called_twice_is_refused() -> None:
    layout = Layout(num_microbatches=2, deferred_batchnorm=True)
    with pytest.raises(MisconfigurationException, match="BatchNorm1d layer is called 2 times"):
        pipelined(lambda: model(linear, Twice), batches(8), layout)
