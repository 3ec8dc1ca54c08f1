"""Costs in, timeline out: what a plan takes, before anything is run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_pipe.schedule.costs import Costs
from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import Compute, Forward, Instruction, LastBackward
from lightning_pipe.schedule.programs import Plan
from lightning_pipe.schedule.progress import posted_order
from lightning_pipe.schedule.versions import live_versions

_DEFAULT = Costs()


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction in time, in the unit of the costs.

    Attributes:
        rank: Rank that runs it.
        instruction: What it runs.
        start: When the rank turns to it. A receive includes the wait for its message.
        end: When it is complete. A send is complete at once.
    """

    rank: int
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A plan in time, in the unit of the costs.

    Attributes:
        plan: The plan that was simulated.
        makespan: Time from the first start to the last end.
        events: All instructions, in an order in which they can run.
        busy: Time that each rank computes, by rank.
        peak_in_flight: Most micro-batches in flight at a time on each stage, by stage.
        live_versions: Most versions of the weights held at a time on each stage, by stage.
    """

    plan: Plan
    makespan: float
    events: tuple[Event, ...]
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    live_versions: tuple[int, ...]

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the makespan in which a rank has nothing to compute, by rank."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def mean_bubble(self) -> float:
        """The bubble, averaged over the ranks."""
        return sum(self.bubble) / len(self.bubble)


def simulate(plan: Plan, costs: Costs = _DEFAULT) -> Timeline:
    """Run a plan on a clock: sends are asynchronous, messages do not slow each other down.

    Args:
        plan: A valid plan.
        costs: Of its instructions. Default: a backward twice as long as a forward, all else free.

    Returns:
        The timeline, from time 0.

    Raises:
        ScheduleError: If the plan cannot complete.
        ValueError: If there is not one cost per stage, or if a cost is negative.
    """
    by_stage = costs.by_stage(plan.placement.num_stages)
    available: dict[Instruction, float] = {}  # when others may build on an instruction
    clock = [0.0] * len(plan.programs)
    busy = [0.0] * len(plan.programs)
    events = []
    for rank, instruction, needed in posted_order(plan):
        start = clock[rank]
        cost = by_stage.of(instruction)
        end = max([start, *(available[other] for other in needed)]) + cost
        if isinstance(instruction, Compute):
            busy[rank] += cost
        clock[rank] = end
        available[instruction] = end + by_stage.latency(instruction)
        events.append(Event(rank, instruction, start, end))

    if len(events) < sum(map(len, plan.programs)):
        raise ScheduleError("the plan cannot complete; validate(plan) says where it stops")
    peak, live = peak_in_flight(plan), live_versions(plan)
    return Timeline(plan, max(clock), tuple(events), tuple(busy), peak, live)


def equal_steps(plan: Plan) -> Costs:
    """Give the costs under which a forward, a backward, and each part of one, take one step."""
    return Costs(1.0, 2.0, backward_weight=1.0) if plan.split else Costs(1.0, 1.0)


def peak_in_flight(plan: Plan) -> tuple[int, ...]:
    """Find the most micro-batches that are in flight on each stage at a time."""
    if plan.forward_only:  # without a backward nothing is kept
        return (0,) * plan.placement.num_stages
    in_flight: Counter[int] = Counter()
    peak: Counter[int] = Counter()
    for program in plan.programs:
        for step in program:
            if isinstance(step, Forward):
                in_flight[step.stage] += 1
                peak[step.stage] = max(peak[step.stage], in_flight[step.stage])
            elif isinstance(step, LastBackward):
                in_flight[step.stage] -= 1
    return tuple(peak[stage] for stage in range(plan.placement.num_stages))
