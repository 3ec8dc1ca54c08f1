"""The grid in colour: the same text, each kind in its own style, cut to what fits."""

from __future__ import annotations

import io
from typing import Literal

import pytest
from rich.console import Console

from lightning_pipe.schedule import Placement, make_plan, simulate, text_grid
from lightning_pipe.schedule.registry import look_up
from lightning_pipe.views.terminal import STYLES, coloured, print_grid

PLAN = make_plan("1f1b", Placement.round_robin(4), 8)


def printed(console_width: int, *, terminal: bool, **options: int | bool) -> str:
    file = io.StringIO()
    system: Literal["standard", "auto"] = "standard" if terminal else "auto"
    console = Console(file=file, width=console_width, force_terminal=terminal, color_system=system)
    print_grid(PLAN, console, **options)  # type: ignore[arg-type]  # of both kinds
    return file.getvalue()


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2)])
@pytest.mark.parametrize("versions", [False, True])
def test_each_cell_has_the_style_of_its_kind(name: str, stages: int, versions: bool) -> None:
    timeline = simulate(make_plan(name, look_up(name).place(3, stages), 12))
    grid = text_grid(timeline, versions=versions)
    text = coloured(grid)
    assert text.plain == grid
    styles = [""] * len(grid)
    for span in text.spans:
        styles[span.start : span.end] = [str(span.style)] * (span.end - span.start)
    place, kinds = 0, set()
    for line in grid.splitlines():
        kind = "."
        place += line.index("|") + 2
        assert not any(styles[place - 9 : place])
        for cell in line[line.index("|") + 2 :].split(" "):
            if cell not in ("", "--"):
                kind = next((letter for letter in cell if letter in STYLES), ".")
                kinds.add(kind)
            assert set(styles[place : place + len(cell)]) <= {STYLES[kind]}
            place += len(cell) + 1
    assert kinds == set("FIW." if name == "zero_bubble" else "FB.")
    assert len(set(STYLES.values())) == len(STYLES)


def test_what_is_cut_off_has_no_colour() -> None:
    text = coloured(text_grid(PLAN, max_slots=3))
    dots = [place for place in range(len(text.plain)) if text.plain.startswith("...", place)]
    assert len(dots) == 4
    assert not any(
        span.start < place + 3 and span.end > place for span in text.spans for place in dots
    )


def test_a_file_gets_all_and_plain_text() -> None:
    assert printed(40, terminal=False) == text_grid(PLAN) + "\n"


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[30;104mF0" in printed(200, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in printed(200, terminal=True).replace("\x1b[0m", "")


@pytest.mark.parametrize("width", [1, 30, 40, 41, 42, 43, 60, 73, 74, 75])
def test_a_terminal_gets_what_fits(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """22 slots of three characters each, one less behind the last, and nine before the first."""
    monkeypatch.setenv("NO_COLOR", "1")
    rows = printed(width, terminal=True).replace("\x1b[0m", "").splitlines()
    if width >= 9 + 22 * 3 - 1:
        assert "\n".join(rows) == text_grid(PLAN)
        return
    fitting = max(1, (width - 9 - 4 + 1) // 3)
    assert "\n".join(rows[:4]) == text_grid(PLAN, max_slots=fitting)
    assert max(map(len, rows[:4])) <= max(width, 15)
    assert " ".join(rows[4:]).startswith(f"the first {fitting} of 22"[: max(1, width)])


def test_as_many_slots_as_asked_for() -> None:
    rows = printed(20, terminal=True, max_slots=22).splitlines()
    assert len(rows) == 4
    assert printed(200, terminal=False, max_slots=3).startswith(text_grid(PLAN, max_slots=3))
