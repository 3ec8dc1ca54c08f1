"""``lightning-pipe show``: a schedule in the terminal, as a picture, a trace or a file."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lightning_pipe.schedule import (
    Costs,
    Placement,
    Plan,
    Timeline,
    accepts,
    dump_csv,
    load_csv,
    make_plan,
    policy_for,
    simulate,
    staleness,
)
from lightning_pipe.schedule.csv_file import placement_of
from lightning_pipe.schedule.registry import look_up
from lightning_pipe.views.chrome_trace import trace_of, write_trace
from lightning_pipe.views.picture import SUFFIXES, draw
from lightning_pipe.views.terminal import print_grid

_RANKS, _MICROBATCHES = 4, 8  # unless the user or the schedule says otherwise
_TRACE, _CSV = ".json", ".csv"
_FILES: Final = (*SUFFIXES, _TRACE, _CSV)
_MOST_ROWS = 32  # of the table; what is between the first and the last rows is left out


def show(
    schedule: str = "1f1b",
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int = 1,
    batches: int = 1,
    weight_stashing: bool = True,
    vertical_sync: bool = False,
    forward: float | list[float] = 1.0,
    backward: float | list[float] | None = None,
    backward_weight: float | list[float] | None = None,
    communication: float | list[float] = 0.0,
    versions: bool = False,
    output: str | None = None,
    slots: int | None = None,
    json: bool = False,
) -> None:
    """Draw a schedule, and say how much of it is bubble.

    The grid has a row for each rank and a column for each time slot: F0 is the forward of
    micro-batch 0, B0 its backward, I0 and W0 the parts of a backward for the input and for the
    weights, ".." idle. Unless costs are given, it is drawn with a backward as long as a forward;
    the numbers below it and pictures have it twice as long.

    Args:
        schedule: naive, gpipe, 1f1b, interleaved, zero_bubble, pipedream, pipedream_2bw, forward
            (evaluation), or a file that ends in .csv.
        ranks: Number of pipeline ranks. Default: 4, or what the file has.
        microbatches: Number of micro-batches of a batch. Default: 8 if the schedule takes them, or
            what the file has.
        stages_per_rank: Stages on each rank: 2 or more for interleaved, 1 or 2 for zero_bubble.
        batches: Batches before the pipeline drains; more than one for pipedream and pipedream_2bw.
        weight_stashing: Whether a backward reads the version of the weights that its forward read;
            pipedream only.
        vertical_sync: Whether all stages read the version that stage 0 read; pipedream only.
        forward: Time of a forward, or a list by stage.
        backward: Time of a backward, or a list by stage. Default: twice its forward.
        backward_weight: Time of the part for the weights, or a list by stage. Default: half of the
            backward.
        communication: Time that a message takes, or a list by boundary between stages.
        versions: Whether to write the version of the weights that each compute reads.
        output: File to write: a picture (.png, .svg, .pdf), a trace for https://ui.perfetto.dev
            (.json, a unit of time as a millisecond), or the schedule itself (.csv).
        slots: Draw so many time slots in the terminal. Default: those that fit.
        json: Print the numbers as JSON, and no grid.

    Examples:
        lightning-pipe show
        lightning-pipe show zero_bubble --ranks 4 --stages-per-rank 2
        lightning-pipe show pipedream --microbatches 1 --batches 10 --versions
        lightning-pipe show 1f1b --forward 1,1,2,1 --communication 0.1 --output 1f1b.png
        lightning-pipe show interleaved --stages-per-rank 2 --output interleaved.csv

    Raises:
        ScheduleError: If the schedule cannot take the numbers.
        ValueError: If an option is wrong.
    """
    if output is not None and Path(output).suffix.lower() not in _FILES:
        raise ValueError(f"--output={output} must end in one of {', '.join(_FILES)}")
    for name, number in (("slots", slots), ("batches", batches)):
        if number is not None and number < 1:
            raise ValueError(f"--{name}={number} must be at least 1")
    placement = _place(schedule, ranks, stages_per_rank)
    counts = _counts(schedule, placement, microbatches, batches)
    policy = policy_for(schedule, weight_stashing, vertical_sync)
    given = (forward, backward, backward_weight, communication) != (1.0, None, None, 0.0)
    costs = Costs(forward, _twice(forward, backward), backward_weight, communication)
    with Console(stderr=True).status("planning") as status:  # long with a thousand micro-batches
        plan = make_plan(schedule, placement, counts, policy=policy)
        status.update("simulating")
        timeline = simulate(plan, costs)
        if output is not None:
            status.update(f"writing {output}")
            _write(output, timeline, versions)
    if json:
        print(json_format.dumps(_numbers(timeline, output)))
    else:
        _print(timeline, given, versions, slots, output)


def _place(schedule: str, ranks: int | None, stages_per_rank: int) -> Placement:
    """Place the stages; those of a file as it says."""
    recipe = look_up(schedule)
    if ranks is None:
        is_file = schedule.endswith(_CSV)
        ranks = placement_of(load_csv(schedule)).num_ranks if is_file else _RANKS
    return recipe.place(ranks, stages_per_rank)


def _counts(
    schedule: str, placement: Placement, microbatches: int | None, batches: int
) -> tuple[int, ...]:
    """Give the number of micro-batches of each batch."""
    if microbatches is None:
        usual = accepts(schedule, placement, (_MICROBATCHES,) * batches)
        most = look_up(schedule).most_microbatches(placement)
        microbatches = _MICROBATCHES if usual else most
    return (microbatches,) * batches


def _twice(
    forward: float | list[float], backward: float | list[float] | None
) -> float | list[float]:
    if backward is not None:
        return backward
    return [2 * cost for cost in forward] if isinstance(forward, list) else 2 * forward


def _write(output: str, timeline: Timeline, versions: bool) -> None:
    """Write a file by its suffix."""
    suffix = Path(output).suffix.lower()
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    if suffix == _CSV:
        Path(output).write_text(dump_csv(timeline.plan))
    elif suffix == _TRACE:
        write_trace(output, trace_of(timeline, seconds_per_unit=1e-3))
    else:
        draw(timeline, output, versions, title=_title(timeline.plan))


def _title(plan: Plan) -> str:
    """Say in a line what is shown."""
    several = f" in {len(plan.batches)} batches" if len(plan.batches) > 1 else ""
    stages = plan.placement.num_stages // plan.placement.num_ranks
    parts = [
        Path(plan.schedule).name,
        f"{plan.placement.num_ranks} ranks",
        *([f"{stages} stages each"] if stages > 1 else []),
        f"{plan.num_microbatches} micro-batches{several}",
        *([plan.policy.value] if plan.num_updates > 1 else []),
    ]
    return ", ".join(parts)


def _numbers(timeline: Timeline, output: str | None) -> dict[str, Any]:
    """Give all that the table says, for machines."""
    plan = timeline.plan
    return {
        "schedule": plan.schedule,
        "policy": plan.policy.value,
        "batches": plan.batches,
        "rank_of_stage": plan.placement.rank_of,
        "makespan": timeline.makespan,
        "mean_bubble": timeline.mean_bubble,
        "bubble_by_rank": timeline.bubble,
        "peak_in_flight_by_stage": timeline.peak_in_flight,
        "live_versions_by_stage": timeline.live_versions,
        "staleness_by_stage": staleness(plan),
        "output": output,
    }


def _print(
    timeline: Timeline, given: bool, versions: bool, slots: int | None, output: str | None
) -> None:
    """Print title, grid and table."""
    console = Console(highlight=False)
    console.print(_title(timeline.plan), style="bold", soft_wrap=True)
    print_grid(timeline if given else timeline.plan, console, versions, slots)
    console.print()
    console.print(_table(timeline))
    unit = "" if given else ", with a forward of 1 and a backward of 2"
    console.print(
        f"makespan {timeline.makespan:.6g}{unit}; bubble {timeline.mean_bubble:.1%}, mean of the "
        "ranks",
        soft_wrap=True,
    )
    if output is not None:
        console.print(f"written: {output}", soft_wrap=True, markup=False)


def _table(timeline: Timeline) -> Table:
    """Make a table with a row for each rank."""
    plan, late = timeline.plan, staleness(timeline.plan)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "stages", "bubble", "peak in flight", "live versions", "staleness"):
        table.add_column(name, justify="left" if name == "stages" else "right")

    def by_stage(values: Sequence[int], stages: Sequence[int]) -> str:
        return " ".join(str(values[stage]) for stage in stages)

    ranks = range(plan.placement.num_ranks)
    for rank in ranks:
        if len(ranks) > _MOST_ROWS and _MOST_ROWS // 2 <= rank < len(ranks) - _MOST_ROWS // 2:
            if rank == _MOST_ROWS // 2:
                table.add_row(*["..."] * 6)
            continue
        stages = plan.placement.stages_of(rank)
        table.add_row(
            str(rank),
            " ".join(map(str, stages)),
            f"{timeline.bubble[rank]:.1%}",
            by_stage(timeline.peak_in_flight, stages),
            by_stage(timeline.live_versions, stages),
            by_stage(late, stages),
        )
    return table
