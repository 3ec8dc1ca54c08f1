"""What the replicas of a stage hold and send, by the stage of ZeRO (Rajbhandari et al. 2020).

With N replicas, W bytes of weights, G of gradients and O of optimizer states on a stage, and L of
weights and gradients in its largest layer:

======================  ==============================  ============================================
                        a replica holds                 and sends in a ring, (N-1)/N of
======================  ==============================  ============================================
0                       W + G + O                       2 G once an update
1                       W + G + O/N                     2 G and then W once an update
2                       W + G/N + O/N                   G each backward, W once an update
3                       W + W/N + G + O/N               W before the first forward, G at the end
3, resharding           W/N + G/N + O/N + L             W each forward, W and G each backward
======================  ==============================  ============================================

Stage 3 without resharding gathers a stage's weights, and adds up its whole gradients, while a batch
runs; it spares memory only between batches, so it is no remedy where stage 2 does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planning.links import Links

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Zero:
    """A stage of ZeRO.

    Attributes:
        stage: 0 to 3.
        reshards: For stage 3: whether layers are gathered for each micro-batch.
    """

    stage: Literal[0, 1, 2, 3] = 0
    reshards: bool = False

    @property
    def sends_each_microbatch(self) -> bool:
        """Whether replicas meet in each forward or backward."""
        return self.stage == 2 or self.reshards

    def shares(self, replicas: int) -> tuple[float, float, float]:
        """Give which shares of weights, gradients and optimizer states a replica holds.

        While a batch runs; with several versions of the weights, of each.
        """
        weights = {3: 1 / replicas if self.reshards else 1 + 1 / replicas}.get(self.stage, 1.0)
        gradients = 1 / replicas if self.sends_each_microbatch else 1.0
        return weights, gradients, 1 / replicas if self.stage else 1.0


LOWEST_FIRST = (Zero(0), Zero(1), Zero(2), Zero(3, reshards=True))
"""Each sends more than the one before, and needs less memory, unless a stage is one large layer."""


@dataclass(frozen=True)
class Ring:
    """The replicas of a stage, which send to each other in a ring.

    Attributes:
        zero: What they divide.
        replicas: How many they are.
        bandwidth: Of the slowest link, in bytes per second.
        latency: Seconds of a message without content.
    """

    zero: Zero
    replicas: int
    bandwidth: float
    latency: float

    @classmethod
    def fastest(cls, zero: Zero, replicas: int, links: Links) -> Ring:
        """Give one over the fastest links."""
        return cls(zero, replicas, links.fastest, links.latency)

    def each_forward(self, weights: Floats) -> Floats:
        """Give the seconds that are added to a forward, by layer or stage."""
        return self._once(weights) if self.zero.reshards else np.zeros(len(weights))

    def each_backward(self, weights: Floats, gradients: Floats) -> Floats:
        """Give the seconds that are added to a backward: all; in truth they overlap with it."""
        if not self.zero.sends_each_microbatch:
            return np.zeros(len(weights))
        return self._once(gradients) + (self._once(weights) if self.zero.reshards else 0.0)

    def begin(self, weights: Floats) -> Floats:
        """Give the seconds before a stage's first forward."""
        gathers = self.zero.stage == 3 and not self.zero.reshards
        return self._once(weights) if gathers else np.zeros(len(weights))

    def reduce(self, gradients: Floats) -> Floats:
        """Give the seconds of what begins with a stage's last backward."""
        if self.zero.sends_each_microbatch:
            return np.zeros(len(gradients))
        return (1 if self.zero.stage == 3 else 2) * self._once(gradients)

    def update(self, weights: Floats) -> Floats:
        """Give the seconds in which a stage's updated weights reach all replicas."""
        return self._once(weights) if self.zero.stage in (1, 2) else np.zeros(len(weights))

    def _once(self, sent: Floats) -> Floats:
        """Give the seconds of a reduce-scatter, a gather or a broadcast of so many bytes."""
        steps = self.replicas - 1
        seconds = steps * (self.latency + sent / self.replicas / self.bandwidth)
        return np.where(sent > 0, seconds, 0.0)
