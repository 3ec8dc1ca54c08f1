"""From the name of a schedule to a validated plan."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.exchange import pair_exchanges
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.programs import Placement, Plan
from lightning_pipe.schedule.progress import ReceiveModel, stuck_exchanges
from lightning_pipe.schedule.registry import SCHEDULES, Schedule, schedule_names
from lightning_pipe.schedule.validate import validate
from lightning_pipe.schedule.versions import annotate_versions

__all__ = ["SCHEDULES", "Placement", "Plan", "Schedule", "accepts", "make_plan", "schedule_names"]


@lru_cache(maxsize=128)
def make_plan(
    schedule: str,
    placement: Placement,
    num_microbatches: int,
    receive_model: ReceiveModel = "posted",
) -> Plan:
    """Make the plan of one batch: generate, annotate versions, lower, validate.

    Plans are cached, since every batch asks for one.

    Args:
        schedule: One of `schedule_names()`, or ``"forward"`` for evaluation.
        placement: Which rank holds which stage.
        num_microbatches: Number of micro-batches of the batch.
        receive_model: What the transport does (see `ReceiveModel`). Under ``"rendezvous"`` a
            receive may stand before computes that do not need it yet, where the plan would
            otherwise deadlock.

    Returns:
        A plan that is valid under the receive model.

    Raises:
        ScheduleError: If there is no such schedule, or if it cannot take the placement or the
            number of micro-batches.
    """
    recipe = _look_up(schedule)
    refusal = _refusal(recipe, placement, num_microbatches)
    if refusal is not None:
        raise ScheduleError(refusal)
    order = annotate_versions(recipe.generate(placement, num_microbatches))
    plan = lower(Plan(schedule, placement, num_microbatches, programs=()), order)
    if receive_model == "rendezvous" and stuck_exchanges(plan):
        plan = pair_exchanges(plan)
    validate(plan, receive_model)
    return plan


def accepts(schedule: str, placement: Placement, num_microbatches: int) -> bool:
    """Say whether `make_plan` would take these.

    A short last batch may have a number of micro-batches that its schedule cannot take; ``"gpipe"``
    takes any number over the same stages.

    Raises:
        ScheduleError: If there is no such schedule.
    """
    return _refusal(_look_up(schedule), placement, num_microbatches) is None


def _look_up(schedule: str) -> Schedule:
    """Find a schedule by name."""
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    nearest = get_close_matches(schedule.lower(), schedule_names(), n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ScheduleError(
        f"There is no schedule {schedule!r}.{hint} Choose one of {', '.join(schedule_names())}"
    )


def _refusal(recipe: Schedule, placement: Placement, num_microbatches: int) -> str | None:
    """Say why a schedule cannot run, None if it can."""
    if num_microbatches < 1:
        return f"num_microbatches={num_microbatches} must be at least 1"
    return recipe.refusal(placement, num_microbatches)
