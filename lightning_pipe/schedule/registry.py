"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from lightning_pipe.schedule.csv_file import load_csv, num_microbatches_of, placement_of
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
from lightning_pipe.schedule.zero_bubble import (
    zero_bubble,
    zero_bubble_in_flight,
    zero_bubble_placement,
    zero_bubble_refusal,
)

_FILE = ".csv"


def _nothing_refused(placement: Placement, batches: tuple[int, ...]) -> str | None:
    return None


def _four_per_stage(placement: Placement) -> int:
    return 4 * placement.num_stages


def _one(placement: Placement) -> int:
    return 1


def _one_per_stage(placement: Placement) -> int:
    return placement.num_stages


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that is particular to one schedule.

    Attributes:
        generate: Gives the compute order of all ranks, for so many micro-batches in all.
        refusal: Says why the schedule cannot run batches of so many micro-batches each, with what
            to change, or None if it can.
        max_in_flight: Gives, by rank, how many micro-batches may be in flight, summed over the
            rank's stages, for so many micro-batches in all. Default: unbounded.
        policies: The version policies that it can follow; the first is the default.
        place: Gives the placement, for so many ranks with so many stages each.
        most_microbatches: Into how many micro-batches to cut a batch that is large enough.
    """

    generate: Callable[[Placement, int], ComputeOrder]
    refusal: Callable[[Placement, tuple[int, ...]], str | None] = _nothing_refused
    max_in_flight: Callable[[Placement, int], tuple[int, ...]] | None = None
    policies: tuple[VersionPolicy, ...] = (VersionPolicy.SYNCHRONOUS,)
    place: Callable[[int, int], Placement] = Placement.round_robin
    most_microbatches: Callable[[Placement], int] = _four_per_stage

    @property
    def continuous(self) -> bool:
        """Whether a fill goes on over batches: the pipeline does not drain between them."""
        return self.policies[0] is not VersionPolicy.SYNCHRONOUS


_BUILT_IN: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "naive": Schedule(gpipe, naive_refusal, gpipe_in_flight, most_microbatches=_one),
        "gpipe": Schedule(gpipe, gpipe_refusal, gpipe_in_flight),
        "1f1b": Schedule(one_f_one_b, one_f_one_b_refusal, one_f_one_b_in_flight),
        "interleaved": Schedule(interleaved, interleaved_refusal, interleaved_in_flight),
        "zero_bubble": Schedule(
            zero_bubble, zero_bubble_refusal, zero_bubble_in_flight, place=zero_bubble_placement
        ),
        "pipedream": Schedule(
            pipedream,
            pipedream_refusal,
            one_f_one_b_in_flight,
            (VersionPolicy.STASHING, VersionPolicy.VERTICAL_SYNC, VersionPolicy.NO_STASHING),
            most_microbatches=_one,
        ),
        "pipedream_2bw": Schedule(
            pipedream,
            pipedream_2bw_refusal,
            one_f_one_b_in_flight,
            (VersionPolicy.DOUBLE_BUFFERED,),
            most_microbatches=_one_per_stage,  # the fewest that it takes
        ),
        FORWARD_ONLY: Schedule(forward_only, gpipe_refusal, gpipe_in_flight),
    }
)
_schedules = dict(_BUILT_IN)

SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(_schedules)
"""Every schedule that has a name: ours, the internal forward-only one, and registered ones."""


def register_schedule(
    name: str,
    generate: Callable[[Placement, int], ComputeOrder],
    refusal: Callable[[Placement, tuple[int, ...]], str | None] = _nothing_refused,
    max_in_flight: Callable[[Placement, int], tuple[int, ...]] | None = None,
    place: Callable[[int, int], Placement] = Placement.round_robin,
) -> None:
    """Give a synchronous schedule of your own a name, for ``PipelineStrategy(schedule=name)``.

    Do it where a module is imported or a script begins, so that every rank does. All else is the
    package's: sends, receives and the update are inserted, and each plan is validated.

    Args:
        name: Not a built-in one; a second schedule of a name takes the place of the first.
        generate: Gives the forwards and backwards of all ranks in their order, given the placement
            and the number of micro-batches; a list for each rank.
        refusal: See `Schedule`. Default: it can run any number of micro-batches on any placement.
        max_in_flight: See `Schedule`. Default: unbounded.
        place: See `Schedule`. Default: stage s on rank s % P.

    Raises:
        ScheduleError: If the name is taken, or looks like that of a file.
    """
    if name in _BUILT_IN or name.endswith(_FILE):
        reason = "is built in" if name in _BUILT_IN else "is for schedules in files"
        raise ScheduleError(f"register_schedule({name!r}): the name {reason}; choose another")
    _schedules[name] = Schedule(generate, refusal, max_in_flight, place=place)


def schedule_names() -> tuple[str, ...]:
    """Name the schedules that a user may train with, those in files left out."""
    return tuple(name for name in SCHEDULES if name != FORWARD_ONLY)


def look_up(schedule: str) -> Schedule:
    """Find a schedule by name, or read it from a file.

    Raises:
        ScheduleError: If there is no such schedule, with the nearest name; if a file is wrong.
    """
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    if schedule.endswith(_FILE):
        return _from_file(schedule)
    nearest = get_close_matches(schedule.lower(), schedule_names(), n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ScheduleError(
        f"There is no schedule {schedule!r}.{hint} Choose one of {', '.join(schedule_names())}, "
        "or name a file that ends in '.csv'"
    )


@lru_cache(maxsize=8)  # every batch asks
def _from_file(path: str) -> Schedule:
    """Make a schedule of a file's computes, which takes one placement and one batch alone."""
    order = load_csv(path)
    placement, num_microbatches = placement_of(order), num_microbatches_of(order)

    def refusal(given: Placement, batches: tuple[int, ...]) -> str | None:
        if given.num_ranks != placement.num_ranks or given != placement:
            return f"schedule={path!r} is for {placement.num_ranks} ranks, not {given.num_ranks}"
        if batches != (num_microbatches,):
            return (
                f"num_microbatches={batches[0]}, but schedule={path!r} is for batches of "
                f"{num_microbatches} micro-batches"
            )
        return None

    def place(num_ranks: int, stages_per_rank: int) -> Placement:
        stages = placement.num_stages / placement.num_ranks
        if num_ranks != placement.num_ranks or stages_per_rank not in (1, stages):
            raise ScheduleError(
                f"schedule={path!r} is for {placement.num_ranks} ranks and {placement.num_stages} "
                f"stages in all; it was given {num_ranks} ranks and stages_per_rank="
                f"{stages_per_rank}: use so many devices, and leave stages_per_rank at 1"
            )
        return placement

    return Schedule(
        lambda given, count: [list(steps) for steps in order],
        refusal,
        place=place,
        most_microbatches=lambda given: num_microbatches,
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
