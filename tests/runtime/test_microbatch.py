"""How a batch is cut, and how outputs are put together again."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import default_collate

from lightning_pipe.runtime.microbatch import (
    find_batch_size,
    join_outputs,
    leaves_of,
    split_batch,
    split_sizes,
)

from .harness import Layout, Module, assert_equal, one_device, pipelined


class Named(NamedTuple):
    x: Any
    name: Any


@dataclasses.dataclass
class Data:
    x: Any
    name: Any = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    name: Any = "none"


@dataclasses.dataclass
class Initialised:
    """Does more in `__init__` than assign; holds more than its fields."""

    x: Any
    double: Any = dataclasses.field(init=False)

    def __post_init__(self):
        assert len(self.x) == 5, "made anew from a piece"
        self.double, self.more = 2 * self.x, "more"


class AttributeDict(dict):
    def __getattr__(self, name):
        return self[name]


def rows(n=5, width=2):
    return torch.arange(n * width).reshape(n, width)


def same(a, b):
    """Equal in type, structure and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (dict, UserDict)):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_sizes_are_those_of_tensor_split(batch_size, count):
    expected = [len(x) for x in torch.tensor_split(torch.empty(batch_size), min(count, batch_size))]
    assert split_sizes(batch_size, count) == expected


X = rows()
A, B = X[:3], X[3:]
# A batch of 5 samples, and its two pieces.
BATCHES = {
    "tensor": (X, A, B),
    "tuple": ((X, X), (A, A), (B, B)),
    "list": ([X, X], [A, A], [B, B]),
    "dict": ({"b": X, "a": X}, {"b": A, "a": A}, {"b": B, "a": B}),
    "ordered dict": (OrderedDict(b=X, a=X), OrderedDict(b=A, a=A), OrderedDict(b=B, a=B)),
    "dict of a class of its own": (AttributeDict(x=X), AttributeDict(x=A), AttributeDict(x=B)),
    "mapping": (UserDict(x=X), UserDict(x=A), UserDict(x=B)),
    "named tuple": (Named(X, "n"), Named(A, "n"), Named(B, "n")),
    "dataclass": (Data(X), Data(A), Data(B)),
    "frozen dataclass with slots": (Frozen(X), Frozen(A), Frozen(B)),
    "nested": (
        [{"x": (X, [X, None])}, Data(Named(X, 1), [X])],
        [{"x": (A, [A, None])}, Data(Named(A, 1), [A])],
        [{"x": (B, [B, None])}, Data(Named(B, 1), [B])],
    ),
    "list of texts": ([X, list("abcde")], [A, list("abc")], [B, list("de")]),
    "tuple of texts": ([X, tuple("abcde")], [A, tuple("abc")], [B, tuple("de")]),
    "list of dicts": (
        (X, [{"id": i} for i in range(5)]),
        (A, [{"id": i} for i in range(3)]),
        (B, [{"id": i} for i in (3, 4)]),
    ),
    "lists of another length": ((X, ["a"] * 4), (A, ["a"] * 4), (B, ["a"] * 4)),
    "scalars": (
        (torch.tensor(2.0), X, 3, "text", None, True),
        (torch.tensor(2.0), A, 3, "text", None, True),
        (torch.tensor(2.0), B, 3, "text", None, True),
    ),
    "a shared tensor": ((X, rows(4)), (A, rows(4)), (B, rows(4))),
    "empty containers": ((X, [], {}, ()), (A, [], {}, ()), (B, [], {}, ())),
}


@pytest.mark.parametrize(("batch", "first", "second"), BATCHES.values(), ids=BATCHES)
def test_batches_are_cut(batch, first, second):
    pieces, sizes = split_batch(batch, 2)
    assert sizes == [3, 2]
    assert same(pieces[0], first)
    assert same(pieces[1], second)


def test_a_pair_of_tensors_is_no_list_of_two_samples():
    x, y = rows(2), torch.tensor([0, 1])
    pieces, _ = split_batch([x, y], 2)
    assert same(pieces, [[x[:1], y[:1]], [x[1:], y[1:]]])


def test_a_default_factory_stays():
    batch = defaultdict(list, x=rows())
    for piece in split_batch(batch, 2)[0]:
        assert piece["missing"] == []
    assert "missing" not in batch


def test_a_dataclass_is_not_initialised_again():
    pieces, _ = split_batch(Initialised(rows()), 2)
    for piece, half in zip(pieces, (A, B), strict=True):
        assert same(piece.x, half)
        assert same(piece.double, 2 * half)
        assert piece.more == "more"


def test_what_is_not_cut_is_the_same_object():
    shared = object()
    pieces, _ = split_batch((rows(), shared), 5)
    assert all(piece[1] is shared for piece in pieces)


def test_the_batch_itself_does_not_change():
    batch = {"x": rows(), "names": list("abcde")}
    split_batch(batch, 2)
    assert same(batch, {"x": rows(), "names": list("abcde")})


def test_what_torchs_collate_makes_of_texts_is_cut():
    batch = default_collate([(torch.zeros(1), "a"), (torch.zeros(1), "b"), (torch.zeros(1), "c")])
    pieces, _ = split_batch(batch, 3)
    assert [piece[1] for piece in pieces] == [("a",), ("b",), ("c",)]


def test_a_batch_smaller_than_the_number_of_microbatches():
    pieces, sizes = split_batch(rows(2), 4)
    assert sizes == [1, 1]
    assert same(pieces, list(rows(2).split(1)))


@pytest.mark.parametrize("batch", [torch.tensor(1.0), {"text": "a"}, [], None, torch.empty(0, 3)])
def test_a_batch_without_samples(batch):
    """It goes through in one piece, and cannot be cut."""
    pieces, _ = split_batch(batch, 1)
    assert len(pieces) == 1
    assert pieces[0] is batch
    with pytest.raises(MisconfigurationException, match=r"cut into 4 micro-batches.*split_batch"):
        split_batch(batch, 4)


def test_the_batch_size_is_dimension_0_of_the_first_tensor_that_has_one():
    assert find_batch_size((torch.tensor(1.0), "text", {"x": [rows(7)]}, rows(3))) == 7
    assert find_batch_size(Frozen(None)) is None


def test_leaves_come_in_order():
    assert list(leaves_of([1, {"a": (2, Data(3, 4))}, []])) == [1, 2, 3, 4, []]


# A model that returns texts returns a list of them.
OUTPUTS = {name: pieces for name, pieces in BATCHES.items() if name != "tuple of texts"}


@pytest.mark.parametrize(("batch", "first", "second"), OUTPUTS.values(), ids=OUTPUTS)
def test_pieces_are_put_together(batch, first, second):
    assert same(join_outputs([first, second], [3, 2]), batch)


def test_one_output_is_the_output():
    output = object()
    assert join_outputs([output], [3]) is output


def test_a_scalar_becomes_the_mean_over_the_samples():
    joined = join_outputs([torch.tensor(1.0), torch.tensor(4.0)], [1, 2])
    assert same(joined, torch.tensor(3.0))


def test_pairs_of_rows_are_no_lists_of_two_samples():
    joined = join_outputs([[rows(2), rows(2)], [rows(2), rows(2)]], [2, 2])
    assert same(joined, [torch.cat([rows(2)] * 2)] * 2)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([rows(4), rows(4) + 1], r"shapes \[\(4, 2\), \(4, 2\)\] for \[3, 2\] samples"),
        ([torch.tensor(1), torch.tensor(2)], r"shapes \[\(\), \(\)\]"),
        ([rows(3), rows(4)], r"shapes \[\(3, 2\), \(4, 2\)\] for \[3, 2\] samples"),
        ([{"n": 3}, {"n": 2}], r"differs between micro-batches: \[3, 2\]"),
        ([None, "text"], "differs between micro-batches"),
    ],
)
def test_what_cannot_be_put_together_is_refused(outputs, message):
    with pytest.raises(MisconfigurationException, match=message):
        join_outputs(outputs, [3, 2])


class OwnBatch:
    """Nothing that the package knows."""

    def __init__(self, x, y):
        self.x, self.y = x, y


class TrainsOnData(Module):
    def training_step(self, batch, batch_idx):
        assert len(batch.name["ids"]) == len(batch.x)
        return torch.nn.functional.mse_loss(self.net(batch.x), batch.name["y"])


class TrainsOnOwn(Module):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch.x), batch.y)

    def split_batch(self, batch, num_microbatches):
        halves = zip(batch.x.chunk(num_microbatches), batch.y.chunk(num_microbatches), strict=True)
        return (OwnBatch(*half) for half in halves)


@pytest.mark.parametrize(
    ("cls", "make_batch"),
    [
        (TrainsOnData, lambda x, y: Data(x, {"y": y, "ids": list("abcdefgh")})),
        (TrainsOnOwn, OwnBatch),
    ],
)
def test_training_on_such_batches_equals_one_device(cls, make_batch):
    torch.manual_seed(1)
    data = [make_batch(*torch.randn(2, 8, 3).double()) for _ in range(3)]

    def make_model():
        torch.manual_seed(0)
        return cls(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

    assert_equal(pipelined(make_model, data, Layout()), one_device(make_model, data))
