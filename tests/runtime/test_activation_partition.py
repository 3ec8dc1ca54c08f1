"""The ranks of a tensor-parallel group keep what enters a stage once, not once each."""

from __future__ import annotations

import copy
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainer.ranks import Ranks

import lightning_pipe.assembly
from lightning_pipe.runtime.activation_offload import ActivationOffload
from lightning_pipe.runtime.activation_partition import ActivationPartition, partition_over
from lightning_pipe.runtime.host_copies import PlainCopies
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.schedule.instructions import Backward, Forward

from .harness import Layout, Module, Rank, Trained, assert_equal, on_ranks, one_device, pipelined
from .test_memory import SavedBytes

WIDTH = 6
TIMEOUT = 20.0


class Threads:
    """Groups of threads of one process: those that hold the same stages.

    Attributes:
        gathered: Bytes that each gather brought, in order, for each member of each group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._barriers: dict[int, threading.Barrier] = {}
        self._boards: dict[int, list[Any]] = {}
        self.gathered: dict[tuple[int, int], list[int]] = {}

    def partition(self, group: int, member: int, min_bytes: int = 1) -> ActivationPartition:
        with self._lock:
            barrier = self._barriers.setdefault(group, threading.Barrier(self.size))
            board = self._boards.setdefault(group, [None] * self.size)
        lengths = self.gathered[group, member] = []

        def all_gather(own: Tensor) -> Tensor:
            board[member] = own
            barrier.wait(TIMEOUT)
            whole = torch.cat(board)
            barrier.wait(TIMEOUT)
            lengths.append(whole.numel())
            return whole

        return ActivationPartition(all_gather, member, self.size, min_bytes)

    def run(self, work: Any) -> list[Any]:
        """Run something for each member of all groups at once; give what it returned."""
        results: list[Any] = [None] * self.size

        def run(member: int) -> None:
            try:
                results[member] = work(member)
            except Exception as error:
                results[member] = error

        threads = [threading.Thread(target=run, args=(m,), daemon=True) for m in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT)
        assert not any(thread.is_alive() for thread in threads)
        return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(8, 3), (7,), (2, 5, 3), (1,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_was_cut_is_gathered(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    threads, whole = Threads(size), torch.randn(shape).to(dtype)

    def work(member: int) -> tuple[Tensor, Tensor]:
        partition = threads.partition(0, member)
        partition.check(whole)
        share = partition.cut(whole)
        return share, partition.gather(share, whole.shape)

    for share, gathered in threads.run(work):
        assert share.untyped_storage().nbytes() == -(-whole.numel() // size) * whole.itemsize
        assert torch.equal(gathered, whole)
        assert gathered.shape == whole.shape


def test_what_is_not_in_order_is_gathered_in_order() -> None:
    threads, whole = Threads(2), torch.randn(4, 6).t()[::2]

    def work(member: int) -> Tensor:
        partition = threads.partition(0, member)
        return partition.gather(partition.cut(whole), whole.shape)

    assert all(torch.equal(gathered, whole) for gathered in threads.run(work))


def test_what_is_cut() -> None:
    partition = Threads(2).partition(0, 0, min_bytes=32)
    assert partition.takes(torch.zeros(8))
    assert not partition.takes(torch.zeros(7))
    assert not partition.takes(torch.zeros(8, dtype=torch.int64))
    assert not partition.takes(torch.zeros(64, dtype=torch.bool))
    assert not partition.takes(nn.Parameter(torch.zeros(8)))
    assert not partition.takes(torch.zeros(8).to_sparse())
    assert not partition.takes(None)


@pytest.mark.parametrize("where", [0, 5], ids=["in the first share", "in the last share"])
@pytest.mark.parametrize("member", [0, 1])
def test_tensors_that_differ_are_refused_on_every_rank(where: int, member: int) -> None:
    threads = Threads(2)

    def work(rank: int) -> None:
        tensor = torch.zeros(6)
        tensor[where] = float(rank == member)
        threads.partition(0, rank).check(tensor)

    for error in threads.run(work):
        assert isinstance(error, MisconfigurationException)
        assert "different values on the ranks of its tensor-parallel group" in str(error)


def test_layers_that_pass_on_parts_are_refused_in_their_first_forward() -> None:
    threads = Threads(2)

    def work(rank: int) -> None:
        stage = Stage(
            0, 2, [nn.Linear(4, 4)], checkpointing="stage", partition=threads.partition(0, rank)
        )
        stage.forward((torch.full((3, 4), float(rank)),), {}, 0, 0)

    errors = threads.run(work)
    assert all(isinstance(error, MisconfigurationException) for error in errors)


def test_not_a_number_is_equal_to_itself() -> None:
    threads = Threads(2)
    tensor = torch.full((6,), float("nan"))
    assert threads.run(lambda rank: threads.partition(0, rank).check(tensor)) == [None, None]


class TwoTensors(nn.Module):
    """What enters it is a tuple: an activation, and something that is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Any) -> Any:
        x, positive = pair if isinstance(pair, tuple) else (pair, pair > 0)
        return self.linear(x).tanh() * positive, positive


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Any) -> Tensor:
        y: Tensor = self.linear(torch.relu_(pair[0]))
        return y


def make_model() -> Module:
    torch.manual_seed(0)
    return Module(*(TwoTensors() for _ in range(7)), Last())


def make_batches(sizes: tuple[int, ...] = (12, 7, 12)) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, WIDTH).double(), torch.randn(n, WIDTH).double()) for n in sizes]


def partitioned(
    layout: Layout, size: int, monkeypatch: pytest.MonkeyPatch, offloaded: bool = False
) -> tuple[list[Trained], Threads]:
    """Train as many equal pipelines as a group has members; each keeps its shares."""
    threads, own, batches = Threads(size), threading.local(), make_batches()
    models = [[make_model() for _ in range(layout.num_ranks)] for _ in range(size)]

    def stage(*args: Any, **kwargs: Any) -> Stage:
        given = {"offload": own.offload, "partition": own.partition}
        return Stage(*args, **kwargs | given)

    monkeypatch.setattr(lightning_pipe.assembly, "Stage", stage)

    def pipeline(member: int) -> Trained:
        def work(transport: Any) -> Trained:
            own.partition = threads.partition(transport.rank, member)
            own.offload = ActivationOffload(PlainCopies(), min_bytes=0) if offloaded else None
            rank = Rank(models[member][transport.rank], layout, transport)
            losses = rank.fit(batches)
            return Trained(rank.weights(), losses)

        first, *others = on_ranks(layout.num_ranks, work)
        for other in others:
            first.weights.update(other.weights)
        return first

    return threads.run(pipeline), threads


LAYOUTS = [
    Layout("gpipe", 2, 4, checkpointing="stage"),
    Layout("1f1b", 2, 4, checkpointing="layer"),
    Layout("interleaved", 2, 4, 2, checkpointing="stage"),
]


@pytest.mark.parametrize("offloaded", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.schedule)
def test_weights_are_those_of_one_device(
    layout: Layout, size: int, offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, threads = partitioned(layout, size, monkeypatch, offloaded)
    expected = one_device(make_model, make_batches())
    for trained in results:
        assert_equal(trained, expected)
    for rank in range(layout.num_ranks):
        orders = [threads.gathered[rank, member] for member in range(size)]
        assert len(orders[0]) >= 12  # micro-batches
        assert all(order == orders[0] for order in orders)  # so that no one waits for ever


@pytest.mark.parametrize(
    "layout",
    [
        Layout("pipedream", 3, 2, checkpointing="stage"),
        Layout("pipedream", 2, 2, vertical_sync=True, checkpointing="layer"),
        Layout("pipedream", 2, 2, weight_stashing=False, checkpointing="layer"),
        Layout("pipedream_2bw", 2, 4, checkpointing="stage"),
    ],
    ids=lambda layout: layout.schedule,
)
def test_an_asynchronous_schedule(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = partitioned(layout, 2, monkeypatch, offloaded=True)
    monkeypatch.undo()
    expected = pipelined(make_model, make_batches(), layout)
    for trained in results:
        assert_equal(trained, expected)


ROWS = 12


def kept_of_a_stage(checkpointing: Any, size: int, offloaded: bool) -> list[tuple[int, int]]:
    """Bytes of three micro-batches that each rank keeps on the device, and on the host."""
    threads = Threads(size)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    inputs = torch.randn(ROWS, WIDTH)

    def work(member: int) -> tuple[int, int]:
        own = copy.deepcopy(layers)
        partition = threads.partition(0, member) if size > 1 else None
        offload = ActivationOffload(PlainCopies(), min_bytes=0) if offloaded else None
        stage = Stage(0, 2, own, checkpointing=checkpointing, offload=offload, partition=partition)
        saved = SavedBytes([parameter for layer in own for parameter in layer.parameters()])
        with saved.measuring():
            outputs = []
            for index in range(3):
                if offload is not None:
                    offload.look_ahead(Forward(0, index), Forward(0, index + 1))
                outputs.append(stage.forward((inputs * (1 + index),), {}, 0, index))
        return saved.peak, offload.host_bytes if offload is not None else 0

    return threads.run(work)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("checkpointing", "units"), [("stage", 1), ("layer", 4)])
def test_each_rank_keeps_its_share(checkpointing: Any, units: int, size: int) -> None:
    share = 3 * units * ROWS * WIDTH * 4 // size
    assert kept_of_a_stage(checkpointing, size, offloaded=False) == [(share, 0)] * size
    assert kept_of_a_stage(checkpointing, size, offloaded=True) == [(0, share)] * size


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def gradients_of_tensor_parallel_layers(checkpointing: Any, offloaded: bool) -> dict[str, Tensor]:
    """Those of one rank, in a real group, each weight made whole."""
    mesh = init_device_mesh("cpu", (dist_size(),), mesh_dim_names=("tensor_parallel",))
    layers, inputs = layers_and_inputs()
    for layer in layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    partition = partition_over(mesh["tensor_parallel"].get_group(), min_bytes=0)
    assert (partition is None) == (dist.get_world_size() == 1)
    offload = ActivationOffload(PlainCopies(), min_bytes=0) if offloaded else None
    stage = Stage(0, 2, layers, checkpointing=checkpointing, offload=offload, partition=partition)
    outputs = []
    for index, x in enumerate(inputs):
        if offload is not None:
            offload.look_ahead(Forward(0, index), Forward(0, index + 1))
        outputs.append(stage.forward((x,), {}, 0, index))
    for index, output in enumerate(outputs):
        if offload is not None:
            offload.look_ahead(Backward(0, index), None)
        output.square().sum().backward()
    assert offload is None or offload.peak_host_bytes > 0
    named = nn.ModuleList(layers).named_parameters()
    gradients = [(name, parameter.grad) for name, parameter in named]
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in gradients
    }


def dist_size() -> int:
    """Start a process group; give the number of ranks."""
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=size)
    return size


def layers_and_inputs() -> tuple[list[Perceptron], list[Tensor]]:
    torch.manual_seed(0)
    layers = [Perceptron().double() for _ in range(3)]
    return layers, [torch.randn(5, WIDTH).double() for _ in range(3)]


@pytest.mark.parametrize(
    ("checkpointing", "offloaded"),
    [("stage", False), ("layer", True), ("none", True)],
)
def test_tensor_parallel_layers(ranks: Ranks, checkpointing: Any, offloaded: bool) -> None:
    layers, inputs = layers_and_inputs()
    module = nn.ModuleList(layers)
    for x in inputs:
        nn.Sequential(*layers)(x).square().sum().backward()
    for gradients in ranks.run(2, gradients_of_tensor_parallel_layers, checkpointing, offloaded):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-10)
