"""Choose depth, cuts, schedule, micro-batches and checkpointing for a model and its devices.

Choices are tried in the order of a closed form that is never too high for them: first with the
best that any cut could give, then with the best cuts, found by dynamic programming. The few dozen
that remain are run on the simulated clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import Any, Literal

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.arguments import checked
from lightning_pipe.planning.infeasible import explain, smallest
from lightning_pipe.planning.memory import Checkpointing
from lightning_pipe.planning.polish import polished
from lightning_pipe.planning.search import Choice, Search
from lightning_pipe.planning.settings import Problem, Setting, settings_of

_COMPUTES = 2_500_000  # to simulate at most: about three seconds
_POLISHED = 3  # of the best, whose cuts are made better by simulation
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
    step_seconds: float
    samples_per_second: float
    bubble: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices that it uses."""
        return self.pipeline_parallel_size * self.data_parallel_size

    @property
    def mean_bubble(self) -> float:
        """The bubble, averaged over the ranks."""
        return sum(self.bubble) / len(self.bubble)

    def strategy_config(self) -> dict[str, Any]:
        """Give the arguments for `lightning_pipe.PipelineStrategy`."""
        config = {
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "stages_per_rank": self.stages_per_rank,
            "partition": list(self.partition),
            "activation_checkpointing": self.activation_checkpointing,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        if self.data_parallel_size > 1:
            config["data_parallel_size"] = self.data_parallel_size
        return config


def plan(
    profile: Profile,
    devices: int,
    memory_per_device: float | None = None,
    bandwidth: float = inf,
    latency: float = 0.0,
    batch_size: int | None = None,
    schedules: Sequence[str] | None = None,
    activation_checkpointing: Sequence[Checkpointing] = ("none", "stage", "layer"),
    replicas: int | Literal["auto"] = 1,
    count: int = 10,
    report: Callable[[float], None] | None = None,
) -> tuple[Candidate, ...]:
    """Find the configurations with the shortest step that fit into memory.

    Args:
        profile: Of the model's layers, measured or estimated.
        devices: Number of devices; fewer are used if that is faster.
        memory_per_device: Bytes. Default: unlimited.
        bandwidth: Of the link between two devices, in bytes per second and direction.
        latency: Seconds from a send until a message without content has arrived.
        batch_size: Samples of a step, over all replicas. Default: the profile's.
        schedules: To choose from. Default: all synchronous ones. ``"pipedream"`` and
            ``"pipedream_2bw"``, which give other gradients than one device, must be asked for;
            their steady state is compared then.
        activation_checkpointing: To choose from.
        replicas: Number of pipelines that share a batch; ``"auto"``: any number that divides it.
        count: Number of configurations to give at most: the best of each schedule, number of
            stages per rank and number of replicas.
        report: Called now and then with the share of the work that is done, 0 to 1.

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
        bandwidth,
        latency,
        batch_size,
        schedules,
        activation_checkpointing,
        replicas,
    )
    if problem.memory_per_device < inf:
        least = smallest(problem)
        if least.bytes > problem.memory_per_device:
            raise explain(problem, least)
    search = Search(problem)
    best = _best_of_each(_simulated(problem, search, report))
    for choice, candidate in best[:_POLISHED]:
        better = polished(search, choice, problem.memory_per_device)
        if better != choice:
            best.append((better, _candidate(problem, better, search) or candidate))
    return tuple(candidate for _, candidate in _best_of_each(best)[:count])


def _simulated(
    problem: Problem, search: Search, report: Callable[[float], None] | None
) -> list[tuple[Choice, Candidate]]:
    """Try settings in the order of their estimates, and simulate the best."""
    queue: list[tuple[float, int, Setting, Choice | None]] = [
        (search.least_estimate(setting), index, setting, None)
        for index, setting in enumerate(settings_of(problem))
    ]
    heapify(queue)
    found: list[tuple[Choice, Candidate]] = []
    tried: Counter[tuple[Any, ...]] = Counter()
    computes = 0
    while queue and (computes < _COMPUTES or not found):
        _, index, setting, choice = heappop(queue)
        group = _group(setting)
        if tried[group] == _PER_GROUP:
            continue
        if choice is None:
            choice = search.cut(setting)
            if choice is not None:
                heappush(queue, (choice.estimate, index, setting, choice))
            continue
        if report is not None:
            report(min(1.0, computes / _COMPUTES))
        candidate = _candidate(problem, choice, search)
        computes += setting.num_stages * setting.num_microbatches * 2
        if candidate is None:
            choice = search.cut_tighter(setting)
            candidate = None if choice is None else _candidate(problem, choice, search)
        if candidate is not None and choice is not None:
            tried[group] += 1
            found.append((choice, candidate))
    if not found:  # memory is so short that the order of the estimates leads nowhere
        choice = smallest(problem).choice
        candidate = _candidate(problem, choice, search)
        assert candidate is not None
        found.append((choice, candidate))
    return found


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
        seconds,
        problem.batch_size / seconds if seconds else inf,
        bubble,
        tuple(ceil(bytes_) for bytes_ in peak),
    )


def _group(choice: Setting) -> tuple[Any, ...]:
    return choice.schedule, choice.stages_per_rank, choice.replicas


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
