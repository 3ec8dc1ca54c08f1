"""Whether anything fits at all, by how many bytes it does not, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import ceil, inf

from lightning_pipe.planning.cuts import Cuts
from lightning_pipe.planning.search import Choice, Floats, Integers, Search
from lightning_pipe.planning.settings import (
    Problem,
    Setting,
    microbatch_counts,
    splits_backward,
    stages_per_rank,
)
from lightning_pipe.planning.zero import LOWEST_FIRST
from lightning_pipe.schedule.registry import look_up

_MORE = 4  # times the devices, at most, are worth telling of


class InfeasibleError(ValueError):
    """Nothing fits into memory.

    Args:
        missing_bytes: By which the closest configuration misses, on its fullest rank.
        closest: What it is, in words.
        remedies: What would make it fit, each alone.

    Attributes:
        missing_bytes: See above.
        closest: See above.
        remedies: See above.
    """

    def __init__(self, missing_bytes: int, closest: str, remedies: tuple[str, ...]) -> None:
        self.missing_bytes, self.closest, self.remedies = missing_bytes, closest, remedies
        super().__init__(
            f"No configuration fits: the closest, {closest}, needs {in_words(missing_bytes)} more "
            f"on its fullest device. It would fit with {'; or '.join(remedies)}."
        )


@dataclass(frozen=True)
class Smallest:
    """The least memory that a problem can do with.

    Attributes:
        choice: How.
        bytes: On the fullest rank.
    """

    choice: Choice
    bytes: float


def smallest(problem: Problem, enough: float = 0.0) -> Smallest:
    """Find the configuration with the least peak.

    It is exact where a rank holds one stage. The smallest micro-batches need the least.

    Args:
        problem: What is given.
        enough: Bytes; the first configuration that needs no more will do.
    """
    search = Search(problem)
    found = []
    for setting in _likely(problem):
        cuts = _least_bytes(problem, setting, setting.num_stages)
        v, each = setting.stages_per_rank, setting.replicas * problem.tensor
        depths = range(1, len(cuts.costs) + 1) if v == 1 else [setting.num_stages]
        num_stages = min(
            (depth for depth in depths if problem.links.hold(depth // v * each)),
            key=lambda depth: cuts.costs[depth - 1],
        )
        own = setting.with_ranks(num_stages // v)
        choice = Choice(own, cuts.sizes(num_stages), inf)
        if own.is_valid():
            found.append(Smallest(choice, max(search.peak_bytes(choice))))
            if found[-1].bytes <= enough:
                return found[-1]
    return min(found, key=lambda one: one.bytes)


def _likely(problem: Problem) -> Iterator[Setting]:
    """Give, for each schedule and kind of checkpointing, the setting that needs the least."""
    for replicas, schedule in product(problem.replicas, problem.schedules):
        zero_stages = problem.zeros_of(schedule, replicas)
        for checkpointing, zero in product(problem.checkpointing, zero_stages):
            if checkpointing != "none" and splits_backward(look_up(schedule)):
                continue
            settings = (
                Setting(schedule, ranks, stages[0], counts[-1], checkpointing, replicas, zero)
                for ranks in range(problem.most_ranks(replicas), 0, -1)
                if problem.links.hold(ranks * replicas * problem.tensor)
                and (counts := microbatch_counts(schedule, ranks, problem.samples(replicas)))
                and (stages := stages_per_rank(schedule, ranks, len(problem.profile.layers)))
            )
            yield from islice((one for one in settings if one.is_valid()), 1)


def _least_bytes(problem: Problem, setting: Setting, max_stages: int) -> Cuts:
    """Cut for the least peak of the fullest stage, for every number of stages."""
    memory = problem.workload(setting).memory
    in_flight = setting.in_flight()[::-1]
    v = setting.stages_per_rank

    def peak(place: int, start: Integers, stop: Integers) -> Floats:
        kept = ceil(in_flight[min(place // v, len(in_flight) - 1)] / v)
        return memory.of_stages(start, stop, place, kept)

    return Cuts(len(problem.profile.layers), max_stages, peak)


def explain(problem: Problem, closest: Smallest) -> InfeasibleError:
    """Say by how much a problem's best configuration misses, and what would help."""
    setting = closest.choice.setting
    devices = setting.num_ranks * setting.replicas * problem.tensor
    words = (
        f"schedule={setting.schedule!r} on {devices} devices with "
        f"num_microbatches={setting.num_microbatches}"
    )
    words += f", data_parallel_size={setting.replicas}" if setting.replicas > 1 else ""
    words += f", zero_stage={setting.zero.stage}" if setting.zero.stage else ""
    words += f" and activation_checkpointing={setting.checkpointing!r}"
    missing = max(1, ceil(closest.bytes - problem.memory_per_device))
    return InfeasibleError(missing, words, tuple(_remedies(problem, closest)))


def _remedies(problem: Problem, closest: Smallest) -> Iterator[str]:
    """Name what would help, each alone."""
    capacity = problem.memory_per_device
    yield f"{in_words(ceil(closest.bytes))} of memory per device"
    devices = _devices_needed(problem, closest.choice.setting)
    if devices is not None:
        yield f"{devices} devices instead of {problem.devices}"
    every = replace(problem, checkpointing=("none", "stage", "layer"))
    if every.checkpointing != problem.checkpointing:
        best = smallest(every)
        if best.bytes <= capacity:
            yield f"activation_checkpointing={best.choice.setting.checkpointing!r}"
    if problem.zeros != LOWEST_FIRST and problem.replicas != (1,):
        best = smallest(replace(problem, zeros=LOWEST_FIRST))
        if best.bytes <= capacity:
            yield f"zero_stage={best.choice.setting.zero.stage}"
    if "1f1b" not in problem.schedules:
        best = smallest(replace(problem, schedules=("1f1b",)))
        if best.bytes <= capacity:
            yield "schedule='1f1b'"
    setting = closest.choice.setting
    alike = replace(problem, schedules=(setting.schedule,), replicas=(setting.replicas,))
    samples = _samples_that_fit(alike)
    if samples:
        yield f"batch_size={samples} instead of {problem.batch_size}"


def _devices_needed(problem: Problem, setting: Setting) -> int | None:
    """Find the fewest devices on which a setting fits; None if four times as many do not do."""
    if setting.stages_per_rank > 1:
        return None
    each = setting.replicas * problem.tensor
    most = replace(problem, devices=_MORE * problem.devices).most_ranks(setting.replicas)
    cuts = _least_bytes(problem, setting.with_ranks(most), most)
    fitting = (
        depth
        for depth, peak in enumerate(cuts.costs, 1)
        if peak <= problem.memory_per_device and problem.links.hold(depth * each)
    )
    ranks = next(fitting, None)
    return None if ranks is None else ranks * each


def _samples_that_fit(problem: Problem) -> int | None:
    """Find the largest smaller batch that fits, a share for each replica; None if there is none."""
    (replicas,) = problem.replicas

    def fits(share: int) -> bool:
        smaller = replace(problem, batch_size=share * replicas)
        capacity = problem.memory_per_device
        return smallest(smaller, capacity).bytes <= capacity

    low, high = 1, problem.samples(replicas)
    if high <= low or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * replicas


def in_words(number: float) -> str:
    """Write a number of bytes with a unit, never less than it is."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{ceil(100 * number / size) / 100:g} {unit}"
    return f"{ceil(number)} bytes"
