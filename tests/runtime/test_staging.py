"""Tensors of a device go through host memory. It is `meta` here: that shows where they arrive."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import Tensor
from trainer.ranks import Ranks

from lightning_pipe.runtime.distributed_transport import GlooTransport, on_host
from lightning_pipe.runtime.transport import Channel, PendingObject, send_object


def exchange() -> tuple[str, str, str]:
    """Rank 0 sends one message of each kind; where do they arrive?"""
    torch.distributed.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    timeout = timedelta(seconds=10)
    transport = GlooTransport([[0, 1]], torch.device("meta"), timeout)
    if transport.rank == 0:
        for channel in (Channel.ACTIVATION, Channel.GRADIENT):
            transport.send(channel, 1, torch.ones(2))
        send_object(transport, Channel.CONTROL, 1, "what comes")
        arrived = "", "", ""
    else:
        tensors: list[Tensor] = [
            transport.receive(channel, 0, (2,), torch.float32).wait()
            for channel in (Channel.ACTIVATION, Channel.GRADIENT)
        ]
        said = PendingObject(transport, Channel.CONTROL, 0).wait()
        arrived = tensors[0].device.type, tensors[1].device.type, said
    torch.distributed.barrier()
    transport.close()
    return arrived


def test_tensors_arrive_on_the_device_and_words_on_the_host(ranks: Ranks) -> None:
    assert ranks.run(2, exchange)[1] == ("meta", "meta", "what comes")


def test_what_is_on_the_host_is_not_copied() -> None:
    tensor = torch.ones(3, 2)
    assert on_host(tensor) is tensor
    assert on_host(tensor.T).is_contiguous()
    assert on_host(tensor.T).equal(tensor.T)
