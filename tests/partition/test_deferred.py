"""What is deferred comes out as if it had been made at once, to the last bit, and no more of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_pipe.partition import DeferredTensors, absent, materialise
from lightning_pipe.partition.tape import Tape

CPU = torch.device("cpu")


def state(module: nn.Module) -> dict[str, Any]:
    """All that a module has: parameters, buffers, and the plain attributes of the outermost one."""
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
        **plain,
    }


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert type(actual) is type(expected)
        assert actual.requires_grad == expected.requires_grad
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, check_stride=True, equal_nan=True
        )
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(actual), list(expected))
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual == expected


class Holder(nn.Module):
    """Holds what a function puts into it."""

    def __init__(self, build: Callable[[Holder], None]) -> None:
        super().__init__()
        build(self)


def lstm(m: Any) -> None:
    m.lstm = nn.LSTM(4, 5, num_layers=2)  # has weak references to its weights
    m.gru = nn.GRU(3, 3, bidirectional=True)


def attention(m: Any) -> None:
    m.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def embedding(m: Any) -> None:
    m.embedding = nn.Embedding(11, 6, padding_idx=3)
    m.given = nn.Embedding(2, 2, _weight=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def dummy_forward(m: Any) -> None:
    """To learn a shape; it changes running statistics as well."""
    m.body = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Flatten())
    m.head = nn.Linear(m.body(torch.rand(2, 2, 9)).shape[1], 2)
    m.lazy = nn.LazyLinear(3)
    m.lazy(torch.ones(1, 4))


def parametrized(m: Any) -> None:
    m.weight_norm = parametrizations.weight_norm(nn.Conv1d(3, 4, 2))
    m.spectral_norm = parametrizations.spectral_norm(nn.Linear(6, 6))
    m.orthogonal = parametrizations.orthogonal(nn.Linear(5, 5))


def own_rule(m: Any) -> None:
    m.wide, m.tall = nn.Linear(9, 6), nn.Linear(6, 9)
    nn.init.orthogonal_(m.wide.weight, gain=2.0)
    nn.init.orthogonal_(m.tall.weight)
    m.layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(2)))

    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.constant_(module.bias, 0.5)

    m.layers.apply(start)
    with torch.no_grad():
        m.layers[0].weight.mul_(0.1)[3:5] = 7
        m.layers[1].weight[m.layers[1].weight > 0] = 0.5
    vector = nn.utils.parameters_to_vector(m.wide.parameters())
    nn.utils.vector_to_parameters(vector * 2, m.wide.parameters())


def buffers(m: Any) -> None:
    m.norm = nn.BatchNorm1d(6)
    m.register_buffer("position", torch.arange(6).float() / 3, persistent=False)
    m.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
    m.register_buffer("rotation", torch.polar(torch.ones(3), torch.arange(3.0)))
    m.register_buffer("back", m.rotation.conj())
    m.cache = {"cos": [torch.arange(3.0).cos()], "pair": (torch.ones(2), 1)}


def types(m: Any) -> None:
    m.double = nn.Linear(3, 3, dtype=torch.float64)
    m.half = nn.Linear(3, 3).to(torch.bfloat16)
    m.on_cpu = nn.Linear(3, 3, device="cpu").to("cpu")
    m.alike = torch.arange(3, device=m.on_cpu.weight.device)
    m.where = (m.alike.device.type, m.alike.is_meta)
    wide = torch.tensor([1.0, 2.0], dtype=torch.float64)
    m.like = wide.type_as(m.on_cpu.weight)  # torch asks that one for its device
    m.new = m.on_cpu.weight.new_ones(2)
    torch.set_default_dtype(torch.float64)
    m.by_default, m.ones = nn.Linear(3, 3), torch.ones(3)
    torch.set_default_dtype(torch.float32)


def asks_for_values(m: Any) -> None:
    m.rates = [rate.item() for rate in torch.linspace(0, 0.3, 5)]
    m.listed = torch.linspace(0, 0.3, 5).tolist()
    m.array = torch.linspace(0, 0.3, 5).numpy()
    m.drawn = torch.randint(0, 1000, ()).item()
    m.linear = nn.Linear(3, 3)
    m.large = bool((m.linear.weight.abs() > 0.1).any())
    m.positive = m.linear.weight[m.linear.weight > 0].detach()
    m.unique = torch.unique(torch.randint(0, 9, (20,)))
    m.equal = torch.equal(m.linear.weight, m.linear.weight)
    m.eigenvalues = torch.linalg.eigvalsh(torch.eye(3) * torch.rand(3))


def wants_meta(m: Any) -> None:
    """There are no values then, so none are drawn, until the user wants the tensors elsewhere."""
    with torch.device("meta"):
        m.linear, m.norm, m.left = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(2, 2)
        m.tied = nn.Linear(4, 4)
        m.tied.weight = m.linear.weight
    m.same = m.left.weight is m.left.to("meta").weight
    for layer in (m.linear, m.norm, m.tied):  # which unties them
        layer.to_empty(device="cpu")
        layer.reset_parameters()
    m.untied = m.tied.weight is not m.linear.weight
    skip_init: Any = nn.utils.skip_init
    m.skipped = skip_init(nn.Linear, 3, 3)
    m.skipped.reset_parameters()
    m.moved = nn.Linear(3, 3).to("meta")
    nn.init.normal_(m.moved.weight)
    m.came_back = nn.Linear(3, 3).to("meta").to_empty(device="cpu")
    m.came_back.reset_parameters()
    m.halved = torch.rand(3).to("meta", torch.float16)
    m.drawn = torch.rand(3, device="meta:0")
    m.ones, m.zeros = torch.ones_like(m.drawn, device="cpu"), m.drawn.new_zeros(2, device="cpu")
    m.random = torch.rand_like(m.drawn, device="cpu")
    m.alike = torch.rand_like(m.ones, device="meta")
    m.data = torch.tensor([1.0, 2.0], device="meta")
    m.where = (m.ones.is_meta, m.drawn.is_meta, str(m.drawn.device))
    try:
        m.drawn.to("cpu")
    except NotImplementedError as error:
        m.refusal = str(error)


def reads_what_it_writes(m: Any) -> None:
    m.register_buffer("copied", torch.rand(1000))
    m.register_buffer("drawn", torch.rand(1000))
    m.copied.copy_(m.copied)
    m.drawn.bernoulli_(m.drawn)


def made_from_data(m: Any) -> None:
    factors = torch.tensor([1.0, 2.0])
    m.scaled = nn.Parameter(torch.randn(2))
    with torch.no_grad():
        m.scaled.mul_(factors)
    factors.zero_()  # after it was read
    m.from_list = nn.Parameter(factors)
    nn.init.normal_(m.from_list)  # draws at once, between what is deferred
    m.from_array = nn.Parameter(torch.from_numpy(np.ones(3)))
    m.linear = nn.Linear(2, 2)
    m.linear.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    m.loaded = nn.Linear(2, 2)
    m.loaded.load_state_dict({"weight": torch.eye(2) * 3, "bias": torch.tensor([1.0, 2.0])})
    target = torch.tensor([0.0, 0.0])
    m.written = target.copy_(m.scaled.detach())
    m.replaced = torch.tensor([0.0, 0.0])
    m.replaced.data = m.scaled.detach() + 1


def random_numbers(m: Any) -> None:
    with torch.random.fork_rng():
        m.a = nn.Parameter(torch.randn(3))
    m.b = nn.Parameter(torch.randn(30))
    generator = torch.Generator().manual_seed(3)
    m.c = nn.Parameter(torch.rand(4, generator=generator))
    m.d = nn.Parameter(torch.rand(4, generator=generator))
    generator.manual_seed(3)
    m.e = nn.Parameter(torch.rand(4, generator=generator))
    m.f = nn.Parameter(torch.randn(6)[torch.randperm(6)])
    m.g = torch.multinomial(torch.rand(5), 3)
    m.h = torch.poisson(torch.rand(5) * 9)  # draws as many numbers as its argument says
    torch.manual_seed(0)
    m.i = nn.functional.dropout(torch.rand_like(m.b.detach()))


def ties(m: Any) -> None:
    m.embedding, m.head, m.same_data = nn.Embedding(5, 6), nn.Linear(6, 5), nn.Linear(6, 5)
    m.head.weight = m.embedding.weight
    m.same_data.weight.data = m.embedding.weight.data
    base = torch.randn(10, 3)
    m.upper, m.lower = nn.Parameter(base[:4]), nn.Parameter(base[4:].t())
    m.copied = copy.deepcopy(m.head)
    nn.init.zeros_(m.head.bias)


CASES = [
    *(lstm, attention, embedding, dummy_forward, parametrized, own_rule, buffers, types),
    *(asks_for_values, wants_meta, reads_what_it_writes, made_from_data, random_numbers, ties),
]


def deferred_holder(build: Callable[[Any], None]) -> tuple[Holder, DeferredTensors]:
    torch.manual_seed(5)
    deferred = DeferredTensors()
    with deferred.recording():
        holder = Holder(build)
    return holder, deferred


@pytest.mark.parametrize("build", CASES)
def test_values_are_those_of_tensors_made_at_once(build: Callable[[Any], None]) -> None:
    torch.manual_seed(5)
    expected = Holder(build)
    drawn = torch.rand(3)

    holder, deferred = deferred_holder(build)
    torch.testing.assert_close(torch.rand(3), drawn, rtol=0, atol=0)
    assert any(map(deferred.is_deferred, [*holder.parameters(), *holder.buffers()]))
    now = torch.get_rng_state()
    materialise(holder, deferred)

    assert torch.equal(torch.get_rng_state(), now)
    assert_same(state(holder), state(expected))


def test_ties_stay() -> None:
    holder: Any
    holder, deferred = deferred_holder(ties)
    materialise(holder, deferred)

    assert holder.head.weight is holder.embedding.weight
    assert holder.same_data.weight.data_ptr() == holder.embedding.weight.data_ptr()
    base = holder.upper.untyped_storage().data_ptr()
    assert holder.lower.untyped_storage().data_ptr() == base
    assert holder.copied.weight is not holder.head.weight


def test_recurrent_layers_run_with_what_they_got() -> None:
    holder: Any
    holder, deferred = deferred_holder(lstm)
    materialise(holder, deferred)
    torch.manual_seed(5)
    expected: Any = Holder(lstm)

    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(holder.lstm(x)[0], expected.lstm(x)[0], rtol=0, atol=0)


def test_a_layer_of_another_rank_is_not_made() -> None:
    """But what it shares with a module of this rank is, and stays shared."""

    def build(m: Any) -> None:
        m.mine, m.theirs = nn.LSTM(4, 4), nn.LSTM(4, 4)
        m.theirs.weight_ih_l0 = m.mine.weight_ih_l0
        m.theirs.extra = torch.arange(3.0)

    torch.manual_seed(5)
    expected: Any = Holder(build)
    holder: Any
    holder, deferred = deferred_holder(build)
    kept = {id(tensor) for tensor in holder.mine.parameters()}
    absent(holder.theirs, "theirs", kept)

    materialise(holder, deferred)

    assert_same(dict(holder.mine.named_parameters()), dict(expected.mine.named_parameters()))
    assert holder.theirs.weight_ih_l0 is holder.mine.weight_ih_l0
    assert holder.theirs.weight_hh_l0.is_meta
    assert holder.theirs.extra.is_meta


def test_only_what_is_asked_for_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other tensors, nor values that are overwritten before anybody reads them."""
    made = []

    def do(self: Tape, operation: Any, storages: Any) -> None:
        made.append(operation.function.overloadpacket.__name__)
        original(self, operation, storages)

    original = Tape._do
    monkeypatch.setattr(Tape, "_do", do)
    deferred = DeferredTensors()
    with deferred.recording():
        first, second = nn.Linear(30, 30), nn.Linear(30, 30)
        nn.init.normal_(first.weight)
    (value,) = deferred.values([first.weight])

    assert made == ["normal_"]
    assert not value.is_meta
    assert deferred.is_deferred(second.weight)


def test_what_leaves_the_meta_device_is_deferred() -> None:
    deferred = DeferredTensors()
    with deferred.recording():
        with torch.device("meta"):
            layer = nn.Linear(2, 2)
        at_first = deferred.is_deferred(layer.weight)
        layer.to_empty(device="cpu")
        layer.reset_parameters()

    assert not at_first
    assert deferred.is_deferred(layer.weight)
    assert deferred.device(layer.weight) == CPU


def test_the_outside_of_the_recording_is_untouched() -> None:
    deferred = DeferredTensors()
    with pytest.raises(ZeroDivisionError), deferred.recording():
        nn.Linear(2, 2).weight.data.fill_(1 / 0)

    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.Linear(2, 2).weight.device == CPU


def test_a_scripted_module_is_refused() -> None:
    def build(m: Any) -> None:
        m.scripted = torch.jit.script(nn.Linear(2, 2))

    holder, deferred = deferred_holder(build)

    with pytest.raises(MisconfigurationException, match="build the Python module"):
        materialise(holder, deferred)


def test_old_and_new_tensors_cannot_be_changed_in_one_call() -> None:
    old = torch.ones(2)
    deferred = DeferredTensors()
    with deferred.recording(), pytest.raises(MisconfigurationException, match="two calls"):
        torch._foreach_mul_([old, torch.ones(2)], 2.0)
