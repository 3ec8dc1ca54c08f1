"""Activations in flight wait in host memory, and training does not notice.

The copies of these tests are made as late as a device may make them: when they are waited for.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lightning_pipe.assembly
from lightning_pipe.runtime.activation_offload import ActivationOffload
from lightning_pipe.runtime.host_copies import CudaCopies, PlainCopies, host_copies
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
)

from . import oracle
from .device_memory import f_then_b
from .harness import Layout, Module, Rank, assert_equal, on_ranks, one_device, pipelined

WIDTH = 4
GARBAGE = 255  # of all bytes: not a number


class LateCopies:
    """Copies when they are waited for, from and to memory that must be there still.

    Attributes:
        sources: The storages that were copied to the host.
        hosts: Those of the copies.
        counts: How many copies were begun, by direction.
    """

    device_type = "cpu"

    def __init__(self) -> None:
        self.sources: list[StorageWeakRef] = []
        self.hosts: list[StorageWeakRef] = []
        self.counts: Counter[str] = Counter()

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        self.counts["to host"] += 1
        host = torch.full_like(source, GARBAGE)
        storage = StorageWeakRef(source.untyped_storage())
        self.sources.append(storage)
        self.hosts.append(StorageWeakRef(host.untyped_storage()))
        first, length = source.storage_offset(), source.numel()

        def copy() -> None:
            assert not storage.expired(), "freed before it was copied"
            memory = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            host.copy_(torch.empty(0, dtype=torch.uint8).set_(memory, first, (length,), (1,)))

        return host, _once(copy)

    def to_device(self, host: Tensor, after: Any) -> tuple[Tensor, Any]:
        self.counts["to device"] += 1
        target = torch.full_like(host, GARBAGE)

        def copy() -> None:
            after()
            target.copy_(host)

        return target, _once(copy)

    def wait(self, ticket: Any) -> None:
        ticket()


def _once(function: Any) -> Any:
    todo = [function]
    return lambda: todo.pop()() if todo else None


class OffloadOnEachRank:
    """Gives all stages that a thread makes one offload.

    Attributes:
        made: One for each rank.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.made: list[tuple[ActivationOffload, LateCopies]] = []

    def stage(self, *args: Any, **kwargs: Any) -> Stage:
        offload = getattr(self._of_thread, "offload", None)
        if offload is None:
            copies = LateCopies()
            offload = self._of_thread.offload = ActivationOffload(copies, min_bytes=0)
            self.made.append((offload, copies))
        return Stage(*args, **kwargs | {"offload": offload})

    def counts(self) -> Counter[str]:
        return sum((copies.counts for _, copies in self.made), Counter())


@pytest.fixture
def offloads(monkeypatch: pytest.MonkeyPatch) -> OffloadOnEachRank:
    """All pipelines that the test makes offload what they can."""
    offloads = OffloadOnEachRank()
    monkeypatch.setattr(lightning_pipe.assembly, "Stage", offloads.stage)
    return offloads


class Attention(nn.Module):
    """Views with gaps, transposes, and one tensor for three products."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        weights = (query.t() @ key).softmax(-1)
        y: Tensor = self.out((value @ weights).relu_())
        return y


class Recomputed(nn.Module):
    """Calls torch's checkpoint by itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return y


def make_model() -> Module:
    torch.manual_seed(0)
    return Module(
        Attention(),
        nn.Tanh(),
        Recomputed(use_reentrant=False),
        nn.LayerNorm(WIDTH),
        nn.Tanh(),
        Attention(),
        nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        nn.Linear(WIDTH, WIDTH),
    )


def exact_model() -> Module:
    """Does not care how a batch is cut, nor for random numbers."""
    torch.manual_seed(0)
    return Module(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def make_batches(sizes: tuple[int, ...] = (12, 7, 12)) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, WIDTH).double(), torch.randn(n, WIDTH).double()) for n in sizes]


LAYOUTS = [
    Layout("naive", 2, 1),
    Layout("gpipe", 2, 4),
    Layout("gpipe", 3, 4, checkpointing="stage"),
    Layout("1f1b", 4, 6),
    Layout("1f1b", 2, 4, checkpointing="layer"),
    Layout("interleaved", 2, 4, 2),
    Layout("interleaved", 2, 4, 4, checkpointing="stage"),
    Layout("interleaved", 2, 4, 2, checkpointing="layer"),
    Layout("zero_bubble", 2, 4),
    Layout("zero_bubble", 2, 4, 2),
    Layout("pipedream", 3, 2),
    Layout("pipedream", 3, 2, checkpointing="stage"),
    Layout("pipedream", 4, 2, vertical_sync=True, checkpointing="layer"),
    Layout("pipedream", 3, 2, weight_stashing=False),
    Layout("pipedream_2bw", 2, 4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.schedule}")
def test_not_a_bit_is_different(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches()
    expected = pipelined(make_model, batches, layout)
    offloads = OffloadOnEachRank()
    monkeypatch.setattr(lightning_pipe.assembly, "Stage", offloads.stage)
    ours = pipelined(make_model, batches, layout)
    assert ours.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(ours.weights[name], weight), name
    assert len(offloads.made) == layout.num_ranks
    if layout.schedule != "naive":
        assert offloads.counts()["to host"] > 0
        assert offloads.counts()["to device"] > 0
    assert all(offload.host_bytes == 0 for offload, _ in offloads.made)  # all gone with the graphs


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "interleaved"])
def test_weights_are_those_of_one_device(schedule: str, offloads: OffloadOnEachRank) -> None:
    layout = Layout(schedule, 2, 4, 2 if schedule == "interleaved" else 1)
    ours = pipelined(exact_model, make_batches(), layout)
    assert offloads.counts()["to device"] > 0
    assert_equal(ours, one_device(exact_model, make_batches()))


@pytest.mark.parametrize("policy", ["stashing", "vertical_sync", "no_stashing"])
def test_old_versions_are_read_in_place(policy: Any, offloads: OffloadOnEachRank) -> None:
    """Without stashing a backward must see updates: its weights must not be copies."""
    layout = Layout(
        "pipedream",
        4,
        2,
        weight_stashing=policy != "no_stashing",
        vertical_sync=policy == "vertical_sync",
    )
    batches = make_batches((8, 8, 7, 8, 8))
    ours = pipelined(exact_model, batches, layout)
    assert offloads.counts()["to device"] > 0
    assert_equal(ours, oracle.train(exact_model, batches, (2, 2, 2, 2), policy, 2))


@pytest.mark.parametrize("checkpointing", ["none", "stage", "layer"])
def test_random_numbers_are_the_same(checkpointing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank: threads share a generator."""

    def make() -> Module:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) * 2
        return Module(*layers)

    layout = Layout("gpipe", 1, 4, 2, checkpointing=checkpointing)
    expected = pipelined(make, make_batches(), layout)
    monkeypatch.setattr(lightning_pipe.assembly, "Stage", OffloadOnEachRank().stage)
    assert pipelined(make, make_batches(), layout).losses == expected.losses


def test_a_reentrant_checkpoint_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Module:
        torch.manual_seed(0)
        return Module(nn.Linear(WIDTH, WIDTH), *(Recomputed(use_reentrant=True) for _ in range(3)))

    expected = pipelined(make, make_batches(), Layout("gpipe"))
    monkeypatch.setattr(lightning_pipe.assembly, "Stage", OffloadOnEachRank().stage)
    assert pipelined(make, make_batches(), Layout("gpipe")).losses == expected.losses


def test_evaluation_copies_nothing(offloads: OffloadOnEachRank) -> None:
    models = [exact_model() for _ in range(2)]

    def work(transport: Any) -> Tensor:
        rank = Rank(models[transport.rank], Layout("gpipe"), transport)
        with torch.no_grad():
            output: Tensor = rank.model.net(make_batches()[0][0])
        return output

    on_ranks(2, work)
    assert not offloads.counts()


def test_where_the_backward_follows_at_once_nothing_leaves(offloads: OffloadOnEachRank) -> None:
    pipelined(exact_model, make_batches(), Layout("1f1b", 2, 4))
    copied = sorted(copies.counts["to host"] > 0 for _, copies in offloads.made)
    assert copied == [False, True]  # the last stage; the first


class Alive(TorchDispatchMode):
    """The most bytes of tensors that were alive at a time, of those made inside."""

    def __init__(self, copies: LateCopies) -> None:
        super().__init__()
        self._copies, self._sizes, self.peak = copies, dict[StorageWeakRef, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        on_device = self._sizes.keys() - set(self._copies.hosts)
        self.peak = max(self.peak, sum(self._sizes[storage] for storage in on_device))
        return output


ROWS = 500  # of a micro-batch: activations are large beside weights


def peak_of_a_stage(checkpointing: Any, count: int, offloaded: bool) -> tuple[int, int]:
    """Most bytes on the "device" in all forwards, then all backwards; and most on the host."""
    copies = LateCopies()
    offload = ActivationOffload(copies, min_bytes=1024) if offloaded else None
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    stage = Stage(0, 2, layers, checkpointing=checkpointing, offload=offload)
    order: list[Any] = [Forward(0, i) for i in range(count)] + [
        Backward(0, i) for i in range(count)
    ]
    outputs: dict[int, Tensor] = {}
    with Alive(copies) as alive:
        for step, following in zip(order, [*order[1:], None], strict=True):
            if offload is not None:
                offload.look_ahead(step, following)
            if isinstance(step, Forward):
                x = torch.randn(ROWS, WIDTH)
                outputs[step.microbatch] = stage.forward((x,), {}, 0, step.microbatch).mean()
                del x
            else:
                outputs.pop(step.microbatch).backward()
    return alive.peak, offload.peak_host_bytes if offload is not None else 0


@pytest.mark.parametrize("checkpointing", ["none", "stage", "layer"])
def test_memory_of_the_device_does_not_grow_with_what_is_in_flight(checkpointing: Any) -> None:
    activation = ROWS * WIDTH * 4
    kept = {"none": 9, "stage": 1, "layer": 8}[checkpointing] * activation  # of a micro-batch
    plain, _ = peak_of_a_stage(checkpointing, 16, offloaded=False)
    peak, on_host = peak_of_a_stage(checkpointing, 16, offloaded=True)
    fewer, _ = peak_of_a_stage(checkpointing, 4, offloaded=True)
    assert on_host == 16 * kept
    assert plain > 16 * kept
    # Two micro-batches, what is computed now, and what is on its way.
    assert peak < 2 * kept + 18 * activation
    assert peak - fewer < 12 * 1024  # graphs, not activations


def test_a_forward_frees_memory_before_it_ends() -> None:
    layers, x = nn.Sequential(*(nn.Tanh() for _ in range(40))), torch.randn(ROWS, WIDTH)
    x.requires_grad_()
    copies = LateCopies()
    offload = ActivationOffload(copies, min_bytes=1024)
    stage = Stage(0, 2, layers, offload=offload)
    offload.look_ahead(Forward(0, 0), Forward(0, 1))
    with Alive(copies) as alive:
        stage.forward((x,), {}, 0, 0)
    assert copies.counts["to host"] == 40
    assert alive.peak <= 8 * x.nbytes  # what is on its way, what was and is computed


def saved(module: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, LateCopies, Any]:
    """The output of a forward that was offloaded."""
    copies = LateCopies()
    offload = ActivationOffload(copies, **({"min_bytes": 0} | options))
    stage = Stage(0, 2, [module], offload=offload)
    offload.look_ahead(Forward(0, 0), Forward(0, 1))
    return stage.forward((x,), {}, 0, 0), copies, offload


def test_a_tensor_that_several_save_is_copied_once() -> None:
    class Fans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.q(x) + self.k(x) + self.v(x)
            return y

    _, copies, offload = saved(Fans(), torch.randn(5, WIDTH))
    assert copies.counts["to host"] == 1
    assert offload.host_bytes == 5 * WIDTH * 4


def test_views_share_a_copy_of_their_storage() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)  # with gaps
            return a * b + (x.t() @ x).sum()

    x = torch.randn(5, WIDTH, requires_grad=True)
    output, copies, _ = saved(Views(), x)
    assert copies.counts["to host"] == 1  # there are gaps in the halves: they take all of it
    output.sum().backward()
    again = x.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(Views()(again).sum(), again)
    assert torch.equal(x.grad, expected)


def test_a_piece_of_a_batch_leaves_without_the_batch() -> None:
    batch = torch.randn(100, WIDTH)
    _, _, offload = saved(nn.Linear(WIDTH, WIDTH), batch[20:25])
    assert offload.host_bytes == 5 * WIDTH * 4


def test_weights_and_what_is_small_stay() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(5, WIDTH, requires_grad=True)
    output, copies, _ = saved(nn.Sequential(layer, nn.Tanh()), x)
    weights = {StorageWeakRef(p.untyped_storage()) for p in layer.parameters()}
    assert copies.counts["to host"] == 2
    assert not weights & set(copies.sources)
    output.sum().backward()
    assert x.grad is not None
    _, copies, _ = saved(layer, x, min_bytes=x.nbytes + 1)
    assert not copies.counts


@pytest.mark.parametrize("min_bytes", [0, 1 << 30], ids=["leaving", "staying"])
def test_what_was_changed_in_place_is_an_error(min_bytes: int) -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = (x * 2).tanh()  # its backward needs the result
            z: Tensor = y + 0
            y.add_(1)
            return z

    x = torch.randn(3, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Spoils()(x).sum().backward()
    output, _, offload = saved(Spoils(), x, min_bytes=min_bytes)
    offload.look_ahead(Backward(0, 0), None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_change_in_place_between_two_that_save() -> None:
    """The same memory, at two versions: each backward gets its own."""

    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            a: Tensor = y.detach() * x  # saves y
            y.mul_(3)
            return a.detach() + y * x  # saves it again

    x = torch.randn(3, WIDTH, requires_grad=True)
    output, _, offload = saved(Changes(), x)
    offload.look_ahead(Backward(0, 0), None)
    output.sum().backward()
    torch.testing.assert_close(x.grad, 12 * x.detach())


def test_the_copy_back_begins_a_computation_early_and_for_each_part() -> None:
    output, copies, offload = saved(nn.Linear(WIDTH, WIDTH), torch.randn(5, WIDTH))
    counts = []
    for step, following in [
        (Forward(0, 1), Forward(0, 2)),
        (Forward(0, 2), BackwardInput(0, 0)),  # begins
        (BackwardInput(0, 0), Forward(0, 3)),  # is there already
        (Forward(0, 3), BackwardInput(0, 1)),  # leaves the device again
        (BackwardInput(0, 1), BackwardWeight(0, 0)),  # for the second part
        (BackwardWeight(0, 0), None),
    ]:
        offload.look_ahead(step, following)
        counts.append(copies.counts["to device"])
    assert counts == [0, 1, 1, 1, 2, 2]
    output.sum().backward()
    assert copies.counts == {"to host": 1, "to device": 2}
    assert offload.host_bytes == 0


def test_a_backward_that_nobody_has_announced() -> None:
    x = torch.randn(5, WIDTH, requires_grad=True)
    output, copies, _ = saved(nn.Tanh(), x)
    output.sum().backward()
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)
    assert copies.counts == {"to host": 1, "to device": 1}


@pytest.mark.parametrize("checkpointing", ["none", "stage", "layer"])
def test_the_measurement(checkpointing: Any) -> None:
    """That of the script for GPUs, as far as it goes without one."""
    measure = partial(f_then_b, torch.device("cpu"), checkpointing=checkpointing, count=3)
    shape = {"width": 64, "rows": 512, "depth": 3}
    plain, ours = measure(copies=None, **shape), measure(copies=PlainCopies(), **shape)
    # Of each layer of linear and GELU: what enters each of the two.
    kept = {"none": 6, "stage": 1, "layer": 3}[checkpointing]
    assert ours.host_bytes >= 2 * kept * 512 * 64 * 4  # the third is read at once
    assert all(map(torch.equal, ours.gradients, plain.gradients))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("checkpointing", ["none", "stage", "layer"])
def test_memory_of_a_gpu(checkpointing: Any) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    plain = f_then_b(device, None, checkpointing)
    ours = f_then_b(device, CudaCopies(device), checkpointing)
    assert all(map(torch.equal, ours.gradients, plain.gradients))
    assert ours.peak_bytes < plain.peak_bytes


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationException, match="in host memory already"):
        host_copies(torch.device("cpu"))
    monkeypatch.setenv("LIGHTNING_PIPE_CPU_OFFLOAD", "1")
    assert isinstance(host_copies(torch.device("cpu")), PlainCopies)
