"""Draw a plan as text: one row per rank, one column per time slot."""

from __future__ import annotations

from typing import TypeAlias

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    gradient_source,
    last_backward,
)
from lightning_pipe.schedule.programs import Plan
from lightning_pipe.schedule.simulate import Timeline, equal_steps, simulate

_IDLE = ".."
_CONTINUED = "--"

_Rows: TypeAlias = list[list[Compute | str]]


def text_grid(
    plan: Plan | Timeline,
    mark: Instruction | None = None,
    max_slots: int | None = None,
    versions: bool = False,
) -> str:
    """Draw the computes of a plan, one row per rank, one column per time slot.

    ``F0`` is the forward of micro-batch 0, spelled ``2F0`` with its stage if any rank has several;
    ``..`` is idle, and ``--`` goes on with the compute before it.

    Args:
        plan: A timeline, whose slot is its shortest compute; or a plan, drawn with a backward, or
            each part of one, as long as a forward. A plan that cannot complete is drawn without
            time, each rank's computes in their order.
        mark: Put this compute into brackets. For any other instruction the compute that it serves
            is marked; if there is no such compute, ``[2F0?]`` is added to the row of its rank.
        max_slots: Draw at most so many slots, those around the mark. Default: all.
        versions: Spell a compute with the version of the weights that it reads, ``F4@1``.

    Returns:
        The rows, joined by newlines.
    """
    timeline = plan if isinstance(plan, Timeline) else None
    plan = plan.plan if isinstance(plan, Timeline) else plan
    rows = _timed_rows(timeline) if timeline is not None else _plan_rows(plan)
    marked = None if mark is None else _served_by(mark, plan)
    several = plan.placement.num_stages > plan.placement.num_ranks

    def label(cell: Compute | str) -> str:
        if isinstance(cell, str):
            return cell
        spelled = _spelled(cell, several, versions)
        return f"[{spelled}]" if cell == marked else spelled

    labels = [[label(cell) for cell in row] for row in rows]
    if marked is not None and not any(marked in row for row in rows):
        missing = f"[{_spelled(marked, several, versions=False)}?]"
        labels[plan.placement.rank_of[marked.stage]].append(missing)
    return _draw(labels, max_slots)


def _timed_rows(timeline: Timeline) -> _Rows:
    """Put the computes of a timeline into slots as long as its shortest compute."""
    computes = [(e, e.instruction) for e in timeline.events if isinstance(e.instruction, Compute)]
    durations = [event.end - event.start for event, _ in computes]
    slot = min((duration for duration in durations if duration > 0), default=1.0)
    rows: _Rows = [[] for _ in timeline.busy]
    for event, compute in computes:
        row = rows[event.rank]
        row += [_IDLE] * (round(event.start / slot) - len(row))
        row.append(compute)
        row += [_CONTINUED] * (round(event.end / slot) - len(row))
    length = max(map(len, rows))
    return [row + [_IDLE] * (length - len(row)) for row in rows]


def _plan_rows(plan: Plan) -> _Rows:
    """Put the computes of a plan into slots, or side by side if it cannot complete."""
    try:
        return _timed_rows(simulate(plan, equal_steps(plan)))
    except ScheduleError:
        return [[step for step in steps if isinstance(step, Compute)] for steps in plan.programs]


def _served_by(instruction: Instruction, plan: Plan) -> Compute:
    """Find the compute that an instruction serves."""
    match instruction:
        case Forward() | Backward() | BackwardInput() | BackwardWeight():
            return instruction
        case SendActivation(stage, i) | ReceiveActivation(stage, i):
            return Forward(stage, i)
        case SendGradient(stage, i) | ReceiveGradient(stage, i):
            return gradient_source(stage, i, plan)
        case Reduce(stage, update) | Update(stage, update):
            return last_backward(stage, plan.microbatches_of(update)[-1], plan)


def _spelled(compute: Compute, stages: bool, versions: bool) -> str:
    """Spell a compute, with its stage and its version if they are asked for."""
    spelled = str(compute) if stages else str(compute).removeprefix(str(compute.stage))
    return f"{spelled}@{compute.version}" if versions else spelled


def _draw(labels: list[list[str]], max_slots: int | None) -> str:
    """Align the labels in columns, and cut the columns to those around a bracket."""
    length = max(map(len, labels), default=0)
    first, last = 0, length
    if max_slots is not None and length > max_slots:
        bracket = next((row.index(x) for row in labels for x in row if x.startswith("[")), 0)
        first = min(max(0, bracket - max_slots // 2), length - max_slots)
        last = first + max_slots
    width = max((len(label) for row in labels for label in row[first:last]), default=0)
    rank_width = len(str(len(labels) - 1))
    lines = []
    for rank, row in enumerate(labels):
        cells = [label.ljust(width) for label in row[first:last]]
        cells = ["..."] * (first > 0) + cells + ["..."] * (last < len(row))
        lines.append(f"rank {rank:>{rank_width}} | {' '.join(cells)}".rstrip())
    return "\n".join(lines)
