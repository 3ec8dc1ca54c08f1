"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.forward_only import forward_only
from lightning_pipe.schedule.gpipe import gpipe, gpipe_in_flight, gpipe_refusal, naive_refusal
from lightning_pipe.schedule.interleaved import (
    interleaved,
    interleaved_in_flight,
    interleaved_refusal,
)
from lightning_pipe.schedule.one_f_one_b import (
    one_f_one_b,
    one_f_one_b_in_flight,
    one_f_one_b_refusal,
)
from lightning_pipe.schedule.pipedream import (
    pipedream,
    pipedream_2bw_refusal,
    pipedream_refusal,
)
from lightning_pipe.schedule.programs import (
    FORWARD_ONLY,
    ComputeOrder,
    Placement,
    VersionPolicy,
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that is particular to one schedule.

    Attributes:
        generate: Gives the compute order of all ranks, for so many micro-batches in all.
        refusal: Says why the schedule cannot run batches of so many micro-batches each, with what
            to change, or None if it can.
        max_in_flight: Gives, by rank, how many micro-batches may be in flight, summed over the
            rank's stages, for so many micro-batches in all.
        policies: The version policies that it can follow; the first is the default.
    """

    generate: Callable[[Placement, int], ComputeOrder]
    refusal: Callable[[Placement, tuple[int, ...]], str | None]
    max_in_flight: Callable[[Placement, int], tuple[int, ...]]
    policies: tuple[VersionPolicy, ...] = (VersionPolicy.SYNCHRONOUS,)

    @property
    def continuous(self) -> bool:
        """Whether a fill goes on over batches: the pipeline does not drain between them."""
        return self.policies[0] is not VersionPolicy.SYNCHRONOUS


SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "naive": Schedule(gpipe, naive_refusal, gpipe_in_flight),
        "gpipe": Schedule(gpipe, gpipe_refusal, gpipe_in_flight),
        "1f1b": Schedule(one_f_one_b, one_f_one_b_refusal, one_f_one_b_in_flight),
        "interleaved": Schedule(interleaved, interleaved_refusal, interleaved_in_flight),
        "pipedream": Schedule(
            pipedream,
            pipedream_refusal,
            one_f_one_b_in_flight,
            (VersionPolicy.STASHING, VersionPolicy.VERTICAL_SYNC, VersionPolicy.NO_STASHING),
        ),
        "pipedream_2bw": Schedule(
            pipedream,
            pipedream_2bw_refusal,
            one_f_one_b_in_flight,
            (VersionPolicy.DOUBLE_BUFFERED,),
        ),
        FORWARD_ONLY: Schedule(forward_only, gpipe_refusal, gpipe_in_flight),
    }
)
"""Every schedule that `make_plan` knows, the internal forward-only one included."""


def schedule_names() -> tuple[str, ...]:
    """Name the schedules that a user may train with."""
    return tuple(name for name in SCHEDULES if name != FORWARD_ONLY)


def look_up(schedule: str) -> Schedule:
    """Find a schedule by name.

    Raises:
        ScheduleError: If there is no such schedule, with the nearest name.
    """
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    nearest = get_close_matches(schedule.lower(), schedule_names(), n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ScheduleError(
        f"There is no schedule {schedule!r}.{hint} Choose one of {', '.join(schedule_names())}"
    )


def policy_for(schedule: str, weight_stashing: bool, vertical_sync: bool) -> VersionPolicy:
    """Give the policy that the two options of PipeDream stand for.

    Args:
        schedule: Any schedule. All but ``"pipedream"`` take the defaults only, True and False.
        weight_stashing: Whether a backward reads the version that its forward read.
        vertical_sync: Whether all stages read the version that stage 0 read.

    Raises:
        ScheduleError: If an option has no effect with the schedule, if the two contradict each
            other, or if there is no such schedule.
    """
    recipe = look_up(schedule)
    if schedule == "pipedream":
        return _pipedream_policy(weight_stashing, vertical_sync)
    if weight_stashing and not vertical_sync:
        return recipe.policies[0]
    option = "vertical_sync=True" if vertical_sync else "weight_stashing=False"
    reason = (
        f"{schedule!r}, which always keeps two versions"
        if recipe.continuous
        else f"the synchronous schedule {schedule!r}, whose weights do not change within a batch"
    )
    raise ScheduleError(
        f"{option} has no effect with {reason}. Leave both weight_stashing and vertical_sync at "
        "their defaults (True, False)."
    )


def _pipedream_policy(weight_stashing: bool, vertical_sync: bool) -> VersionPolicy:
    """Give the policy of PipeDream."""
    if not vertical_sync:
        return VersionPolicy.STASHING if weight_stashing else VersionPolicy.NO_STASHING
    if weight_stashing:
        return VersionPolicy.VERTICAL_SYNC
    raise ScheduleError(
        "vertical_sync=True needs weight_stashing=True: all stages read the version that stage 0 "
        "read, which the others have to keep. Set weight_stashing=True, or vertical_sync=False."
    )
