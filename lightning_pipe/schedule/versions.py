"""Pass: annotate every Forward and Backward with the version of the weights that it must read.

The rule is all that tells the asynchronous schedules apart, besides the place of their `Update`
instructions (lower.py). In it ``w_s = P-1-s`` is the warm-up depth of stage s, and ``i`` is the
number of a micro-batch in its fill. Stage s has made ``i - w_s`` updates when it turns to the
forward of i, so that is its newest version.

================  =========================  ====================
policy            forward of i reads         backward of i reads
================  =========================  ====================
synchronous       0                          the same
stashing          max(0, i - w_s)            the same
vertical sync     max(0, i - w_0)            the same
no stashing       max(0, i - w_s)            i
double buffering  max(0, n - 1), in batch n  the same
================  =========================  ====================
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pipe.schedule.instructions import Compute, Forward, Update
from lightning_pipe.schedule.programs import Plan, VersionPolicy


def annotate_versions(plan: Plan, order: Iterable[list[Compute]]) -> list[list[Compute]]:
    """Give each forward and backward the version that the plan's policy makes it read.

    Args:
        plan: Gives the placement, the batches and the policy; its programs are not read.
        order: Compute order of all ranks.

    Returns:
        The same order, annotated.
    """
    return [
        [type(step)(step.stage, step.microbatch, _version(step, plan)) for step in steps]
        for steps in order
    ]


def _version(step: Compute, plan: Plan) -> int:
    """Apply the rule."""
    i, last = step.microbatch, plan.placement.num_stages - 1
    newest = max(0, i - (last - step.stage))
    match plan.policy:
        case VersionPolicy.SYNCHRONOUS:
            return 0
        case VersionPolicy.STASHING:
            return newest
        case VersionPolicy.VERTICAL_SYNC:
            return max(0, i - last)
        case VersionPolicy.NO_STASHING:
            return newest if isinstance(step, Forward) else i
        case VersionPolicy.DOUBLE_BUFFERED:
            return max(0, plan.update_of(i) - 1)


def live_versions(plan: Plan) -> tuple[int, ...]:
    """Count the versions that each stage holds at a time, at most.

    Those are the newest one and, after each update, all from the oldest one that is still to be
    read.

    Args:
        plan: A valid plan.

    Returns:
        The number by stage; 1 where no old version is ever read.
    """
    live = [1] * plan.placement.num_stages
    for program in plan.programs:
        for step in program:
            if isinstance(step, Update):
                live[step.stage] = max(live[step.stage], step.update + 2 - step.keeps)
    return tuple(live)


def staleness(plan: Plan) -> tuple[int, ...]:
    """Count the updates that a gradient comes late, at most.

    The gradient of a micro-batch belongs to the weights that its forward read. It is applied by
    update k to version k. The difference is 0 with any synchronous schedule.

    Args:
        plan: A valid plan.

    Returns:
        The number by stage.
    """
    stale = [0] * plan.placement.num_stages
    for program in plan.programs:
        for step in program:
            if isinstance(step, Forward):
                late = plan.update_of(step.microbatch) - step.version
                stale[step.stage] = max(stale[step.stage], late)
    return tuple(stale)
