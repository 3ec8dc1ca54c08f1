"""A profile, cut into micro-batches of one size: what its runs of layers take and hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.memory import Checkpointing, StageMemory
from lightning_pipe.schedule import Costs, VersionPolicy

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Workload:
    """Times and bytes of any run of layers.

    Args:
        profile: Of all layers.
        batch_size: Samples of a batch.
        num_microbatches: Of a batch.
        checkpointing: Which activations are computed again: a backward is longer by a forward.
        policy: When the weights are updated.
        bandwidth: Of the link between two ranks, in bytes per second, in each direction.
        latency: Seconds from a send until a message without content is there.

    Attributes:
        memory: Of stages; for the largest micro-batch.
        boundary: Seconds for which a link in front of each layer is busy with a micro-batch, there
            and back. At the first layer there is none.
    """

    def __init__(
        self,
        profile: Profile,
        batch_size: int,
        num_microbatches: int,
        checkpointing: Checkpointing = "none",
        policy: VersionPolicy = VersionPolicy.SYNCHRONOUS,
        bandwidth: float = np.inf,
        latency: float = 0.0,
    ) -> None:
        share = batch_size / num_microbatches / profile.batch_size  # on the average
        largest = ceil(batch_size / num_microbatches)
        self.memory = StageMemory(profile, largest, checkpointing, policy)
        layers = profile.layers
        forward = np.array(
            [f.forward_overhead + (f.forward_seconds - f.forward_overhead) * share for f in layers]
        )
        backward = np.array(
            [
                b.backward_overhead + (b.backward_seconds - b.backward_overhead) * share
                for b in layers
            ]
        )
        if checkpointing != "none":
            backward = backward + forward
        sent = np.array([0.0, *(layer.output_bytes for layer in layers[:-1])]) * share
        self.boundary = 2 * sent / bandwidth
        self._latency, self._bandwidth = latency, bandwidth
        self._forward, self._backward = _sums(forward), _sums(backward)
        self._gradients = _sums(np.array([layer.gradient_bytes for layer in layers], dtype=float))
        self.forward_seconds = float(self._forward[-1])
        """Of all layers, one micro-batch."""
        self.seconds = float(self._forward[-1] + self._backward[-1])
        """Of all layers, one micro-batch, forward and backward."""
        self.slowest_layer = float((forward + backward).max())
        """Forward and backward of one micro-batch."""
        self.hop = latency + float(sent[1:].mean() / bandwidth) if len(layers) > 1 else 0.0
        """Seconds of a message, on the average."""

    @property
    def ends(self) -> Floats:
        """Seconds of the first 0, 1, 2, ... layers, forward and backward of a micro-batch."""
        return self._forward + self._backward

    def of_stages(self, start: Integers, stop: Integers) -> Floats:
        """Give the seconds of stages for one micro-batch, forward and backward."""
        forward = self._forward[stop] - self._forward[start]
        return forward + (self._backward[stop] - self._backward[start])

    def costs(self, sizes: Sequence[int], replicas: int = 1) -> Costs:
        """Give what the schedule's simulation takes, in seconds.

        Args:
            sizes: Number of layers of each stage.
            replicas: Pipelines whose gradients are averaged in a ring.
        """
        stop = np.cumsum(sizes)
        start = stop - sizes
        forward = self._forward[stop] - self._forward[start]
        backward = self._backward[stop] - self._backward[start]
        messages = self._latency + self.boundary[start[1:]] / 2
        gradients = self._gradients[stop] - self._gradients[start]
        steps = 2 * (replicas - 1)  # of a ring, each with 1/replicas of the gradients
        reduce = steps * (self._latency + gradients / replicas / self._bandwidth)
        return Costs(
            tuple(forward.tolist()),
            tuple(np.maximum(backward, 0.0).tolist()),
            communication=tuple(messages.tolist()),
            reduce=tuple(reduce.tolist()),
        )

    def link_seconds(self, sizes: Sequence[int], rank_of: Sequence[int]) -> float:
        """Give the time for which the busiest link between two ranks needs for a micro-batch.

        Args:
            sizes: Number of layers of each stage.
            rank_of: Rank of each stage.
        """
        busy: dict[tuple[int, int], float] = {}
        starts = np.cumsum(sizes)[:-1]
        for start, before, after in zip(starts, rank_of[:-1], rank_of[1:], strict=True):
            if before != after:
                link = min(before, after), max(before, after)
                busy[link] = busy.get(link, 0.0) + float(self.boundary[start])
        return max(busy.values(), default=0.0)


def _sums(values: Floats) -> Floats:
    """Give the sums of the first 0, 1, 2, ... values."""
    return np.append(0.0, np.cumsum(values))
