"""What can be chosen, and about how good each choice is: closed forms, without cuts or plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf

from lightning_pipe.partition.profile import Profile
from lightning_pipe.planning.links import Links
from lightning_pipe.planning.memory import Checkpointing
from lightning_pipe.planning.workload import Workload
from lightning_pipe.planning.zero import Zero
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.schedule import SCHEDULES, BackwardInput, Placement, accepts, schedule_names
from lightning_pipe.schedule.registry import Schedule, look_up

MOST_STAGES_PER_RANK = 4
_MOST_MICROBATCHES = 4096
_SPACING = 1.25
_WORSE_ALONE = frozenset(("naive", "gpipe", "zero_bubble"))


@dataclass(frozen=True)
class Problem:
    """What is given.

    Attributes:
        profile: Of the layers, of which each device has a part if several share a layer.
        devices: That there are.
        batch_size: Samples of a batch, over all replicas.
        memory_per_device: Bytes.
        links: Between devices.
        schedules: To choose from.
        checkpointing: To choose from.
        replicas: To choose from.
        tensor: Devices that share a layer.
        zeros: To choose from.
        lowest_zero: Whether only the first of them that fits is of interest.
    """

    profile: Profile
    devices: int
    batch_size: int
    memory_per_device: float = inf
    links: Links = Links()
    schedules: tuple[str, ...] = ()
    checkpointing: tuple[Checkpointing, ...] = ("none", "stage", "layer")
    replicas: tuple[int, ...] = (1,)
    tensor: int = 1
    zeros: tuple[Zero, ...] = (Zero(),)
    lowest_zero: bool = False

    def workload(self, setting: Setting) -> Workload:
        """Give what the layers take under a setting."""
        return Workload(
            self.profile,
            self.samples(setting.replicas),
            setting.num_microbatches,
            setting.checkpointing,
            setting.recipe.policies[0],
            self.links,
            setting.replicas,
            setting.zero,
        )

    def most_ranks(self, replicas: int) -> int:
        """Give the longest pipeline that there are devices and layers for."""
        return min(self.devices // (replicas * self.tensor), len(self.profile.layers))

    def grid(self, setting: Setting) -> Grid:
        """Give the ranks of a setting."""
        return Grid(setting.num_ranks, setting.replicas, self.tensor)

    def zeros_of(self, schedule: str, replicas: int) -> tuple[Zero, ...]:
        """Give what replicas may divide, as `lightning_pipe.checks` allows it.

        Gradients are not divided where weights change between micro-batches, or backwards come in
        two parts. One replica alone has nothing to divide.
        """
        if replicas == 1:
            return (Zero(),)
        recipe = look_up(schedule)
        divides = not recipe.continuous and not splits_backward(recipe)
        return tuple(zero for zero in self.zeros if divides or zero.stage < 2)

    def next_zero(self, setting: Setting) -> Setting | None:
        """Give the same with less memory, if this one does not fit and any may be chosen."""
        zeros = self.zeros_of(setting.schedule, setting.replicas)
        after = zeros[zeros.index(setting.zero) + 1 :]
        return replace(setting, zero=after[0]) if self.lowest_zero and after else None

    def samples(self, replicas: int) -> int:
        """Give the samples of a batch that the largest replica gets."""
        return -(-self.batch_size // replicas)


@dataclass(frozen=True)
class Setting:
    """What is chosen, but for the cuts.

    Attributes:
        schedule: Its name.
        num_ranks: Of a pipeline.
        stages_per_rank: How many stages each holds.
        num_microbatches: Of a replica's batch.
        checkpointing: Which activations are computed again.
        replicas: Number of pipelines.
        zero: What they divide.
    """

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    checkpointing: Checkpointing = "none"
    replicas: int = 1
    zero: Zero = Zero()

    @property
    def recipe(self) -> Schedule:
        """The schedule itself."""
        return look_up(self.schedule)

    @property
    def num_stages(self) -> int:
        """Of a pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def placement(self) -> Placement:
        """Which rank holds which stage."""
        return _place(self.schedule, self.num_ranks, self.stages_per_rank)

    @property
    def batches(self) -> int | tuple[int, ...]:
        """What `make_plan` takes: a batch, or two of a fill that goes on."""
        count = self.num_microbatches
        return (count, count) if self.recipe.continuous else count

    def with_ranks(self, num_ranks: int) -> Setting:
        """Give the same for another depth."""
        return replace(self, num_ranks=num_ranks)

    def is_valid(self) -> bool:
        """Say whether the strategy takes it."""
        return accepts(self.schedule, self.placement, self.batches)

    def in_flight(self) -> tuple[int, ...]:
        """Bound the micro-batches in flight by rank, over its stages: exact for one stage."""
        bound = self.recipe.max_in_flight
        if bound is None:
            return (self.num_microbatches * self.stages_per_rank,) * self.num_ranks
        # A fill that goes on is as full as a long batch.
        count = max(self.num_microbatches, self.num_ranks) if self.recipe.continuous else 0
        return bound(self.placement, count or self.num_microbatches)

    def estimate(self, workload: Workload, slowest_rank: float) -> float:
        """Give about the seconds of a step; no less than that, where stages differ.

        The formulas of GPipe, 1F1B, interleaved and zero-bubble schedules; a message costs 1F1B
        besides two hops per micro-batch, since stage 0 has just as many in flight as there are
        stages.

        Args:
            workload: Under this setting.
            slowest_rank: Seconds of a micro-batch on all stages of the slowest rank.
        """
        m, ranks, v = self.num_microbatches, self.num_ranks, self.stages_per_rank
        if self.recipe.continuous:
            return m * slowest_rank
        forward = slowest_rank * workload.forward_seconds / max(workload.seconds, 1e-300)
        stall, hop = 0.0, workload.hop
        match self.schedule:
            case "interleaved":
                fill = slowest_rank / v
            case "zero_bubble" if v == 1:  # F + I - W, and W is half of a backward
                fill = forward
                stall = max(0.0, 2 * hop - (slowest_rank - forward) / 2)
            case "zero_bubble":
                fill = forward / v
            case "1f1b":
                fill, stall = slowest_rank, 2 * hop
            case _:
                fill = slowest_rank
        stall *= (ranks - 1) / ranks
        return m * (slowest_rank + stall) + (ranks - 1) * (fill + 2 * hop)


def settings_of(problem: Problem) -> Iterator[Setting]:
    """Give all choices that the number of layers, devices and samples allows.

    If the lowest stage of ZeRO that fits is asked for, only the lowest: `Problem.next_zero` gives
    the others.
    """
    for replicas, schedule in product(problem.replicas, problem.schedules):
        zeros = problem.zeros_of(schedule, replicas)
        zeros = zeros[:1] if problem.lowest_zero else zeros
        for num_ranks in _depths(problem, schedule, replicas):
            for setting in _of_depth(problem, schedule, replicas, num_ranks):
                yield from (replace(setting, zero=zero) for zero in zeros)


def _depths(problem: Problem, schedule: str, replicas: int) -> Iterator[int]:
    """Give lengths of pipelines.

    On a single rank no schedule is better than 1F1B, which is then plain accumulation.
    """
    for num_ranks in range(1, problem.most_ranks(replicas) + 1):
        is_one = num_ranks == 1 and schedule in _WORSE_ALONE and "1f1b" in problem.schedules
        if problem.links.hold(num_ranks * replicas * problem.tensor) and not is_one:
            yield num_ranks


def _of_depth(problem: Problem, schedule: str, replicas: int, num_ranks: int) -> Iterator[Setting]:
    """Give the settings of one schedule on pipelines of one length."""
    splits = splits_backward(look_up(schedule))
    for v in stages_per_rank(schedule, num_ranks, len(problem.profile.layers)):
        for count in microbatch_counts(schedule, num_ranks, problem.samples(replicas)):
            for checkpointing in problem.checkpointing:
                if checkpointing == "none" or not splits:
                    yield Setting(schedule, num_ranks, v, count, checkpointing, replicas)


def stages_per_rank(schedule: str, num_ranks: int, num_layers: int) -> Sequence[int]:
    """Give how many stages a rank may hold."""
    most = min(MOST_STAGES_PER_RANK, num_layers // num_ranks)
    if num_ranks == 1:  # several stages on one rank are one
        return () if schedule == "interleaved" else (1,)
    match schedule:
        case "interleaved":
            return range(2, most + 1)
        case "zero_bubble":
            return range(1, min(most, 2) + 1)
        case _:
            return (1,)


@lru_cache(maxsize=4096)
def microbatch_counts(schedule: str, num_ranks: int, samples: int) -> tuple[int, ...]:
    """Give numbers of micro-batches, a factor of 1.25 to 2 apart.

    Those that make micro-batches of equal size, and others only where there are too few of them:
    with unequal ones ranks wait for each other, which no prediction here knows of. There are at
    most 4096, with which no bubble is left that matters.

    Args:
        schedule: ``"interleaved"`` takes multiples of the ranks only, ``"naive"`` only one.
        num_ranks: Of the pipeline.
        samples: Of a batch; there is at least one in each micro-batch.
    """
    if schedule == "naive":
        return (1,)
    unit = num_ranks if schedule == "interleaved" else 1
    most = min(samples, _MOST_MICROBATCHES) // unit * unit
    counts: list[int] = []
    for count in range(unit, most + 1, unit):
        equal = samples % count == 0 and (not counts or count >= _SPACING * counts[-1])
        if equal or count == most or not counts or count + unit > 2 * counts[-1]:
            counts.append(count)
    return tuple(counts)


@lru_cache(maxsize=64)
def splits_backward(recipe: Schedule) -> bool:
    """Say whether backwards are in two parts, which does not go with checkpointing."""
    placement = recipe.place(2, 1)
    count = next((m for m in range(1, 9) if recipe.refusal(placement, (m,)) is None), None)
    if count is None:
        return False
    order = recipe.generate(placement, count)
    return any(isinstance(step, BackwardInput) for steps in order for step in steps)


@lru_cache(maxsize=4096)
def _place(schedule: str, num_ranks: int, stages_per_rank: int) -> Placement:
    return look_up(schedule).place(num_ranks, stages_per_rank)


def synchronous_schedules() -> tuple[str, ...]:
    """Name all schedules that give the gradients of a single device."""
    return tuple(name for name in schedule_names() if not SCHEDULES[name].continuous)
