"""What each rank would hold at most, from a profile of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from torch import nn

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.memory import Checkpointing, StageMemory
from lightning_pipe.planning.orders import read_order
from lightning_pipe.planning.zero import Zero
from lightning_pipe.programs import Timing
from lightning_pipe.schedule import VersionPolicy

_FILL = 2  # batches of a fill besides those that it takes to be full


def peak_bytes(
    profile: Profile,
    timing: Timing,
    sizes: Sequence[int],
    batch_size: int,
    checkpointing: Checkpointing,
    outside: Sequence[nn.Parameter] = (),
    replicas: int = 1,
    zero: Zero | None = None,
) -> tuple[int, ...]:
    """Estimate the peak of each rank: weights, gradients, optimizer, activations.

    Args:
        profile: Of the layers.
        timing: What runs when.
        sizes: Number of layers of each stage.
        batch_size: Samples of a replica's batch.
        checkpointing: Which activations are computed again.
        outside: Parameters that each rank has.
        replicas: Of the pipeline.
        zero: What they divide, in equal parts.
    """
    count = timing.count(batch_size)
    placement, policy = timing.placement, timing.policy
    batches: int | tuple[int, ...] = count
    if timing.continuous:
        batches = (count,) * (_FILL + ceil(placement.num_stages / count))
    # With vertical sync each stage keeps as many versions as the first one does with stashing.
    is_synced = policy is VersionPolicy.VERTICAL_SYNC
    counted = VersionPolicy.STASHING if is_synced else policy
    samples = ceil(batch_size / count)
    memory = StageMemory(profile, samples, checkpointing, counted, zero, replicas)
    order = read_order(timing.schedule_for(count), placement, batches, policy)
    peaks = memory.of_ranks(sizes, order)
    if is_synced:
        start = 0
        for stage, size in enumerate(sizes):
            weights = sum(x.parameter_bytes for x in profile.layers[start : start + size])
            peaks[placement.rank_of[stage]] += stage * weights
            start += size
    shared = sum(_held_bytes(parameter, profile) for parameter in outside)
    return tuple(ceil(peak + shared) for peak in peaks)


def _held_bytes(parameter: nn.Parameter, profile: Profile) -> float:
    """Weight, gradient and optimizer state, of which there is as much as for the layers."""
    if not parameter.requires_grad:
        return parameter.nbytes
    trained = sum(layer.gradient_bytes for layer in profile.layers)
    states = sum(layer.optimizer_bytes for layer in profile.layers)
    return parameter.nbytes * (2 + (states / trained if trained else 0.0))
