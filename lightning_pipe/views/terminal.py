"""The text grid of a schedule in colour."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lightning_pipe.schedule import Plan, Timeline, simulate, text_grid
from lightning_pipe.schedule.simulate import equal_steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES = {
    "F": "black on bright_blue",
    "B": "black on yellow",
    "I": "black on bright_red",
    "W": "black on bright_green",
    ".": "bright_black",
}
"""Of the cells of `text_grid`, by kind: forward, backward, its two parts, idle."""

_CELL = re.compile(r"(?<= )(?:\d*(?P<kind>[FBIW])\d+(?:@\d+)?|(?P<same>--)|\.\.) *(?= |$)")
_CUT = len(" ...")  # what `text_grid` adds where it cuts


def print_grid(
    plan: Plan | Timeline,
    console: Console,
    versions: bool = False,
    max_slots: int | None = None,
) -> None:
    """Draw a schedule, one row per rank, in colour where the console has any.

    Args:
        plan: A timeline, or a plan that can complete, drawn as `text_grid` does.
        console: Where to. A terminal gets the slots that fit, and a note if those are not all.
        versions: Spell a compute with the version of the weights that it reads.
        max_slots: Draw at most so many slots, whether they fit or not. Default: those that fit into
            a terminal; all, into a file.
    """
    if isinstance(plan, Plan):  # once for both grids
        plan = simulate(plan, equal_steps(plan))
    grid = text_grid(plan, versions=versions)
    total, fitting = _slots(grid, console.width)
    slots = max_slots if max_slots is not None else fitting if console.is_terminal else total
    if slots < total:
        grid = text_grid(plan, versions=versions, max_slots=slots)
    console.print(coloured(grid), soft_wrap=True)
    if slots < total:
        console.print(f"the first {slots} of {total} slots", style="bright_black", highlight=False)


def coloured(grid: str) -> Text:
    """Colour a grid of `text_grid`; the text stays the same.

    A compute over several slots becomes one box.
    """
    from rich.text import Text

    lines = []
    for line in grid.splitlines():
        text = Text(line)
        start, kind = 0, "."
        for cell in _CELL.finditer(line, pos=line.index("|") + 2):
            if cell["same"] is None:
                start, kind = cell.start(), cell["kind"] or "."
            text.stylize(STYLES[kind], start, cell.end())
        lines.append(text)
    return Text("\n").join(lines)


def _slots(grid: str, width: int) -> tuple[int, int]:
    """Count the slots of a grid, and those that fit into a width, one at least."""
    lines = grid.splitlines()
    longest = max(lines, key=len)
    first = longest.index("|") + 2
    starts = [cell.start() for line in lines for cell in _CELL.finditer(line, pos=first)]
    columns = sorted(set(starts))
    step = columns[1] - columns[0] if len(columns) > 1 else len(longest)
    fitting = (width - _CUT - first + 1) // step
    whole = len(longest) <= width
    return len(columns), len(columns) if whole else max(1, fitting)
