"""A profile, cut into micro-batches of one size: what its runs of layers take and hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.links import Links
from lightning_pipe.planning.memory import Checkpointing, StageMemory
from lightning_pipe.planning.zero import Ring, Zero
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.schedule import Costs, VersionPolicy

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Workload:
    """Times and bytes of any run of layers.

    Args:
        profile: Of all layers.
        batch_size: Samples of a replica's batch.
        num_microbatches: Of it.
        checkpointing: Which activations are computed again: a backward is longer by a forward.
        policy: When the weights are updated.
        links: Between devices.
        replicas: Of the pipeline.
        zero: What they divide.

    Attributes:
        memory: Of stages; for the largest micro-batch.
        boundary: Seconds for which a link in front of each layer is busy with a micro-batch, there
            and back, if it is one of the fastest. At the first layer there is none.
    """

    def __init__(
        self,
        profile: Profile,
        batch_size: int,
        num_microbatches: int,
        checkpointing: Checkpointing = "none",
        policy: VersionPolicy = VersionPolicy.SYNCHRONOUS,
        links: Links | None = None,
        replicas: int = 1,
        zero: Zero | None = None,
    ) -> None:
        links, zero = links or Links(), zero or Zero()
        share = batch_size / num_microbatches / profile.batch_size  # on the average
        largest = ceil(batch_size / num_microbatches)
        self.memory = StageMemory(profile, largest, checkpointing, policy, zero, replicas)
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
        self._sent = np.array([0.0, *(layer.output_bytes for layer in layers[:-1])]) * share
        self.boundary = 2 * self._sent / links.fastest
        self._links, self._ring = links, Ring.fastest(zero, replicas, links)
        self._computes = _sums(forward + backward)
        self._by_layer = forward, backward
        self._weights = np.array([float(layer.parameter_bytes) for layer in layers])
        self._gradients = np.array([float(layer.gradient_bytes) for layer in layers])
        forward, backward = self._with_traffic(self._ring)
        self._forward, self._backward = _sums(forward), _sums(backward)
        self.forward_seconds = float(self._forward[-1])
        """Of all layers, one micro-batch."""
        self.seconds = float(self._forward[-1] + self._backward[-1])
        """Of all layers, one micro-batch, forward and backward."""
        self.slowest_layer = float((forward + backward).max())
        """Forward and backward of one micro-batch."""
        several = len(layers) > 1
        mean = float(self._sent[1:].mean() / links.fastest) if several else 0.0
        self.hop = links.latency + mean if several else 0.0
        """Seconds of a message, on the average."""

    @property
    def ends(self) -> Floats:
        """Seconds of the first 0, 1, 2, ... layers, forward and backward of a micro-batch."""
        return self._forward + self._backward

    def of_stages(self, start: Integers, stop: Integers) -> Floats:
        """Give the seconds of stages for one micro-batch, forward and backward."""
        forward = self._forward[stop] - self._forward[start]
        return forward + (self._backward[stop] - self._backward[start])

    def computing(self, sizes: Sequence[int]) -> Floats:
        """Give the seconds for which stages compute one micro-batch, forward and backward."""
        return np.diff(self._computes[np.append(0, np.cumsum(sizes))])

    def costs(self, sizes: Sequence[int], rank_of: Sequence[int], grid: Grid) -> Costs:
        """Give what the schedule's simulation takes, in seconds.

        Args:
            sizes: Number of layers of each stage.
            rank_of: Pipeline rank of each stage.
            grid: Of all ranks.
        """
        bounds = np.append(0, np.cumsum(sizes))
        rings = self._rings(rank_of, grid)
        seconds = {ring: self._of_ring(ring, bounds) for ring in set(rings)}
        by_stage = np.array([seconds[ring][:, stage] for stage, ring in enumerate(rings)])
        forward, backward, reduce, update = map(tuple, by_stage.T.tolist())
        messages = tuple(
            self._links.latency + float(self._sent[at]) / self._links.between(grid, one, other)
            for at, one, other in zip(bounds[1:-1], rank_of[:-1], rank_of[1:], strict=True)
        )
        return Costs(forward, backward, communication=messages, reduce=reduce, update=update)

    def begin_seconds(self, sizes: Sequence[int], rank_of: Sequence[int], grid: Grid) -> float:
        """Give for how long the first micro-batch waits, on all stages, until it may enter them."""
        weights, _ = self._by_stage(np.append(0, np.cumsum(sizes)))
        rings = enumerate(self._rings(rank_of, grid))
        return sum(float(ring.begin(weights)[stage]) for stage, ring in rings)

    def link_seconds(self, sizes: Sequence[int], rank_of: Sequence[int], grid: Grid) -> float:
        """Give the time for which the busiest link between two ranks needs for a micro-batch.

        Args:
            sizes: Number of layers of each stage.
            rank_of: Pipeline rank of each stage.
            grid: Of all ranks.
        """
        busy: dict[tuple[int, int], float] = {}
        starts = np.cumsum(sizes)[:-1]
        for start, before, after in zip(starts, rank_of[:-1], rank_of[1:], strict=True):
            if before != after:
                link = min(before, after), max(before, after)
                seconds = 2 * float(self._sent[start]) / self._links.between(grid, before, after)
                busy[link] = busy.get(link, 0.0) + seconds
        return max(busy.values(), default=0.0)

    def _rings(self, rank_of: Sequence[int], grid: Grid) -> list[Ring]:
        """The replicas of each stage."""
        return [
            replace(self._ring, bandwidth=self._links.of_replicas(grid, rank)) for rank in rank_of
        ]

    def _of_ring(self, ring: Ring, bounds: Integers) -> Floats:
        """Seconds of forward, backward, reduction and update x stages, if all had this ring."""
        forward, backward = (np.diff(_sums(part)[bounds]) for part in self._with_traffic(ring))
        weights, gradients = self._by_stage(bounds)
        reduce, update = ring.reduce(gradients), ring.update(weights)
        return np.stack([forward, np.maximum(backward, 0.0), reduce, update])

    def _by_stage(self, bounds: Integers) -> tuple[Floats, Floats]:
        """Bytes of weights and gradients."""
        return np.diff(_sums(self._weights)[bounds]), np.diff(_sums(self._gradients)[bounds])

    def _with_traffic(self, ring: Ring) -> tuple[Floats, Floats]:
        """Seconds of forward and backward by layer, with what replicas send in them."""
        forward, backward = self._by_layer
        forward = forward + ring.each_forward(self._weights)
        return forward, backward + ring.each_backward(self._weights, self._gradients)


def _sums(values: Floats) -> Floats:
    """Give the sums of the first 0, 1, 2, ... values."""
    return np.append(0.0, np.cumsum(values))
