"""Choose depth, cuts, schedule, micro-batches and checkpointing for a model and its devices.

Choices are tried in the order of a closed form that is never too high for them: first with the
best that any cut could give, then with the best cuts, found by dynamic programming. The few dozen
that remain are run on the simulated clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count as counting
from math import ceil, inf
from typing import Any, Literal

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.arguments import checked
from lightning_pipe.planning.infeasible import explain, smallest
from lightning_pipe.planning.links import Links
from lightning_pipe.planning.memory import Checkpointing
from lightning_pipe.planning.polish import polished
from lightning_pipe.planning.search import Choice, Search
from lightning_pipe.planning.settings import Problem, Setting, settings_of

_COMPUTES = 2_500_000  # to simulate at most: about three seconds
_POLISHED = 3  # of the best of their groups, whose cuts are made better by simulation
_ALSO_POLISHED = 12  # of all others at most, so that cuts do not decide between depths, ...
_NEAR = 1.1  # ... if they are so near to the best ...
_SMALL = 400  # ... and have no more computes, so that it is quick
_PER_GROUP = 6  # choices of one schedule and number of stages per rank that are simulated


@dataclass(frozen=True)
class Candidate:
    """A configuration, and what is predicted of it.

    Attributes:
        schedule: Its name.
        pipeline_parallel_size: Ranks of a pipeline.
        stages_per_rank: Stages that each holds.
        partition: Number of layers of each stage.
        num_microbatches: Of a replica's batch.
        activation_checkpointing: Which activations are computed again.
        data_parallel_size: Number of pipelines.
        tensor_parallel_size: Devices that share a layer.
        zero_stage: What replicas divide.
        reshard_after_forward: For stage 3, see the strategy.
        step_seconds: Of one batch; in the steady state, if batches overlap.
        samples_per_second: Of all replicas.
        bubble: Share of a step in which a rank computes nothing, by rank.
        peak_bytes: By rank.
    """

    schedule: str
    pipeline_parallel_size: int
    stages_per_rank: int
    partition: tuple[int, ...]
    num_microbatches: int
    activation_checkpointing: Checkpointing
    data_parallel_size: int
    tensor_parallel_size: int
    zero_stage: int
    reshard_after_forward: bool
    step_seconds: float
    samples_per_second: float
    bubble: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices that it uses."""
        one = self.pipeline_parallel_size * self.tensor_parallel_size
        return one * self.data_parallel_size

    @property
    def mean_bubble(self) -> float:
        """The bubble, averaged over the ranks."""
        return sum(self.bubble) / len(self.bubble)

    def strategy_config(self) -> dict[str, Any]:
        """Give the arguments for `lightning_pipe.PipelineStrategy`."""
        config: dict[str, Any] = {
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "stages_per_rank": self.stages_per_rank,
            "partition": list(self.partition),
            "activation_checkpointing": self.activation_checkpointing,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        others: dict[str, tuple[Any, Any]] = {
            "data_parallel_size": (self.data_parallel_size, 1),
            "tensor_parallel_size": (self.tensor_parallel_size, 1),
            "zero_stage": (self.zero_stage, 0),
            "reshard_after_forward": (self.reshard_after_forward, False),
        }
        return config | {name: value for name, (value, usual) in others.items() if value != usual}


def plan(
    profile: Profile,
    devices: int,
    memory_per_device: float | None = None,
    bandwidth: float = inf,
    latency: float = 0.0,
    batch_size: int | None = None,
    schedules: Sequence[str] | None = None,
    activation_checkpointing: Sequence[Checkpointing] = ("none", "stage", "layer"),
    replicas: int | Literal["auto"] | None = None,
    count: int = 10,
    report: Callable[[float], None] | None = None,
    zero_stage: int | Sequence[int] | Literal["auto"] = 0,
    tensor_parallel_size: int = 1,
    devices_per_node: int | None = None,
    node_bandwidth: float | None = None,
) -> tuple[Candidate, ...]:
    """Find the configurations with the shortest step that fit into memory.

    Args:
        profile: Of the model's layers, measured or estimated.
        devices: Number of devices; fewer are used if that is faster.
        memory_per_device: Bytes. Default: unlimited.
        bandwidth: Of the link between two devices, in bytes per second and direction; of one node,
            if there are several.
        latency: Seconds from a send until a message without content has arrived.
        batch_size: Samples of a step, over all replicas. Default: the profile's.
        schedules: To choose from. Default: all synchronous ones. ``"pipedream"`` and
            ``"pipedream_2bw"``, which give other gradients than one device, must be asked for;
            their steady state is compared then.
        activation_checkpointing: To choose from.
        replicas: Number of pipelines that share a batch; ``"auto"``: any number that divides it and
            the number of devices. Default: ``"auto"`` if memory or bandwidth are limited, else 1:
            what costs nothing is always worth it. Parameters that several stages share are left
            out of what replicas send.
        count: Number of configurations to give at most: the best of each schedule, number of
            stages per rank, number of replicas and stage of ZeRO.
        report: Called now and then with the share of the work that is done, 0 to 1.
        zero_stage: What replicas divide, 0 to 3, or several to choose from; ``"auto"``: the lowest
            stage that fits into memory. Equal parts are assumed, and no 32-bit copies.
        tensor_parallel_size: Devices that share each layer, if the module distributes them. Their
            gain is an upper bound: all of a layer's work and parameters are divided, and what they
            send each other is left out.
        devices_per_node: Nodes are filled up; a configuration uses whole nodes, or a part of one.
        node_bandwidth: Of a link between two devices of different nodes. Default: as inside.

    Returns:
        The best configurations, the best one first.

    Raises:
        InfeasibleError: If nothing fits; it says by how much, and what would.
        ValueError: If an argument is out of its range.
        ScheduleError: If there is no such schedule.
    """
    problem = checked(
        profile,
        devices,
        memory_per_device,
        Links(bandwidth, latency, devices_per_node, node_bandwidth),
        batch_size,
        schedules,
        activation_checkpointing,
        replicas,
        zero_stage,
        tensor_parallel_size,
    )
    if problem.memory_per_device < inf:
        least = smallest(problem, problem.memory_per_device)
        if least.bytes > problem.memory_per_device:
            raise explain(problem, least)
    search = Search(problem)
    found = _simulated(problem, search, report)
    for choice, candidate in _worth_polishing(found):
        better = polished(search, choice, problem.memory_per_device)
        if better != choice:
            found.append((better, _candidate(problem, better, search) or candidate))
    return tuple(candidate for _, candidate in _best_of_each(found)[:count])


def _worth_polishing(found: list[tuple[Choice, Candidate]]) -> list[tuple[Choice, Candidate]]:
    """Give the best, of each group and of all."""
    best = _best_of_each(found)
    bound = _NEAR * best[0][1].step_seconds
    near = [
        one
        for one in sorted(found, key=lambda one: one[1].step_seconds)
        if one[1].step_seconds <= bound
        and 2 * one[0].setting.num_stages * one[0].setting.num_microbatches <= _SMALL
    ]
    several = {one[0]: one for one in [*best[:_POLISHED], *near[:_ALSO_POLISHED]]}
    return list(several.values())


class _Queue:
    """Settings in the order of their estimates; those with cuts are better known.

    Args:
        search: Estimates.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._entries: list[tuple[float, int, Setting, Choice | None]] = []
        self._numbers = counting()  # so that equal estimates keep their order

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._entries)

    def put(self, setting: Setting | None, choice: Choice | None = None) -> None:
        """Add a setting, if there is one, and its cuts, if they are known."""
        if setting is not None:
            estimate = choice.estimate if choice else self._search.least_estimate(setting)
            heappush(self._entries, (estimate, next(self._numbers), setting, choice))

    def take(self) -> tuple[Setting, Choice | None]:
        """Remove the one with the least estimate."""
        return heappop(self._entries)[2:]


def _simulated(
    problem: Problem, search: Search, report: Callable[[float], None] | None
) -> list[tuple[Choice, Candidate]]:
    """Try settings in the order of their estimates, and simulate the best."""
    queue = _Queue(search)
    for setting in settings_of(problem):
        queue.put(setting)
    found: list[tuple[Choice, Candidate]] = []
    tried: Counter[tuple[Any, ...]] = Counter()
    computes = 0
    while queue and (computes < _COMPUTES or not found):
        setting, choice = queue.take()
        if tried[_group(setting)] == _PER_GROUP:
            continue
        if choice is None:
            choice = search.cut(setting)
            queue.put(setting if choice else problem.next_zero(setting), choice)
            continue
        if report is not None:
            report(min(1.0, computes / _COMPUTES))
        computes += setting.num_stages * setting.num_microbatches * 2
        fitting = _fitting(problem, choice, search)
        if fitting is None:
            queue.put(problem.next_zero(setting))
        else:
            tried[_group(setting)] += 1
            found.append(fitting)
    if not found:  # memory is so short that the order of the estimates leads nowhere
        choice = smallest(problem).choice
        candidate = _candidate(problem, choice, search)
        assert candidate is not None
        found.append((choice, candidate))
    return found


def _fitting(problem: Problem, choice: Choice, search: Search) -> tuple[Choice, Candidate] | None:
    """Simulate a choice, or the same setting with other cuts if it does not fit."""
    candidate = _candidate(problem, choice, search)
    if candidate is not None:
        return choice, candidate
    tighter = search.cut_tighter(choice.setting)
    candidate = None if tighter is None else _candidate(problem, tighter, search)
    return None if tighter is None or candidate is None else (tighter, candidate)


def _candidate(problem: Problem, choice: Choice, search: Search) -> Candidate | None:
    """Simulate a choice; None if it does not fit."""
    setting = choice.setting
    peak = search.peak_bytes(choice)
    if max(peak) > problem.memory_per_device:
        return None
    seconds, bubble = search.step(choice)
    return Candidate(
        setting.schedule,
        setting.num_ranks,
        setting.stages_per_rank,
        choice.sizes,
        setting.num_microbatches,
        setting.checkpointing,
        setting.replicas,
        problem.tensor,
        setting.zero.stage,
        setting.zero.reshards,
        seconds,
        problem.batch_size / seconds if seconds else inf,
        bubble,
        tuple(ceil(bytes_) for bytes_ in peak),
    )


def _group(choice: Setting) -> tuple[Any, ...]:
    return choice.schedule, choice.stages_per_rank, choice.replicas, choice.zero


def _best_of_each(found: list[tuple[Choice, Candidate]]) -> list[tuple[Choice, Candidate]]:
    """Give the best of each group; of equals the one with the fewest devices, then bytes."""

    def rank(one: tuple[Choice, Candidate]) -> tuple[float, int, int]:
        candidate = one[1]
        seconds = float(f"{candidate.step_seconds:.9g}")
        return seconds, candidate.devices, max(candidate.peak_bytes)

    best: dict[tuple[Any, ...], tuple[Choice, Candidate]] = {}
    for one in sorted(found, key=rank):
        best.setdefault(_group(one[0].setting), one)
    return list(best.values())
