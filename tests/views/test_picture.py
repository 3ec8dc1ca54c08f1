"""What is in a picture, and that all of it can be read."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.schedule import (
    Compute,
    Costs,
    Forward,
    Placement,
    Timeline,
    Update,
    make_plan,
    simulate,
)
from lightning_pipe.schedule.registry import look_up
from lightning_pipe.views import boxes as boxes_module
from lightning_pipe.views.boxes import boxes_of, brightness, colour
from lightning_pipe.views.picture import draw

pytest.importorskip("matplotlib")

UNEVEN = Costs([1, 0.3, 2, 1], [2, 0.5, 3, 2], communication=0.4, reduce=1, update=0.5)
CASES: dict[str, tuple[str, int, Any, int, Costs]] = {
    "1f1b": ("1f1b", 4, 8, 1, Costs()),
    "gpipe": ("gpipe", 4, 8, 1, Costs()),
    "interleaved": ("interleaved", 4, 8, 2, Costs()),
    "zero bubble": ("zero_bubble", 4, 8, 1, Costs()),
    "zero bubble, two stages": ("zero_bubble", 4, 8, 2, Costs()),
    "pipedream": ("pipedream", 4, (1,) * 10, 1, Costs()),
    "large": ("1f1b", 8, 32, 1, Costs()),
    "uneven": ("1f1b", 4, 8, 1, UNEVEN),
    "forward only": ("forward", 2, 4, 1, Costs()),
}


def timeline_of(case: str) -> Timeline:
    name, ranks, batches, stages, costs = CASES[case]
    placement = look_up(name).place(ranks, stages)
    return simulate(make_plan(name, placement, batches), costs)


def rectangles(figure: Any) -> Counter[tuple[str, int, float, float]]:
    """Collection, rank, start and end of all boxes that were drawn."""
    (axes,) = figure.axes
    found: Counter[tuple[str, int, float, float]] = Counter()
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, top), (right, bottom) = path.get_extents().get_points()
            found[collection.get_gid(), round((top + bottom) / 2), left, right] += 1
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_compute_has_a_box_as_long_as_it_takes(case: str) -> None:
    timeline = timeline_of(case)
    rank_of = timeline.plan.placement.rank_of
    names = {"Forward": "forward", "Backward": "backward"}
    names |= {"BackwardInput": "input", "BackwardWeight": "weight"}
    names |= {"Reduce": "reduce", "Update": "update"}
    expected = Counter(
        (f"{names[type(step).__name__]} {chunk}", event.rank, event.start, event.end)
        for event in timeline.events
        for step in [event.instruction]
        if type(step).__name__ in names and event.end > event.start
        for chunk in [rank_of[: step.stage].count(event.rank)]
    )
    drawn = rectangles(draw(timeline))
    idle = {key: count for key, count in drawn.items() if key[0] == "idle"}
    marks = {key: count for key, count in drawn.items() if key[0] == "update"}
    assert Counter({k: n for k, n in drawn.items() if k not in {**idle, **marks}}) == expected
    ranks = range(timeline.plan.placement.num_ranks)
    assert idle == {("idle", rank, 0.0, timeline.makespan): 1 for rank in ranks}
    updates = [
        (event.rank, event.end)
        for event in timeline.events
        if isinstance(event.instruction, Update) and event.end == event.start
    ]
    assert Counter((rank, left) for (_, rank, left, _) in marks) == Counter(set(updates))
    assert sum(marks.values()) == len(updates)


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_numbers_lie_inside_their_boxes(case: str, versions: bool) -> None:
    timeline = timeline_of(case)
    figure: Any = draw(timeline, versions=versions, title="a title")
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()
    computes = {
        (event.rank, (event.start + event.end) / 2): event
        for event in timeline.events
        if isinstance(event.instruction, Compute)
    }
    for text in axes.texts:
        event = computes.pop(text.get_position()[::-1])
        step = event.instruction
        assert isinstance(step, Compute)
        below = f"\nv{step.version}" if versions else ""
        assert text.get_text() == f"{step.microbatch}{below}"
        x, y = text.get_position()
        corners = [(event.start, y - 0.42), (event.end, y + 0.42)]
        (left, top), (right, bottom) = axes.transData.transform(corners)
        extent = text.get_window_extent(renderer)
        assert left < extent.x0
        assert extent.x1 < right
        assert min(top, bottom) < extent.y0
        assert extent.y1 < max(top, bottom)
    left_out = {event.end - event.start for event in computes.values()}
    assert not left_out or max(left_out) <= 0.5, "only the short computes of 'uneven'"


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_clipped_and_the_legend_is_outside(case: str) -> None:
    figure: Any = draw(timeline_of(case), title="a title", unit="ms")
    figure.canvas.draw()
    (axes,) = figure.axes
    (legend,) = figure.legends
    width, height = figure.canvas.get_width_height()
    for part in (axes.get_tightbbox(), legend.get_window_extent()):
        assert part.x0 >= 0
        assert part.y0 >= 0
        assert part.x1 <= width
        assert part.y1 <= height
    assert legend.get_window_extent().y1 < axes.get_tightbbox().y0
    names = [axis_label.get_window_extent() for axis_label in axes.get_yticklabels()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(names, 2))
    assert axes.get_xlabel() == "time (ms)"
    assert axes.get_title() == "a title"


def test_legend_names_what_is_there() -> None:
    def legend(case: str) -> list[str]:
        (legend,) = draw(timeline_of(case)).legends
        return [text.get_text() for text in legend.get_texts()]

    assert legend("1f1b") == ["forward", "backward", "update", "idle"]
    assert legend("uneven") == ["forward", "backward", "reduction over replicas", "update", "idle"]
    assert legend("forward only") == ["forward", "idle"]
    assert legend("zero bubble, two stages") == [
        f"{name}, stages {stages}"
        for name in ("forward", "backward, input part", "backward, weight part")
        for stages in ("0–3", "4–7")
    ] + ["update", "idle"]


def test_numbers_are_left_out_of_boxes_that_are_too_small() -> None:
    timeline = simulate(make_plan("gpipe", Placement.round_robin(2), 700))
    figure = draw(timeline)
    assert not figure.axes[0].texts
    assert figure.get_figwidth() <= 30


def test_many_ranks_have_names_that_do_not_overlap() -> None:
    figure = draw(simulate(make_plan("naive", Placement.round_robin(150), 1)))
    figure.canvas.draw()
    labels = figure.axes[0].get_yticklabels()
    assert labels[0].get_text() == "rank 0"
    extents = [label.get_window_extent() for label in labels]
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(extents))


# What those see who miss one kind of cone: Machado, Oliveira and Fernandes 2009, severity 1.
BLIND = {
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
}


def colours(case: str) -> dict[Any, tuple[float, float, float]]:
    """All that occur in a picture, and the one of idle."""
    timeline = timeline_of(case)
    stages = CASES[case][3]
    boxes = boxes_of(timeline.events, timeline.plan.placement)
    keys = {(box.kind, box.chunk) for box in boxes if box.label}
    shades = {key: colour(*key, stages) for key in sorted(keys)}
    return shades | {"idle": (0.957, 0.957, 0.957)}


@pytest.mark.parametrize("case", [case for case in CASES if case != "forward only"])
def test_colours_are_told_apart_in_grey_and_by_the_colour_blind(case: str) -> None:
    shades = colours(case)
    assert len(shades) > 2
    for (one, a), (other, b) in itertools.combinations(shades.items(), 2):
        assert abs(brightness(a) - brightness(b)) > 0.09, (one, other)
        for matrix in BLIND.values():
            seen = [
                [sum(m * c**2.2 for m, c in zip(row, rgb, strict=True)) for row in matrix]
                for rgb in (a, b)
            ]
            differences = [
                abs(max(p, 0) ** (1 / 2.2) - max(q, 0) ** (1 / 2.2))
                for p, q in zip(*seen, strict=True)
            ]
            assert max(differences) > 0.1, (one, other)


def test_a_rank_with_several_stages_has_a_shade_for_each() -> None:
    shades = [colour("forward", chunk, 4) for chunk in range(4)]
    bright = [brightness(shade) for shade in shades]
    assert bright == sorted(set(bright))
    assert set(boxes_module.NAMES) == {"forward", "backward", "input", "weight", "reduce", "update"}


def test_files(tmp_path: Path) -> None:
    timeline = timeline_of("1f1b")
    figure = draw(timeline, tmp_path / "a.png")
    draw(timeline, tmp_path / "a.svg")
    size = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert size == tuple(figure.canvas.get_width_height())
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(ValueError, match=r"'a\.bmp' must end in \.png, \.svg, \.pdf"):
        draw(timeline, "a.bmp")


def test_needs_no_display_and_no_pyplot() -> None:
    """And matplotlib is not imported before it is needed."""
    program = (
        "import sys; from lightning_pipe.schedule import make_plan, simulate, Placement\n"
        "from lightning_pipe.views.picture import draw\n"
        "from lightning_pipe.views import boxes, chrome_trace, terminal\n"
        "before = {'matplotlib', 'rich'} & set(sys.modules)\n"
        "draw(simulate(make_plan('gpipe', Placement.round_robin(2), 2)))\n"
        "print(before, 'matplotlib.pyplot' in sys.modules)"
    )
    # The package itself imports Lightning, which brings rich along.
    stub = "import sys, types; p = types.ModuleType('lightning_pipe')\n"
    stub += f"p.__path__ = [{str(Path(boxes_module.__file__).parents[1])!r}]\n"
    stub += "sys.modules['lightning_pipe'] = p\n"
    done = subprocess.run(
        [sys.executable, "-c", stub + program],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", "MPLBACKEND": "TkAgg"},
    )
    assert done.stdout.strip() == "set() False", done.stderr


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.partition(".")[0] == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"pip install 'lightning-pipe\[plot\]'"):
        draw(timeline_of("1f1b"))


def test_versions_of_the_forward(tmp_path: Path) -> None:
    """PipeDream's last stage always reads the newest version."""
    timeline = timeline_of("pipedream")
    figure = draw(timeline, versions=True)
    last = [text.get_text() for text in figure.axes[0].texts if text.get_position()[1] == 3]
    expected = [e.instruction for e in timeline.events if e.rank == 3]
    computes = [step for step in expected if isinstance(step, Compute)]
    assert last == [f"{step.microbatch}\nv{step.microbatch}" for step in computes]
    assert sum(isinstance(step, Forward) for step in computes) == 10
