"""A swapped module stays the module that it was for everybody else."""

import abc
import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_pipe.partition.class_swap import (
    original_class,
    original_forward,
    restore_class,
    swap_class,
)


class Doubled:
    def forward(self, *args):
        return 2 * super().forward(*args)


class Other:
    pass


class AbstractLayer(nn.Module, abc.ABC):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    @abc.abstractmethod
    def body(self, x): ...

    def forward(self, x):
        return self.body(x)


class ConcreteLayer(AbstractLayer):
    def body(self, x):
        return self.linear(x)


class OwnReduce(nn.Linear):
    def __reduce__(self):
        return self.__class__, (self.in_features, self.out_features), self.__getstate__()


class Registry(nn.Module):
    seen = []

    def __init_subclass__(cls, *, key, **kwargs):
        Registry.seen.append(key)


class Registered(Registry, key="mine"):
    def forward(self, x):
        return x


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), lambda: ConcreteLayer(2)])
def test_methods_change_and_nothing_else_does(make):
    module = make()
    expected, text, cls = 2 * module(torch.ones(2)), repr(module), type(module)
    swap_class(module, Doubled)
    assert torch.equal(module(torch.ones(2)), expected)
    assert repr(module) == text
    assert isinstance(module, cls)
    assert type(module).__qualname__ == cls.__qualname__
    assert type(module).__module__ == cls.__module__
    assert original_class(module) is cls
    restore_class(module)
    assert type(module) is cls
    restore_class(module)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), lambda: ConcreteLayer(2)])
def test_duplicates_are_swapped_too(duplicate, make):
    module = make()
    swap_class(module, Doubled)
    other = duplicate(module)
    assert type(other) is type(module)
    assert torch.equal(other(torch.ones(2)), module(torch.ones(2)))
    restore_class(other)
    assert original_class(module) is original_class(other) is not type(module)


def test_a_module_with_its_own_reduce():
    module = OwnReduce(2, 2)
    swap_class(module, Doubled)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert torch.equal(other(torch.ones(2)), module(torch.ones(2)))


def test_a_parametrized_module_can_be_swapped_and_copied():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    swap_class(module, Doubled)
    other = copy.deepcopy(module)
    assert torch.equal(other(torch.ones(2)), module(torch.ones(2)))


def test_slices_of_a_swapped_sequential_are_ordinary():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    swap_class(module, Doubled)
    part = module[1:]
    assert type(part) is nn.Sequential
    assert list(part) == [module[1], module[2]]


def test_forward_on_the_instance_waits():
    module = nn.Linear(2, 2)
    module.forward = own = lambda x: x + 1
    swap_class(module, Doubled)
    assert original_forward(module) is own
    module(torch.ones(2))
    assert "forward" not in vars(module)
    restore_class(module)
    assert module.forward is own


def test_original_forward_is_bound():
    module = nn.Linear(2, 2)
    expected = module(torch.ones(2))
    swap_class(module, Doubled)
    assert torch.equal(original_forward(module)(torch.ones(2)), expected)


def test_a_user_registry_does_not_see_swapped_classes():
    swap_class(Registered(), Doubled)
    assert Registry.seen == ["mine"]


def test_two_mixins_are_refused():
    module = nn.Linear(2, 2)
    swap_class(module, Doubled)
    swap_class(module, Doubled)
    with pytest.raises(RuntimeError, match="methods of Doubled.*those of Other"):
        swap_class(module, Other)
