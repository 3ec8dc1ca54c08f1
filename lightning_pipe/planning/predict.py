"""What `schedule.simulate` says, for pipelines that are too large for it: the clock on arrays.

In each sweep every rank whose next compute has what it needs runs it. That many ranks are one
operation on arrays is all that makes it fast; the arithmetic of each compute is that of `simulate`,
in the same order, so that both agree to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planning.orders import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    WEIGHT,
    Integers,
    Order,
    read_order,
)
from lightning_pipe.schedule import (
    BackwardWeight,
    Compute,
    Costs,
    Forward,
    Placement,
    ScheduleError,
    VersionPolicy,
)

Floats = NDArray[np.float64]
_DEFAULT = Costs()
_ROWS = 5  # of end times: forwards, gradients of inputs, of weights; and always, and never
_ALWAYS, _NEVER = 3, 4
_REDUCE, _UPDATE = 1, 2  # bits: what follows a compute


@dataclass(frozen=True, eq=False)
class Prediction:
    """A schedule in time, in the unit of the costs.

    Attributes:
        order: What was predicted.
        makespan: Time from the first start to the last end.
        busy: Time that each rank computes, by rank.
        peak_in_flight: Most micro-batches in flight at a time on each stage, by stage.
        starts: When each compute starts: 3 x stages x micro-batches, for the forwards, the
            backwards (or their parts for the input), and the parts for the weights. NaN where
            there is none.
        ends: When each is complete, likewise.
    """

    order: Order
    makespan: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    starts: Floats
    ends: Floats

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the makespan in which a rank has nothing to compute, by rank."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def mean_bubble(self) -> float:
        """The bubble, averaged over the ranks."""
        return sum(self.bubble) / len(self.bubble)

    def when(self, step: Compute) -> tuple[float, float]:
        """Give the start and the end of a compute."""
        row = 0 if isinstance(step, Forward) else 2 if isinstance(step, BackwardWeight) else 1
        at = row, step.stage, step.microbatch
        return float(self.starts[at]), float(self.ends[at])


def predict(
    schedule: str,
    placement: Placement,
    num_microbatches: int | tuple[int, ...],
    costs: Costs = _DEFAULT,
    policy: VersionPolicy | None = None,
) -> Prediction:
    """Give what ``simulate(make_plan(...), costs)`` would, without making the plan.

    Args:
        schedule: Any that `make_plan` takes.
        placement: Which rank holds which stage.
        num_microbatches: Of the batch, or of each batch of a fill.
        costs: Of computes, messages, reductions and updates.
        policy: One of the schedule's version policies. Default: its first.

    Raises:
        ScheduleError: If the schedule cannot take these, or cannot complete.
        ValueError: If there is not one cost per stage, or if a cost is negative.
    """
    return clock(read_order(schedule, placement, num_microbatches, policy), costs)


def clock(order: Order, costs: Costs = _DEFAULT) -> Prediction:
    """Run an order on a clock; see `predict`.

    Raises:
        ScheduleError: If the order cannot complete.
        ValueError: If there is not one cost per stage, or if a cost is negative.
    """
    by_stage = costs.by_stage(order.num_stages)
    per_input, per_weight = np.array(by_stage.backward_input), np.array(by_stage.backward_weight)
    cost = order.by_label(
        forward=np.array(by_stage.forward),
        backward=per_input + per_weight,
        input=per_input,
        weight=per_weight,
    )
    reduce, update = np.array(by_stage.reduce), np.array(by_stage.update)
    extra = reduce.any() or update.any()
    before, after = _extra_work(order) if extra else (None, None)
    own, needed = _cells(order)
    travel = _travel(order, np.array(by_stage.communication))

    num_ranks, num_stages, count = len(order.labels), order.num_stages, order.plan.num_microbatches
    # The last two rows stand for what is there from the start, and for what never comes.
    ends = np.full(_ROWS * num_stages * count, np.nan)
    ends[_ALWAYS * num_stages * count : _NEVER * num_stages * count] = 0.0
    starts = np.full(3 * num_stages * count, np.nan)
    now, busy = np.zeros(num_ranks), np.zeros(num_ranks)
    labels = np.pad(order.labels, ((0, 0), (0, 1)), constant_values=len(KINDS) * num_stages)
    numbers = np.pad(order.microbatches, ((0, 0), (0, 1)))
    width, flat_labels, flat_numbers = labels.shape[1], labels.ravel(), numbers.ravel()
    heads = np.arange(num_ranks) * width
    while True:
        label, number = flat_labels[heads], flat_numbers[heads]
        arrival = ends[needed[label] + number]
        (ready,) = np.nonzero(~np.isnan(arrival))
        if not ready.size:
            break
        label, number, at = label[ready], number[ready], heads[ready]
        time = now[ready]
        if before is not None:
            time = time + np.where(before[at], update[label % num_stages], 0.0)
        start = np.maximum(time, arrival[ready] + travel[label])
        end = start + cost[label]
        cell = own[label] + number
        starts[cell], ends[cell] = start, end
        busy[ready] += cost[label]
        if after is not None:
            end = end + np.where(after[at] & _REDUCE, reduce[label % num_stages], 0.0)
            end = end + np.where(after[at] & _UPDATE, update[label % num_stages], 0.0)
        now[ready] = end
        heads[ready] += 1
    if (flat_labels[heads] != len(KINDS) * num_stages).any():
        rank = int(np.argmax(flat_labels[heads] != len(KINDS) * num_stages))
        raise ScheduleError(
            f"{order.plan.schedule!r} cannot complete: rank {rank} waits for ever, as "
            "make_plan would say for fewer ranks and micro-batches"
        )
    for stage, updates in _updates_left(order):
        for _ in range(updates):
            now[order.rank_of[stage]] += update[stage]
    shape = 3, num_stages, count
    return Prediction(
        order,
        float(now.max()),
        tuple(busy.tolist()),
        order.peak_in_flight(),
        starts.reshape(shape),
        ends[: 3 * num_stages * count].reshape(shape),
    )


def _cells(order: Order) -> tuple[Integers, Integers]:
    """Say where the end times of a label's micro-batches begin, and those that it waits for."""
    num_stages, count = order.num_stages, order.plan.num_microbatches

    def row(index: int, first: int = 0) -> Integers:
        return (index * num_stages + first + np.arange(num_stages)) * count

    own = np.zeros((len(KINDS) + 1, num_stages), dtype=np.int64)
    needed = np.zeros_like(own)
    own[FORWARD], own[BACKWARD], own[INPUT], own[WEIGHT] = row(0), row(1), row(1), row(2)
    needed[FORWARD], needed[BACKWARD], needed[WEIGHT] = row(0, -1), row(1, 1), row(1)
    needed[FORWARD, 0] = needed[BACKWARD, -1] = _ALWAYS * num_stages * count
    needed[INPUT] = needed[BACKWARD]
    needed[len(KINDS)] = _NEVER * num_stages * count
    return own.ravel(), needed.ravel()


def _travel(order: Order, communication: Floats) -> Floats:
    """Give the time from the end of what a label waits for until it is there."""
    crosses = order.rank_of[1:] != order.rank_of[:-1]
    latency = np.where(crosses, communication, 0.0)
    forward, backward = np.append(0.0, latency), np.append(latency, 0.0)
    return order.by_label(forward=forward, backward=backward, input=backward)


def _extra_work(order: Order) -> tuple[NDArray[np.bool_] | None, NDArray[np.uint8]]:
    """Find the computes that an update comes before, and what follows each, as lower.py puts it.

    Both have one more column than the order, as `clock` pads it, and are flat.
    """
    plan, num_stages = order.plan, order.num_stages
    number_of = _update_numbers(order)
    pad = ((0, 0), (0, 1))
    kinds, stages = order.labels // num_stages, order.labels % num_stages
    updates = number_of[order.microbatches]
    follows = np.zeros(order.labels.shape, dtype=np.uint8)
    bits = _REDUCE if _waits(plan.policy) else _REDUCE | _UPDATE
    for rank in range(len(follows)):
        (backwards,) = np.nonzero((kinds[rank] == BACKWARD) | (kinds[rank] == WEIGHT))
        key = stages[rank, backwards].astype(np.int64) * (number_of.max() + 1)
        key += updates[rank, backwards]
        _, last = np.unique(key[::-1], return_index=True)
        follows[rank, backwards[::-1][last]] = bits
    before = None
    if plan.policy is VersionPolicy.DOUBLE_BUFFERED:
        opens = np.append(True, number_of[1:] != number_of[:-1]) & (number_of >= 2)
        before = np.pad((kinds == FORWARD) & opens[order.microbatches], pad).ravel()
    return before, np.pad(follows, pad).ravel()


def _update_numbers(order: Order) -> Integers:
    """Give the number of the update that each micro-batch's gradient belongs to."""
    plan = order.plan
    match plan.policy:
        case VersionPolicy.SYNCHRONOUS:
            return np.zeros(plan.num_microbatches, dtype=np.int64)
        case VersionPolicy.DOUBLE_BUFFERED:
            return np.repeat(np.arange(len(plan.batches)), plan.batches)
        case _:
            return np.arange(plan.num_microbatches)


def _waits(policy: VersionPolicy) -> bool:
    """Say whether an update comes later than its reduction."""
    return policy in (VersionPolicy.SYNCHRONOUS, VersionPolicy.DOUBLE_BUFFERED)


def _updates_left(order: Order) -> list[tuple[int, int]]:
    """Count the updates of each stage that come when all computes are done."""
    plan = order.plan
    made = 0 if plan.policy is VersionPolicy.SYNCHRONOUS else max(0, len(plan.batches) - 2)
    left = plan.num_updates - made if _waits(plan.policy) else 0
    return [(stage, left) for stage in range(order.num_stages)]
