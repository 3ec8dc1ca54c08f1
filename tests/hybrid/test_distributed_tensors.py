"""DTensors in checkpoints and between stages, without a Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from trainer.ranks import Ranks

from lightning_pipe.checkpoint import consolidate, distributed_like, gathered
from lightning_pipe.checkpoint.distributed_tensors import states_like
from lightning_pipe.partition.meta_copy import MetaCopy
from lightning_pipe.runtime.payload import disassemble

WHOLE = torch.arange(35.0).view(7, 5)


def connect(*sizes: int) -> DeviceMesh:
    size = torch.Size(sizes).numel()
    dist.init_process_group("gloo", "env://", rank=local_rank(), world_size=size)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor")[-len(sizes) :])


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def gather_and_cut() -> Any:
    mesh = connect(2, 2)
    placements = {
        "rows": (Replicate(), Shard(0)),  # 7 rows on 2 ranks
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(1), Shard(0)),
        "copies": (Replicate(), Replicate()),
    }
    tree: Any = {name: distribute_tensor(WHOLE, mesh, each) for name, each in placements.items()}
    with torch.device("meta"):
        tree["absent"] = distribute_tensor(torch.empty(7, 5), mesh, placements["rows"])
    tree["plain"] = torch.ones(2)
    written = gathered(tree)
    cut = distributed_like({**written, **dict.fromkeys(placements, WHOLE)}, tree)
    for name, tensor in tree.items():
        assert type(cut[name]) is (Tensor if name == "plain" else DTensor)
        assert cut[name].is_meta == (name == "absent")
        if name in placements:
            assert cut[name].placements == placements[name]
            torch.testing.assert_close(cut[name].to_local(), tensor.to_local(), rtol=0, atol=0)
    state = {"state": {0: {"step": torch.ones(()), "average": WHOLE}}, "param_groups": []}
    states = states_like(state, {0: tree["rows"]})["state"][0]
    assert states["average"].placements == placements["rows"]
    assert type(states["step"]) is Tensor
    return {name: (type(t), t.is_meta, None if t.is_meta else t) for name, t in written.items()}


def test_dtensors_are_written_whole_and_cut_again(ranks: Ranks) -> None:
    first, *others = ranks.run(4, gather_and_cut)
    for name in ("rows", "columns", "both", "copies"):
        assert first[name][0] is Tensor
        torch.testing.assert_close(first[name][2], WHOLE, rtol=0, atol=0)
        assert all(other[name] == (Tensor, True, None) for other in others)  # once is enough
    assert all(written["absent"] == (Tensor, True, None) for written in (first, *others))
    assert all(not written["plain"][1] for written in (first, *others))


def send_counted() -> Any:
    """Ranks 1 to 3 have the same layer, and rank 2 alone the optimizer's state of it."""
    connect(4)
    rank, sent = dist.get_rank(), []
    send = dist.send_object_list

    def counted(objects: list[Any], dst: int) -> None:
        sent.append(objects[0])
        send(objects, dst=dst)

    dist.send_object_list = counted
    try:
        device = "meta" if rank == 0 else "cpu"
        checkpoint = {
            "state_dict": {"weight": torch.full((2,), float(rank), device=device)},
            "optimizer_states": [{"state": {7: {"average": WHOLE}} if rank == 2 else {}}],
        }
        whole = consolidate(checkpoint)
    finally:
        dist.send_object_list = send
    return whole, sent


def test_what_several_ranks_have_is_sent_by_the_first_of_them(ranks: Ranks) -> None:
    (whole, _), *others = ranks.run(4, send_counted)
    assert whole["state_dict"]["weight"].tolist() == [1.0, 1.0]
    torch.testing.assert_close(whole["optimizer_states"][0]["state"][7]["average"], WHOLE)
    counts = [tuple(map(len, *sent)) for _, sent in others]
    assert counts == [(1, 0), (0, 1), (0, 0)]  # weights, optimizer states


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor_parallel",))
    dist.destroy_process_group()


def test_a_dtensor_that_leaves_a_stage_is_refused(alone: DeviceMesh) -> None:
    output = {"scores": DTensor.from_local(WHOLE, alone, [Shard(1)])}
    with pytest.raises(MisconfigurationException, match=r"DTensor .*Shard\(dim=1\).*Replicate"):
        disassemble(output)


def test_a_copy_without_memory_has_whole_layers(alone: DeviceMesh) -> None:
    """Hooks, which it lacks, would give them DTensors for their inputs."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, alone, plan)
    copy = MetaCopy(model, list(model))
    output = copy.module(torch.empty(7, 5, device="meta"))
    assert (output.shape, output.is_meta) == ((7, 3), True)
    assert isinstance(model[0].weight, DTensor)
