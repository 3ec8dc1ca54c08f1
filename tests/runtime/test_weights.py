"""The weight store: versions that are kept, and those that are not."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pipe.runtime.weights import WeightStore


def filled(*layers):
    store = WeightStore(layers)
    store.begin_fill()
    return store


def update(layer, store, keeps):
    """Make the weights one larger, in place as optimizers do."""
    store.advance(keeps)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.add_(1)


def ones(requires_grad=True):
    layer = nn.Linear(2, 2, bias=False)
    nn.init.ones_(layer.weight)
    layer.weight.requires_grad_(requires_grad)
    return layer


def test_a_version_that_is_kept_stays_as_it_was():
    layer = ones()
    store = filled(layer)
    for _ in range(3):
        update(layer, store, keeps=0)
    for version in range(4):
        with store.reading(version):
            assert torch.equal(layer.weight, torch.full((2, 2), 1.0 + version))
    assert torch.equal(layer.weight, torch.full((2, 2), 4.0))
    assert store.peak_versions == 4
    assert store.peak_bytes == 4 * layer.weight.nbytes


def test_what_no_one_reads_any_more_is_overwritten_in_place():
    layer = ones()
    store = filled(layer)
    memory = layer.weight.data_ptr()
    for version in range(3):
        with store.reading(version):
            assert layer.weight.data_ptr() == memory
        update(layer, store, keeps=version + 1)
    assert layer.weight.data_ptr() == memory
    assert (store.peak_versions, store.peak_bytes) == (1, layer.weight.nbytes)


def test_a_version_that_is_not_held_is_refused():
    layer = ones()
    store = filled(layer)
    update(layer, store, keeps=0)
    update(layer, store, keeps=1)
    for version in (0, 3):
        refused = pytest.raises(RuntimeError, match=rf"Version {version} .* only versions \[1, 2\]")
        with refused, store.reading(version):
            pass


def test_a_fill_begins_with_version_0_and_forgets_older_ones():
    layer = ones()
    store = filled(layer)
    update(layer, store, keeps=0)
    store.end_fill()
    store.begin_fill()
    with store.reading(0):
        assert torch.equal(layer.weight, torch.full((2, 2), 2.0))
    with pytest.raises(RuntimeError, match="Version 1"), store.reading(1):
        pass


def test_gradients_are_those_of_the_version_and_leave_the_parameter_alone():
    layer = ones()
    store = filled(layer)
    with store.reading(0):
        loss = (layer(torch.ones(1, 2)) ** 2).sum()
    update(layer, store, keeps=0)
    with store.reading(0):
        loss.backward()
    (gradient,) = store.take_gradients(0)
    assert torch.equal(gradient, torch.full((2, 2), 4.0))  # 2 * output, which was 2
    assert layer.weight.grad is None
    assert store.take_gradients(0) == [None]


def test_weights_tied_in_a_stage_are_one_weight():
    first, second = ones(), ones()
    second.weight = first.weight
    store = filled(first, second)
    update(first, store, keeps=0)
    with store.reading(0):
        assert first.weight is second.weight
        assert torch.equal(first.weight, torch.ones(2, 2))
    assert first.weight is second.weight
    assert store.peak_bytes == 2 * first.weight.nbytes


def test_frozen_weights_have_one_version():
    layer = nn.Sequential(ones(requires_grad=False), ones())
    store = filled(layer)
    update(layer, store, keeps=0)
    assert store.peak_bytes == 3 * layer[0].weight.nbytes


def test_an_error_inside_puts_the_weights_back():
    layer = ones()
    store = filled(layer)
    weight = layer.weight
    with pytest.raises(ZeroDivisionError), store.reading(0):
        raise ZeroDivisionError
    assert layer.weight is weight


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_refused(hook):
    layer = ones()
    getattr(layer.weight, hook)(lambda _: None)
    with pytest.raises(MisconfigurationException, match="'weight' of shape .* gradient hooks"):
        filled(layer)


def test_a_parameter_that_is_read_from_elsewhere_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.also = [self.weight]

        def forward(self, x):
            return x * self.also[0]

    layer = Hidden()
    store = filled(layer)
    with store.reading(0):
        layer(torch.ones(2)).sum().backward()
    with pytest.raises(MisconfigurationException, match="Read parameters as attributes"):
        store.take_gradients(0)


class Moving(nn.Linear):
    """Moves its weight, as recurrent layers do for cuDNN."""

    def forward(self, x):
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def test_a_layer_that_moves_its_weights_is_trained():
    layer = Moving(2, 2, bias=False)
    nn.init.ones_(layer.weight)
    store = filled(layer)
    for version in range(3):
        with store.reading(version):
            assert torch.equal(layer(torch.ones(1, 2)), torch.full((1, 2), 2.0 * (version + 1)))
        update(layer, store, keeps=version + 1)


def test_a_layer_that_moves_weights_which_backwards_must_see_updated_is_refused():
    layer = Moving(2, 2, bias=False)
    store = filled(layer)
    with store.reading(0):
        layer(torch.ones(1, 2))
    with pytest.raises(MisconfigurationException, match="Use weight_stashing=True"):
        store.advance(keeps=1, in_flight=True)


def test_old_versions_go_before_a_new_one_is_copied():
    layer = ones()
    store = filled(layer)
    update(layer, store, keeps=0)
    with store.reading(0):
        gone = weakref.ref(layer.weight)
    held = []
    clone = torch.Tensor.clone
    with mock.patch.object(
        torch.Tensor, "clone", lambda t: held.append(gone() is not None) or clone(t)
    ):
        update(layer, store, keeps=1)
    assert held == [False]
