"""From the name of a schedule to a validated plan."""

from __future__ import annotations

from functools import lru_cache

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.exchange import pair_exchanges
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.programs import Placement, Plan, VersionPolicy
from lightning_pipe.schedule.progress import ReceiveModel, stuck_exchanges
from lightning_pipe.schedule.registry import look_up
from lightning_pipe.schedule.validate import validate
from lightning_pipe.schedule.versions import annotate_versions


@lru_cache(maxsize=128)
def make_plan(
    schedule: str,
    placement: Placement,
    num_microbatches: int | tuple[int, ...],
    receive_model: ReceiveModel = "posted",
    policy: VersionPolicy | None = None,
) -> Plan:
    """Make the plan of one fill: generate, annotate versions, lower, validate.

    Plans are cached, since every batch asks for one.

    Args:
        schedule: One of `schedule_names()`, or ``"forward"`` for evaluation.
        placement: Which rank holds which stage.
        num_microbatches: Number of micro-batches of the batch; of each batch, if the fill goes on
            over several.
        receive_model: What the transport does (see `ReceiveModel`). Under ``"rendezvous"`` a
            receive may stand before computes that do not need it yet, where the plan would
            otherwise deadlock.
        policy: One of the schedule's version policies. Default: its first.

    Returns:
        A plan that is valid under the receive model.

    Raises:
        ScheduleError: If there is no such schedule, or if it cannot take the placement, the
            numbers of micro-batches, or the policy.
    """
    recipe = look_up(schedule)
    batches = _batches(num_microbatches)
    refusal = _refusal(schedule, placement, batches, policy)
    if refusal is not None:
        raise ScheduleError(refusal)
    plan = Plan(schedule, placement, batches, policy=policy or recipe.policies[0])
    order = recipe.generate(placement, plan.num_microbatches)
    plan = lower(plan, annotate_versions(plan, order))
    if receive_model == "rendezvous" and stuck_exchanges(plan):
        plan = pair_exchanges(plan)
    validate(plan, receive_model)
    return plan


def accepts(
    schedule: str,
    placement: Placement,
    num_microbatches: int | tuple[int, ...],
    policy: VersionPolicy | None = None,
) -> bool:
    """Say whether `make_plan` would take these.

    A short last batch may have a number of micro-batches that its schedule cannot take; ``"gpipe"``
    takes any number over the same stages.

    Raises:
        ScheduleError: If there is no such schedule.
    """
    return _refusal(schedule, placement, _batches(num_microbatches), policy) is None


def _batches(num_microbatches: int | tuple[int, ...]) -> tuple[int, ...]:
    """Take a number for that of the only batch."""
    return (num_microbatches,) if isinstance(num_microbatches, int) else num_microbatches


def _refusal(
    schedule: str,
    placement: Placement,
    batches: tuple[int, ...],
    policy: VersionPolicy | None,
) -> str | None:
    """Say why a schedule cannot run, None if it can."""
    recipe = look_up(schedule)
    if not batches:
        return "num_microbatches=() must have at least one batch"
    if min(batches) < 1:
        return f"num_microbatches={min(batches)} must be at least 1"
    if len(batches) > 1 and not recipe.continuous:
        return (
            f"num_microbatches={batches} are {len(batches)} batches, but {schedule!r} is "
            "synchronous and drains after each: make a plan for each of them"
        )
    if policy is not None and policy not in recipe.policies:
        known = ", ".join(str(other) for other in recipe.policies)
        return f"policy={policy}, but {schedule!r} takes only {known}"
    return recipe.refusal(placement, batches)
