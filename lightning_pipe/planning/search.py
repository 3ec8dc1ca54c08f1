"""Best cuts for a setting, its peak memory and its simulated step, with what they share kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planning.cuts import Cuts, StageCost
from lightning_pipe.planning.even import even_ranks
from lightning_pipe.planning.orders import Order, read_order
from lightning_pipe.planning.predict import Prediction, clock
from lightning_pipe.planning.settings import MOST_STAGES_PER_RANK, Problem, Setting
from lightning_pipe.planning.workload import Workload
from lightning_pipe.schedule import Costs, VersionPolicy

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_TIGHTER = 16  # times that a setting gets cuts of its own, since memory is short
_MARGIN = 0.9
_EXACTLY_BOUND = frozenset(  # in flight are as many as the schedule allows
    ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream", "pipedream_2bw")
)


@dataclass(frozen=True)
class Choice:
    """A setting and its cuts.

    Attributes:
        setting: All but the cuts.
        sizes: Number of layers of each stage.
        estimate: About the seconds of a step.
    """

    setting: Setting
    sizes: tuple[int, ...]
    estimate: float


class Search:
    """Answers about the settings of one problem.

    Args:
        problem: What is given.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._num_layers = len(problem.profile.layers)
        # Without them, micro-batches of all sizes have the same best cuts.
        self._overheads = any(
            layer.forward_overhead or layer.backward_overhead for layer in problem.profile.layers
        )
        self._tighter = _TIGHTER
        self._workloads: dict[Any, Workload] = {}
        self._cuts: dict[Any, Cuts] = {}
        self._sizes: dict[Any, tuple[int, ...]] = {}
        self._read: Callable[..., Order] = lru_cache(maxsize=8)(read_order)

    def least_estimate(self, setting: Setting) -> float:
        """Estimate a setting without cutting: with equal ranks, or the slowest layer.

        Of what replicas send when a batch ends, only what is known without cuts counts.
        """
        if setting.num_stages == 1:
            return self._choice(setting, (self._num_layers,)).estimate
        workload = self._workload(setting)
        even = max(workload.seconds / setting.num_ranks, workload.slowest_layer)
        return setting.estimate(workload, even)

    def cut(self, setting: Setting) -> Choice | None:
        """Find the best cuts; None if the setting is not valid or does not fit.

        With several stages on a rank it may still turn out not to fit: `peak_bytes` says it.
        """
        if not setting.is_valid() or self._cannot_fit(setting):
            return None
        choice = self._fastest_choice(setting)
        if self._least_peak(choice) <= self._problem.memory_per_device:
            return choice
        if setting.stages_per_rank > 1:
            return self.cut_tighter(setting)
        in_flight = setting.in_flight()[::-1]
        deepest = setting.with_ranks(self._problem.most_ranks(setting.replicas)).in_flight()[::-1]
        if in_flight == deepest[: len(in_flight)]:
            return self._choice_within_memory(setting, deepest)  # one pass serves all depths
        return self._choice_within_memory(setting, in_flight, alone=True)

    def cut_tighter(self, setting: Setting) -> Choice | None:
        """Cut so that each stage fits into its share of the rank's memory; None if none does."""
        if self._tighter == 0:
            return None
        in_flight = self._order(setting).peak_in_flight()[::-1]
        return self._choice_within_memory(setting, in_flight, alone=True)

    def peak_bytes(self, choice: Choice) -> tuple[float, ...]:
        """Give the peak of each rank."""
        memory = self._workload(choice.setting).memory
        return tuple(memory.of_ranks(choice.sizes, self._order(choice.setting)).tolist())

    def step(self, choice: Choice) -> tuple[float, tuple[float, ...]]:
        """Simulate a choice.

        Returns:
            The seconds of a step, and the bubble by rank; both in the steady state, if batches
            overlap. A link that is busy for longer than the ranks sets the pace.
        """
        setting, workload = choice.setting, self._workload(choice.setting)
        rank_of, grid = setting.placement.rank_of, self._problem.grid(setting)
        costs = workload.costs(choice.sizes, rank_of, grid)
        computing = np.zeros(setting.num_ranks)
        np.add.at(computing, np.array(rank_of), workload.computing(choice.sizes))
        if setting.recipe.continuous:
            seconds = self._steady(setting, costs)
        else:
            without = replace(costs, reduce=0.0, update=0.0)
            seconds = _ended(clock(self._order(setting), without), costs)
            seconds += workload.begin_seconds(choice.sizes, rank_of, grid)
        link = workload.link_seconds(choice.sizes, rank_of, grid) * setting.num_microbatches
        seconds = max(seconds, link)
        busy = computing * setting.num_microbatches
        bubble = 1 - busy / seconds if seconds else np.zeros(len(busy))
        return seconds, tuple(np.maximum(bubble, 0.0).tolist())

    def _steady(self, setting: Setting, costs: Costs) -> float:
        """Give the seconds of a batch in a fill that goes on.

        An update that comes a batch later (2BW) leaves that time for the sum over replicas;
        PipeDream's has to wait for it.
        """
        overlaps = setting.recipe.policies[0] is VersionPolicy.DOUBLE_BUFFERED
        without = replace(costs, reduce=0.0) if overlaps else costs
        one, two = (clock(self._order(setting, fills), without).makespan for fills in (1, 2))
        seconds = (two - one) / self._batches_of_fill(setting)
        return max(seconds, *_by_stage(costs.reduce)) if overlaps else seconds

    def _order(self, setting: Setting, fills: int = 1) -> Order:
        count: int | tuple[int, ...] = setting.num_microbatches
        if setting.recipe.continuous:
            count = (setting.num_microbatches,) * (fills * self._batches_of_fill(setting))
        return self._read(setting.schedule, setting.placement, count)

    def _batches_of_fill(self, setting: Setting) -> int:
        """Give so many batches that the steady state is reached."""
        return 2 + ceil(4 * setting.num_ranks / setting.num_microbatches)

    def _workload(self, setting: Setting) -> Workload:
        key = (
            setting.num_microbatches,
            setting.checkpointing,
            setting.recipe.policies[0],
            setting.replicas,
            setting.zero,
        )
        if key not in self._workloads:
            self._workloads[key] = self._problem.workload(setting)
        return self._workloads[key]

    def _fastest_cuts(self, setting: Setting) -> Cuts:
        """Cut for the least of the slowest stage, whatever memory it takes.

        Of several stages per rank, whose numbers of micro-batches are many, those between two
        powers of 2 are cut alike, and then made even by their own seconds.
        """
        several, count = 1, setting.num_microbatches
        if setting.stages_per_rank > 1:
            several, count = MOST_STAGES_PER_RANK, 1 << (count.bit_length() - 1)
        size = (count, setting.zero) if self._depends_on_size(setting) else None
        key = size, setting.checkpointing != "none", several, setting.replicas
        if key not in self._cuts:
            workload = self._workload(replace(setting, num_microbatches=count))
            self._cuts[key] = Cuts(
                self._num_layers,
                min(self._problem.most_ranks(setting.replicas) * several, self._num_layers),
                lambda place, start, stop: workload.of_stages(start, stop),
                workload.boundary,
            )
        return self._cuts[key]

    def _depends_on_size(self, setting: Setting) -> bool:
        """Whether the best cuts are others for other sizes of micro-batches."""
        return self._overheads or setting.zero.sends_each_microbatch

    def _fastest_choice(self, setting: Setting) -> Choice:
        """Cut whatever memory it takes, with even ranks."""
        cuts = self._fastest_cuts(setting)
        depends = self._depends_on_size(setting)
        key = cuts, self._workload(setting) if depends else None, setting.placement
        if key not in self._sizes:
            sizes = cuts.sizes(setting.num_stages)
            if setting.stages_per_rank > 1:
                ends = self._workload(setting).ends
                sizes = even_ranks(sizes, ends, setting.placement.rank_of)
            self._sizes[key] = sizes
        return self._choice(setting, self._sizes[key])

    def _choice_within_memory(
        self, setting: Setting, in_flight: Sequence[int], alone: bool = False
    ) -> Choice | None:
        """Find the best cuts whose stages fit; None if there are none.

        Args:
            setting: For this setting, or one of fewer stages.
            in_flight: Micro-batches in flight, by the number of stages behind.
            alone: Whether this is likely to serve no other setting; that is done a few times only.
        """
        workload = self._workload(setting)
        key = workload, setting.stages_per_rank, tuple(in_flight)
        if key not in self._cuts:
            if alone and self._tighter == 0:
                return None
            self._tighter -= alone
            capacity = self._problem.memory_per_device / setting.stages_per_rank
            cost = within_memory(workload, in_flight, capacity)
            self._cuts[key] = Cuts(self._num_layers, len(in_flight), cost, workload.boundary)
        cuts = self._cuts[key]
        if cuts.costs[setting.num_stages - 1] == inf:
            return None
        return self._choice(setting, cuts.sizes(setting.num_stages))

    def _choice(self, setting: Setting, sizes: tuple[int, ...]) -> Choice:
        workload = self._workload(setting)
        rank_of = np.array(setting.placement.rank_of)
        seconds = np.bincount(rank_of, workload.of_stages(*ranges(sizes)))
        if setting.replicas == 1:
            return Choice(setting, sizes, setting.estimate(workload, float(seconds.max())))
        grid = self._problem.grid(setting)
        costs = workload.costs(sizes, setting.placement.rank_of, grid)
        update = np.bincount(rank_of, _by_stage(costs.update))
        reduce = np.bincount(rank_of, _by_stage(costs.reduce))
        if setting.recipe.continuous:
            each = update + reduce * (setting.recipe.policies[0] is VersionPolicy.STASHING)
            slowest = seconds + each / self._microbatches_of_update(setting)
            return Choice(setting, sizes, setting.estimate(workload, float(slowest.max())))
        rest = workload.begin_seconds(sizes, setting.placement.rank_of, grid)
        rest += float(reduce[0] + update[0])  # rank 0 is the last to end
        return Choice(setting, sizes, setting.estimate(workload, float(seconds.max())) + rest)

    def _microbatches_of_update(self, setting: Setting) -> int:
        is_each = setting.recipe.policies[0] is VersionPolicy.STASHING
        return 1 if is_each else setting.num_microbatches

    def _least_peak(self, choice: Choice) -> float:
        """Give what the fullest rank holds at least; all, if each holds one stage."""
        setting, (start, stop) = choice.setting, ranges(choice.sizes)
        memory = self._workload(setting).memory
        held = memory.held(start, stop, np.arange(len(start))[::-1])
        kept, recomputed = memory.kept(start, stop), memory.recomputed(start, stop)
        rank_of = np.array(setting.placement.rank_of)
        peak = np.bincount(rank_of, held)
        if setting.schedule in _EXACTLY_BOUND:
            least, most = np.full(len(peak), inf), np.zeros(len(peak))
            np.minimum.at(least, rank_of, kept)
            np.maximum.at(most, rank_of, recomputed)
            peak += least * np.array(setting.in_flight()) + most
        return float(peak.max())

    def _cannot_fit(self, setting: Setting) -> bool:
        """Say quickly that the ranks cannot hold the whole model, each as large a share as it can.

        Exactly so if the layers are alike; hence with a margin.
        """
        if self._problem.memory_per_device == inf or setting.schedule not in _EXACTLY_BOUND:
            return False
        memory, ranks = self._workload(setting).memory, setting.num_ranks
        start, stop = np.zeros(ranks, dtype=np.int64), np.full(ranks, self._num_layers)
        if setting.checkpointing == "stage":  # what enters a stage is no share of the model's
            activations = memory.recomputed(start, stop)
        else:
            in_flight = np.array(setting.in_flight()) / setting.stages_per_rank
            activations = in_flight * memory.kept(start, stop)
        whole = memory.held(start, stop, np.arange(ranks)[::-1]) + activations
        shares = self._problem.memory_per_device / np.maximum(whole, 1.0)
        return float(shares.sum()) < _MARGIN


def within_memory(workload: Workload, in_flight: Sequence[int], capacity: float) -> StageCost:
    """Give the seconds of stages, infinite for those that do not fit.

    Args:
        workload: What layers take and hold.
        in_flight: Micro-batches in flight, by the number of stages behind.
        capacity: Bytes for a stage.
    """

    def cost(place: int, start: Integers, stop: Integers) -> Floats:
        peak = workload.memory.of_stages(start, stop, place, in_flight[place])
        return np.where(peak <= capacity, workload.of_stages(start, stop), inf)

    return cost


def _ended(one: Prediction, costs: Costs) -> float:
    """Give when a batch has ended on all ranks, with the sums over replicas, and the updates.

    A stage's sum begins with its last backward, while its rank and others go on; the sums of a
    rank follow each other. The updates of a rank wait for all that it does.

    Args:
        one: The batch, without either.
        costs: Of both.
    """
    reduce, update = _by_stage(costs.reduce), _by_stage(costs.update)
    last = np.fmax.reduce(one.ends, axis=(0, 2))  # of each stage, its last backward
    ended = np.zeros(len(one.busy))
    for stage in np.argsort(last, kind="stable"):
        rank = one.order.rank_of[stage]
        ended[rank] = max(ended[rank], last[stage]) + reduce[stage]
    np.add.at(ended, one.order.rank_of, update)
    return float(max(one.makespan, ended.max()))


def _by_stage(cost: Any) -> Floats:
    return np.array(cost)


def ranges(sizes: Sequence[int]) -> tuple[Integers, Integers]:
    """Give the first layers of stages, and the layers behind their last ones."""
    stop = np.cumsum(sizes)
    return stop - np.array(sizes), stop
