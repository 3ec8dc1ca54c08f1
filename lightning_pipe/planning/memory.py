"""What a stage, and a rank, holds at most: weights, gradients, optimizer state, activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.orders import Order
from lightning_pipe.planning.ranges import RangeMinimum
from lightning_pipe.planning.zero import Zero
from lightning_pipe.schedule import VersionPolicy

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Checkpointing: TypeAlias = Literal["none", "stage", "layer"]


class StageMemory:
    """Bytes of any run of layers, for micro-batches of one size.

    Activations are in proportion to the samples. Of each micro-batch in flight is kept, until its
    last backward:

    ==========  ===================================================================
    ``none``    all that the layers keep for their backward
    ``stage``   what enters the stage; while one backward runs, all of it once more
    ``layer``   what enters each layer; while one backward runs, the largest layer
    ==========  ===================================================================

    Args:
        profile: Bytes of each layer.
        samples: In a micro-batch, the largest if they differ.
        checkpointing: Which activations are computed again instead of kept.
        policy: How many versions of the weights and gradients there are.
        zero: What replicas divide, in equal parts.
        replicas: How many there are.
    """

    def __init__(
        self,
        profile: Profile,
        samples: int,
        checkpointing: Checkpointing = "none",
        policy: VersionPolicy = VersionPolicy.SYNCHRONOUS,
        zero: Zero | None = None,
        replicas: int = 1,
    ) -> None:
        layers, share = profile.layers, samples / profile.batch_size
        self._checkpointing, self._policy = checkpointing, policy
        self._num_layers = len(layers)
        self._loss = profile.loss_activation_bytes * share
        activation = np.array([layer.activation_bytes for layer in layers]) * share
        outputs = [layer.output_bytes for layer in layers[:-1]]
        self._enters = np.array([profile.input_bytes, *outputs]) * share
        self._activations, self._inputs = _sums(activation), _sums(self._enters)
        self._largest = RangeMinimum(-activation)
        zero = zero or Zero()
        weights, gradients, states = zero.shares(replicas)
        self._parameters = _sums([weights * layer.parameter_bytes for layer in layers])
        # With 2BW, a batch's gradients wait while those of the next add up.
        gradients *= 2 if policy is VersionPolicy.DOUBLE_BUFFERED else 1
        self._others = _sums(
            [gradients * layer.gradient_bytes + states * layer.optimizer_bytes for layer in layers]
        )
        whole = np.array([float(layer.parameter_bytes + layer.gradient_bytes) for layer in layers])
        self._gathered = RangeMinimum(-whole) if zero.reshards else None

    def held(self, start: Integers, stop: Integers, place: int | Integers) -> Floats:
        """Give what stages hold all the time.

        Args:
            start: Their first layers.
            stop: The layers behind their last ones.
            place: How many stages are behind them, which sets the versions that they keep.
        """
        parameters = self._parameters[stop] - self._parameters[start]
        others = self._others[stop] - self._others[start]
        if self._gathered is not None:
            others = others - self._gathered.least(start, stop)
        return live_versions(self._policy, place) * parameters + others

    def kept(self, start: Integers, stop: Integers) -> Floats:
        """Give what stages keep of each micro-batch in flight."""
        match self._checkpointing:
            case "none":
                kept = self._activations[stop] - self._activations[start]
            case "stage":
                kept = self._enters[start]
            case "layer":
                kept = self._inputs[stop] - self._inputs[start]
        return kept + np.where(stop == self._num_layers, self._loss, 0.0)

    def recomputed(self, start: Integers, stop: Integers) -> Floats:
        """Give what stages hold besides while a backward recomputes."""
        match self._checkpointing:
            case "none":
                return np.zeros(len(start))
            case "stage":
                return self._activations[stop] - self._activations[start]
            case "layer":
                return -self._largest.least(start, stop)

    def of_stages(
        self, start: Integers, stop: Integers, place: int | Integers, in_flight: int | Integers
    ) -> Floats:
        """Give the peak of stages that are alone on their rank."""
        activations = in_flight * self.kept(start, stop) + self.recomputed(start, stop)
        return self.held(start, stop, place) + activations

    def of_ranks(self, sizes: Sequence[int], order: Order) -> Floats:
        """Give the peak of each rank.

        Args:
            sizes: Number of layers of each stage.
            order: When which micro-batch is in flight.
        """
        stop = np.cumsum(sizes)
        start: Integers = stop - np.array(sizes)
        place = np.arange(len(sizes))[::-1]
        held, recomputed = self.held(start, stop, place), self.recomputed(start, stop)
        peak = order.peak_kept(self.kept(start, stop))
        for rank in range(len(peak)):
            mine = order.rank_of == rank
            peak[rank] += held[mine].sum() + recomputed[mine].max()
        return peak


def live_versions(policy: VersionPolicy, place: int | Integers) -> int | Integers:
    """Count the versions of the weights that a stage keeps, in the steady state.

    `lightning_pipe.schedule.live_versions` counts those of a plan, which are these as soon as the
    plan is long enough.

    Args:
        policy: All but vertical sync, which depends on the whole pipeline.
        place: Number of stages behind.

    Raises:
        ValueError: For vertical sync.
    """
    match policy:
        case VersionPolicy.SYNCHRONOUS | VersionPolicy.NO_STASHING:
            return 1
        case VersionPolicy.STASHING:
            return place + 1
        case VersionPolicy.DOUBLE_BUFFERED:  # the last stage is done with one before the next comes
            return np.minimum(place, 1) + 1
        case VersionPolicy.VERTICAL_SYNC:
            raise ValueError("vertical sync keeps as many versions as there are stages, on each")


def _sums(values: Sequence[float] | Floats) -> Floats:
    """Give the sums of the first 0, 1, 2, ... values."""
    return np.append(0.0, np.cumsum(np.asarray(values, dtype=np.float64)))
