"""Check what is asked of the planner, and complete it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.memory import Checkpointing
from lightning_pipe.planning.settings import Problem, settings_of, synchronous_schedules
from lightning_pipe.schedule import schedule_names
from lightning_pipe.schedule.registry import look_up


def checked(
    profile: Profile,
    devices: int,
    memory_per_device: float | None,
    bandwidth: float,
    latency: float,
    batch_size: int | None,
    schedules: Sequence[str] | None,
    activation_checkpointing: Sequence[Checkpointing],
    replicas: int | Literal["auto"],
) -> Problem:
    """Make a problem of the arguments of `lightning_pipe.planning.plan`.

    Raises:
        ValueError: If one is out of its range, or no configuration goes with them.
        ScheduleError: If there is no such schedule.
    """
    samples = profile.batch_size if batch_size is None else batch_size
    for name, value in (("devices", devices), ("batch_size", samples)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not bandwidth > 0 or not latency >= 0:
        raise ValueError(
            f"bandwidth={bandwidth} must be above 0, and latency={latency} not below it"
        )
    _check_profile(profile, memory_per_device)
    choices = {"none", "stage", "layer"}
    if not activation_checkpointing or not choices.issuperset(activation_checkpointing):
        raise ValueError(
            f"activation_checkpointing={list(activation_checkpointing)} must be some of "
            "'none', 'stage' and 'layer'"
        )
    problem = Problem(
        profile,
        devices,
        samples,
        inf if memory_per_device is None else memory_per_device,
        bandwidth,
        latency,
        _names(schedules),
        tuple(activation_checkpointing),
        _replicas(replicas, devices, samples),
    )
    if not any(setting.is_valid() for setting in settings_of(problem)):
        raise ValueError(
            f"none of the schedules {', '.join(problem.schedules)} runs {len(profile.layers)} "
            f"layers on {devices} devices with batch_size={samples} and activation_checkpointing="
            f"{list(activation_checkpointing)}: choose '1f1b', which always does"
        )
    return problem


def _check_profile(profile: Profile, memory_per_device: float | None) -> None:
    """Refuse a profile that lacks what is to be compared."""
    layers = profile.layers
    if not any(layer.forward_seconds + layer.backward_seconds for layer in layers):
        raise ValueError("no layer of the profile takes any time: nothing can be compared")
    if memory_per_device is None:
        return
    if not memory_per_device > 0:
        raise ValueError(f"memory_per_device={memory_per_device} must be above 0")
    if not any(layer.parameter_bytes or layer.activation_bytes for layer in layers):
        raise ValueError(
            f"memory_per_device={memory_per_device}, but the profile has no bytes: measure it "
            "with `lightning-pipe profile`, or leave memory out"
        )


def _names(schedules: Sequence[str] | None) -> tuple[str, ...]:
    """Give the schedules to choose from."""
    names = synchronous_schedules() if schedules is None else tuple(schedules)
    if not names:
        raise ValueError("schedules=() must name at least one")
    for name in names:
        look_up(name)
        if name not in schedule_names():
            raise ValueError(f"schedules: {name!r} does not train on any number of devices")
    return names


def _replicas(replicas: int | Literal["auto"], devices: int, samples: int) -> tuple[int, ...]:
    """Give the numbers of pipelines to choose from."""
    if replicas == "auto":
        return tuple(r for r in range(1, min(devices, samples) + 1) if samples % r == 0)
    if not 1 <= replicas <= min(devices, samples):
        raise ValueError(
            f"replicas={replicas} must be 1 to {min(devices, samples)}: at least a device and a "
            "sample for each"
        )
    return (replicas,)
