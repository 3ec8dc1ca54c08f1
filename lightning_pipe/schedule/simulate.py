"""Costs in, timeline out: what a plan takes, before anything is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import Backward, Compute, Forward, Instruction, Send
from lightning_pipe.schedule.programs import Plan
from lightning_pipe.schedule.progress import posted_order
from lightning_pipe.schedule.versions import live_versions


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


def simulate(
    plan: Plan,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    communication: float = 0.0,
) -> Timeline:
    """Run a plan on a clock: sends are asynchronous, messages do not slow each other down.

    Args:
        plan: A valid plan.
        forward: Time of a forward, for all stages or by stage. Any unit.
        backward: Time of a backward, likewise; about twice a forward.
        communication: Time from a send until its message can be received. Same unit.

    Returns:
        The timeline, from time 0.

    Raises:
        ScheduleError: If the plan cannot complete.
        ValueError: If there is not one cost per stage, or if a cost is negative.
    """
    num_stages = plan.placement.num_stages
    forward_costs = _per_stage("forward", forward, num_stages)
    backward_costs = _per_stage("backward", backward, num_stages)
    (latency,) = _per_stage("communication", communication, 1)

    available: dict[Instruction, float] = {}  # when others may build on an instruction
    clock = [0.0] * len(plan.programs)
    busy = [0.0] * len(plan.programs)
    events = []
    for rank, instruction, needed in posted_order(plan):
        start = clock[rank]
        end = max([start, *(available[other] for other in needed)])
        if isinstance(instruction, Compute):
            costs = forward_costs if isinstance(instruction, Forward) else backward_costs
            end += costs[instruction.stage]
            busy[rank] += costs[instruction.stage]
        clock[rank] = end
        available[instruction] = end + latency if isinstance(instruction, Send) else end
        events.append(Event(rank, instruction, start, end))

    if len(events) < sum(map(len, plan.programs)):
        raise ScheduleError("the plan cannot complete; validate(plan) says where it stops")
    peak, live = _peak_in_flight(plan), live_versions(plan)
    return Timeline(plan, max(clock), tuple(events), tuple(busy), peak, live)


def _per_stage(name: str, cost: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    """Spread a cost over the stages."""
    costs = tuple(cost) if isinstance(cost, Sequence) else (cost,) * num_stages
    if len(costs) != num_stages or min(costs) < 0:
        raise ValueError(f"{name}={cost} must be one cost, or {num_stages}, none below 0")
    return costs


def _peak_in_flight(plan: Plan) -> tuple[int, ...]:
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
            elif isinstance(step, Backward):
                in_flight[step.stage] -= 1
    return tuple(peak[stage] for stage in range(plan.placement.num_stages))
