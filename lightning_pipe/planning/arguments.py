"""Check what is asked of the planner, and complete it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Literal, cast

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.links import Links
from lightning_pipe.planning.memory import Checkpointing
from lightning_pipe.planning.settings import Problem, settings_of, synchronous_schedules
from lightning_pipe.planning.zero import LOWEST_FIRST, Zero
from lightning_pipe.schedule import schedule_names
from lightning_pipe.schedule.registry import look_up


def checked(
    profile: Profile,
    devices: int,
    memory_per_device: float | None = None,
    links: Links | None = None,
    batch_size: int | None = None,
    schedules: Sequence[str] | None = None,
    activation_checkpointing: Sequence[Checkpointing] = ("none", "stage", "layer"),
    replicas: int | Literal["auto"] | None = None,
    zero_stage: int | Sequence[int] | Literal["auto"] = 0,
    tensor_parallel_size: int = 1,
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
    links = links or Links()
    _check_links(links, devices, tensor_parallel_size)
    _check_profile(profile, memory_per_device)
    choices = {"none", "stage", "layer"}
    if not activation_checkpointing or not choices.issuperset(activation_checkpointing):
        raise ValueError(
            f"activation_checkpointing={list(activation_checkpointing)} must be some of "
            "'none', 'stage' and 'layer'"
        )
    if replicas is None:
        replicas = "auto" if _have_a_price(profile, memory_per_device, links) else 1
    problem = Problem(
        _of_one_part(profile, tensor_parallel_size),
        devices,
        samples,
        inf if memory_per_device is None else memory_per_device,
        links,
        _names(schedules),
        tuple(activation_checkpointing),
        _replicas(replicas, devices // tensor_parallel_size, samples),
        tensor_parallel_size,
        _zeros(zero_stage),
        zero_stage == "auto",
    )
    if not any(setting.is_valid() for setting in settings_of(problem)):
        raise ValueError(
            f"none of the schedules {', '.join(problem.schedules)} runs {len(profile.layers)} "
            f"layers on {devices} devices with batch_size={samples}, replicas={replicas}, "
            f"zero_stage={zero_stage} and activation_checkpointing="
            f"{list(activation_checkpointing)}: choose '1f1b', which always does"
        )
    return problem


def _check_links(links: Links, devices: int, tensor: int) -> None:
    """Refuse numbers that are out of range, or do not go together."""
    if not links.bandwidth > 0 or not links.latency >= 0:
        raise ValueError(
            f"bandwidth={links.bandwidth} must be above 0, and latency={links.latency} not below it"
        )
    if not 1 <= tensor <= devices:
        raise ValueError(f"tensor_parallel_size={tensor} must be 1 to {devices}, the devices")
    size, between = links.devices_per_node, links.node_bandwidth
    if between is not None and (size is None or not between > 0):
        raise ValueError(
            f"node_bandwidth={between} must be above 0, and needs devices_per_node, so that it is "
            "known which devices it is between"
        )
    if size is not None and (size < 1 or size % tensor):
        raise ValueError(
            f"devices_per_node={size} must be a multiple of tensor_parallel_size={tensor}: devices "
            "that share layers send all the time, and must be in one node"
        )


def _have_a_price(profile: Profile, memory: float | None, links: Links) -> bool:
    """Say whether replicas cost anything: memory or time. Else as many as there can be are best."""
    has_bytes = any(layer.parameter_bytes or layer.gradient_bytes for layer in profile.layers)
    return has_bytes and (memory is not None or links.fastest < inf)


def _of_one_part(profile: Profile, parts: int) -> Profile:
    """Give what a device has to do that shares each layer with others.

    All seconds that shrink with the work do, and all parameters are divided: no layer gains more.
    What goes in, out, and is kept for backward, each has whole, and none gains less. What they
    send each other within a layer is left out.
    """
    if parts == 1:
        return profile
    divided = tuple(
        replace(
            layer,
            forward_seconds=_part(layer.forward_seconds, layer.forward_overhead, parts),
            backward_seconds=_part(layer.backward_seconds, layer.backward_overhead, parts),
            parameter_bytes=ceil(layer.parameter_bytes / parts),
            gradient_bytes=ceil(layer.gradient_bytes / parts),
            optimizer_bytes=ceil(layer.optimizer_bytes / parts),
        )
        for layer in profile.layers
    )
    return replace(profile, layers=divided)


def _part(seconds: float, overhead: float, parts: int) -> float:
    return overhead + (seconds - overhead) / parts


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


def _replicas(replicas: int | Literal["auto"], places: int, samples: int) -> tuple[int, ...]:
    """Give the numbers of pipelines to choose from, for so many places."""
    if replicas == "auto":
        divisors = (r for r in range(1, places + 1) if places % r == 0)
        return tuple(r for r in divisors if samples % r == 0)
    if not 1 <= replicas <= min(places, samples):
        raise ValueError(
            f"replicas={replicas} must be 1 to {min(places, samples)}: at least a device and a "
            "sample for each"
        )
    return (replicas,)


def _zeros(stages: int | Sequence[int] | Literal["auto"]) -> tuple[Zero, ...]:
    """Give what replicas may divide; with stage 3, layers may be gathered for long or not."""
    if stages == "auto":
        return LOWEST_FIRST
    given = (stages,) if isinstance(stages, int) else tuple(stages)
    if not given or not {0, 1, 2, 3}.issuperset(given):
        raise ValueError(f"zero_stage={stages!r} must be 'auto', or some of 0, 1, 2 and 3")
    whole = [Zero(cast("Literal[0, 1, 2, 3]", stage)) for stage in sorted(set(given))]
    return (*whole, Zero(3, reshards=True)) if 3 in given else tuple(whole)
