"""`run_layers` calls layers as a pipeline does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import run_layers


class Scale(nn.Module):
    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * factor, y


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor], *, shift: float = 0.0) -> Tensor:
        return pair[0] + pair[1] + shift


class TakesAnything(nn.Module):
    def forward(self, x: Tensor, **others: object) -> Tensor:
        assert not others
        return x


def test_keywords_reach_the_layers_that_name_them() -> None:
    x, y = torch.ones(2), torch.full((2,), 10.0)
    layers = [Scale(), Sum(), TakesAnything()]
    assert run_layers(layers, x, y, factor=3.0, shift=100.0, unknown=0).tolist() == [113.0] * 2
    assert run_layers(layers, x, y=y, factor=3.0).tolist() == [13.0] * 2
    assert run_layers(iter(layers), x=x, y=y).tolist() == [11.0] * 2


def test_what_one_layer_returns_is_one_argument_of_the_next() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    x = torch.randn(5, 3)
    assert torch.equal(run_layers([first, second], x), nn.Sequential(first, second)(x))
    with pytest.raises(TypeError):
        run_layers([Scale(), Scale()], x, x)


def test_no_layers() -> None:
    with pytest.raises(ValueError, match="expected at least one"):
        run_layers([], torch.ones(1))
