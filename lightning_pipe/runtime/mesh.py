"""Which process does what: one mesh of pipeline, data and tensor parallel ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pipeline_parallel", "data_parallel", "tensor_parallel")


def make_mesh(device: torch.device, pipeline_parallel_size: int) -> DeviceMesh:
    """The mesh of the whole world, pipeline outermost. Collective.

    Lightning users find the other two axes under these names in ``self.device_mesh``.

    Args:
        device: Of this rank; its type is the mesh's.
        pipeline_parallel_size: Ranks in a pipeline.
    """
    return init_device_mesh(device.type, (pipeline_parallel_size, 1, 1), mesh_dim_names=AXES)


@contextmanager
def on_loopback(num_nodes: int) -> Iterator[None]:
    """Inside, new gloo groups of a single machine talk over the loopback interface.

    gloo would look for the interface of the host's name, which may not resolve, and would listen
    to the network. ``GLOO_SOCKET_IFNAME`` wins if the user has set it.
    """
    names = {name for _, name in socket.if_nameindex()}
    if num_nodes > 1 or "GLOO_SOCKET_IFNAME" in os.environ or "lo" not in names:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
