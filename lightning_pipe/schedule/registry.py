"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

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
from lightning_pipe.schedule.programs import FORWARD_ONLY, ComputeOrder, Placement


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that is particular to one schedule. Each takes (placement, num_microbatches).

    Attributes:
        generate: Gives the compute order of all ranks.
        refusal: Says why the schedule cannot run, with what to change, or None if it can.
        max_in_flight: Gives, by rank, how many micro-batches may be in flight, summed over the
            rank's stages.
    """

    generate: Callable[[Placement, int], ComputeOrder]
    refusal: Callable[[Placement, int], str | None]
    max_in_flight: Callable[[Placement, int], tuple[int, ...]]


SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        "naive": Schedule(gpipe, naive_refusal, gpipe_in_flight),
        "gpipe": Schedule(gpipe, gpipe_refusal, gpipe_in_flight),
        "1f1b": Schedule(one_f_one_b, one_f_one_b_refusal, one_f_one_b_in_flight),
        "interleaved": Schedule(interleaved, interleaved_refusal, interleaved_in_flight),
        FORWARD_ONLY: Schedule(forward_only, gpipe_refusal, gpipe_in_flight),
    }
)
"""Every schedule that `make_plan` knows, the internal forward-only one included."""


def schedule_names() -> tuple[str, ...]:
    """Name the schedules that a user may train with."""
    return tuple(name for name in SCHEDULES if name != FORWARD_ONLY)
