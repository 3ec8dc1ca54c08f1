"""Specs of activations, and where an activation enters a stage."""

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from lightning_pipe.runtime.payload import Entrance, Spec, TensorSpec, assemble, disassemble


class Pair(NamedTuple):
    left: Any
    right: Any


TREES = {
    "tensor": torch.ones(2, 3),
    "nothing": None,
    "empty": (),
    "nested": {"a": [torch.ones(2), (None, torch.zeros(0, 4, dtype=torch.int8))], "b": True},
    "named tuple": Pair(torch.ones(1, requires_grad=True), Pair("text", 1.5)),
    "ordered dict": OrderedDict(b=torch.ones(1), a=torch.Size([2])),
    "numbers": [1, 2.0, 3j, True, b"bytes", torch.float16, torch.device("cpu")],
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_is_put_together_from_its_leaves_and_its_spec(tree):
    leaves, spec = disassemble(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    constants = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, torch.Tensor)]
    again = assemble(tensors, constants, spec)
    assert disassemble(again)[1] == spec
    assert type(again) is type(tree)
    assert all(a is b for a, b in zip(disassemble(again)[0], leaves, strict=True))
    assert spec.has_constants == bool(constants)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_spec_survives_pickling(tree):
    spec = disassemble(tree)[1]
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.structure == spec.structure


def test_specs_tell_what_a_receiver_must_know():
    base = torch.ones(2, 3)
    others = [
        torch.ones(3, 2),
        torch.ones(2, 3).half(),
        torch.ones(2, 3).requires_grad_(),
        (base,),
        [base],
        None,
        1,
    ]
    specs = [disassemble(tree)[1] for tree in [base, *others]]
    assert all(a != b for i, a in enumerate(specs) for b in specs[:i])
    assert disassemble(base)[1] == disassemble(torch.zeros(2, 3))[1]


def test_a_spec_reads_well():
    spec = disassemble((torch.ones(2, 3, requires_grad=True), None, torch.ones(1).int(), "text"))[1]
    assert str(spec) == "torch.float32[2, 3] with gradient, None, torch.int32[1], str"
    assert str(disassemble(())[1]) == "nothing"
    assert isinstance(spec, Spec)
    assert spec.tensors == [
        TensorSpec((2, 3), torch.float32, True),
        TensorSpec((1,), torch.int32, False),
    ]


def test_gradients_come_out_at_the_entrance():
    entrance = Entrance([torch.ones(2), torch.ones(3), torch.ones(4)])
    a, b, _ = entrance.enter()
    (2 * a.sum() + 3 * b.sum()).backward()
    grad_a, grad_b, unused = entrance.gradients
    assert torch.equal(grad_a, torch.full((2,), 2.0))
    assert torch.equal(grad_b, torch.full((3,), 3.0))
    assert unused is None


def test_gradients_are_none_where_no_backward_came():
    entrance = Entrance([torch.ones(2), torch.ones(3)])
    entrance.enter()
    assert entrance.gradients == (None, None)


@pytest.mark.parametrize("count", [1, 2])
def test_what_enters_may_be_changed_in_place(count):
    """A leaf that requires a gradient may not, and neither may a view from several outputs."""
    entrance = Entrance([torch.ones(2) for _ in range(count)])
    entered = entrance.enter()
    sum(tensor.mul_(3).sum() for tensor in entered).backward()
    for gradient in entrance.gradients:
        assert torch.equal(gradient, torch.full((2,), 3.0))


def test_an_entrance_does_not_keep_what_entered():
    entrance = Entrance([torch.ones(2)])
    entrance.enter()
    assert entrance.tensors == []
