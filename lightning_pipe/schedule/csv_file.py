"""Compute orders as CSV files, in the spelling of ``torch.distributed.pipelining``.

A row for each rank, a cell for each compute in its order: ``2F0``, ``2B0``, or ``2I0`` and ``2W0``.
Empty cells are idle slots. Files of torch may hold more: two computes that overlap,
``(2F3;1B0)OVERLAP_F_B``, which run one after the other here, and communication, which is left out,
since lowering inserts its own.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from lightning_pipe.schedule.errors import ScheduleError
from lightning_pipe.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
)
from lightning_pipe.schedule.programs import Placement, Plan

_KINDS: dict[str, type[Compute]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}
_CELL = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_LEFT_OUT = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")

Order = tuple[tuple[Compute, ...], ...]
"""The computes of each rank."""


def dump_csv(plan: Plan) -> str:
    """Write the computes of a plan of one batch, for this package or for torch.

    Args:
        plan: Synchronous; a file says nothing of versions and updates.

    Returns:
        The text of the file.

    Raises:
        ScheduleError: If the plan is asynchronous.
    """
    if plan.num_updates != 1:
        raise ScheduleError(
            f"{plan.schedule!r} makes {plan.num_updates} updates in a fill, but a CSV file has no "
            "place for updates: export a synchronous schedule"
        )
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for program in plan.programs:
        writer.writerow([str(step) for step in program if isinstance(step, Compute)])
    return text.getvalue()


def load_csv(path: str | Path) -> Order:
    """Read the computes of each rank.

    Raises:
        ScheduleError: If there is no such file, or a cell is none of the above.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # with the mark of Excel's, or without
    except OSError as error:
        raise ScheduleError(f"schedule={str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"schedule={str(path)!r} is no text in UTF-8; expected a CSV file, a row for each rank"
        ) from error
    rows = [row for row in csv.reader(StringIO(text)) if row]
    order = tuple(
        tuple(step for cell in row for step in _computes(cell.strip(), f"{path}, row {number}"))
        for number, row in enumerate(rows, 1)
    )
    if not any(order):
        raise ScheduleError(f"schedule={str(path)!r} has no computes; expected a row for each rank")
    return order


def _computes(cell: str, where: str) -> Iterator[Compute]:
    """Read a cell."""
    if overlap := _OVERLAP.fullmatch(cell):
        for part in overlap[1].split(";"):
            yield from _computes(part.strip(), where)
    elif compute := _CELL.fullmatch(cell):
        stage, kind, microbatch = compute.groups()
        yield _KINDS[kind](int(stage), int(microbatch))
    elif cell and not _LEFT_OUT.fullmatch(cell):
        raise ScheduleError(
            f"{where}: {cell!r} is no compute; expected cells as '2F0' (stage 2, micro-batch 0), "
            "with F for a forward, B for a backward, or I and W for its parts for input and weights"
        )


def placement_of(order: Order) -> Placement:
    """Find the rank of each stage.

    Raises:
        ScheduleError: If a stage is on two ranks, or on none.
    """
    rank_of: dict[int, int] = {}
    for rank, steps in enumerate(order):
        for step in steps:
            if rank_of.setdefault(step.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {step.stage} is on ranks {rank_of[step.stage]} and {rank}: put all "
                    "computes of a stage into one row"
                )
    missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
    if missing:
        raise ScheduleError(f"no row has stage {missing[0]}, but one has stage {max(rank_of)}")
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))


def num_microbatches_of(order: Order) -> int:
    """Count the micro-batches."""
    return 1 + max(step.microbatch for steps in order for step in steps)
