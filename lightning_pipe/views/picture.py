"""A timeline as a picture, like the figures of the papers: a row for each rank."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Final, TypeAlias

from lightning_pipe.schedule import Placement, Timeline
from lightning_pipe.views.boxes import NAMES, Box, Kind, boxes_of, brightness, colour
from lightning_pipe.views.extras import needs_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES: Final = (".png", ".svg", ".pdf")
"""Of the files that can be drawn."""

Labels: TypeAlias = dict[Box, str]

_HALF = 0.42  # height of a box, from the middle of its row, in rows
_POINTS = 72.0  # in an inch
_WIDTHS = (6.0, 30.0)  # of a picture, least and most, in inches
_MOST_HEIGHT = 30.0
_FONT_SIZES = (8.0, 7.0, 6.0, 5.0)  # the largest with which all numbers fit
_ROOM = 1.5  # points between a number and the edge of its box
_DARK = 0.45  # brightness below which white is easier to read than black
_IDLE, _HATCH = "#f4f4f4", "#c9c9c9"


def draw(
    timeline: Timeline,
    path: str | Path | None = None,
    versions: bool = False,
    title: str | None = None,
    unit: str | None = None,
) -> Figure:
    """Draw a timeline, with the durations that it has.

    Boxes have the number of their micro-batch where it fits in. Ranks with several stages have a
    shade for each. What takes no time is left out, but updates, which are thin lines.

    Args:
        timeline: With any costs.
        path: File to write, of one of `SUFFIXES`. Default: none.
        versions: Write the version of the weights that a compute reads below the number.
        title: Above the picture.
        unit: Of the time, for the axis.

    Returns:
        The figure.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the suffix is another.
    """
    if path is not None and Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"path={str(path)!r} must end in {', '.join(SUFFIXES)}")
    with needs_matplotlib():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

    placement = timeline.plan.placement
    boxes = boxes_of(timeline.events, placement)
    size = _size(boxes, timeline.makespan, placement.num_ranks, versions)
    figure = Figure(figsize=size, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _set_axes(figure, axes, timeline, unit)
    if title is not None:
        axes.set_title(title)
    _draw_idle(axes, timeline)
    _draw_boxes(figure, axes, boxes, _num_chunks(placement))
    _draw_marks(axes, boxes)
    _add_legend(figure, axes, boxes, placement)
    figure.draw_without_rendering()  # from here on, sizes on the paper are known
    figure.set_layout_engine("none")
    _write_numbers(figure, axes, boxes, _num_chunks(placement), versions)
    if path is not None:
        figure.savefig(path)
    return figure


def _num_chunks(placement: Placement) -> int:
    """Give the most stages that a rank has."""
    return max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks))


def _label(box: Box, versions: bool) -> str:
    return f"{box.label}\nv{box.version}" if versions and box.label else box.label


def _size(boxes: list[Box], makespan: float, num_ranks: int, versions: bool) -> tuple[float, float]:
    """Make a picture so wide that an ordinary number fits into an ordinary box."""
    durations = [box.end - box.start for box in boxes if box.label and box.end > box.start]
    digits = max((len(line) for box in boxes for line in _label(box, versions).split()), default=1)
    inches = (0.62 * digits * _FONT_SIZES[1] + 3 * _ROOM) / _POINTS
    width = 1.0 + makespan / median_low(durations) * inches if durations else 0.0
    row = 0.42 if versions else 0.32
    return min(max(width, _WIDTHS[0]), _WIDTHS[1]), min(1.4 + row * num_ranks, _MOST_HEIGHT)


def _set_axes(figure: Figure, axes: Axes, timeline: Timeline, unit: str | None) -> None:
    """Name rows and time; where there are many rows, not all of them."""
    ranks = timeline.plan.placement.num_ranks
    axes.set_xlim(0, timeline.makespan or 1.0)
    axes.set_ylim(ranks - 0.5, -0.5)
    height = figure.get_figheight() * _POINTS / ranks  # of a row
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64) if step * height > 11 or step == 64)
    axes.set_yticks(range(0, ranks, every), [f"rank {rank}" for rank in range(0, ranks, every)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time" if unit is None else f"time ({unit})")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _outline(rank: int, start: float, end: float) -> list[tuple[float, float]]:
    top, bottom = rank - _HALF, rank + _HALF
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _draw_idle(axes: Axes, timeline: Timeline) -> None:
    """Fill each row; what boxes leave of it is idle."""
    from matplotlib.collections import PolyCollection

    ranks = range(timeline.plan.placement.num_ranks)
    outlines = [_outline(rank, 0, timeline.makespan) for rank in ranks]
    idle = PolyCollection(
        outlines, facecolor=_IDLE, edgecolor=_HATCH, linewidth=0, hatch="////", gid="idle"
    )
    axes.add_collection(idle, autolim=False)


def _draw_boxes(figure: Figure, axes: Axes, boxes: list[Box], num_chunks: int) -> None:
    """Draw boxes with a thin edge; one collection for each colour, since there may be thousands."""
    from matplotlib.collections import PolyCollection

    by_colour: dict[tuple[Kind, int], list[list[tuple[float, float]]]] = defaultdict(list)
    narrowest = min((box.end - box.start for box in boxes if box.end > box.start), default=1.0)
    for box in boxes:
        if box.end > box.start:
            outline = _outline(box.rank, box.start, box.end)
            by_colour[box.kind, box.chunk].append(outline)
    scale = figure.get_figwidth() * _POINTS / axes.get_xlim()[1]
    edge = min(0.6, narrowest * scale / 10)
    for (kind, chunk), outlines in by_colour.items():
        collection = PolyCollection(
            outlines,
            facecolor=colour(kind, chunk, num_chunks),
            edgecolor="white",
            linewidth=edge,
            gid=f"{kind} {chunk}",
        )
        axes.add_collection(collection, autolim=False)


def _draw_marks(axes: Axes, boxes: list[Box]) -> None:
    """Draw updates that take no time as lines, a little higher than boxes."""
    marks = [box for box in boxes if box.kind == "update" and box.end == box.start]
    xs = [box.start for box in marks]
    tops, bottoms = [box.rank - 0.49 for box in marks], [box.rank + 0.49 for box in marks]
    if marks:
        axes.vlines(xs, tops, bottoms, color="black", linewidth=1.4, clip_on=False, gid="update")


def _add_legend(figure: Figure, axes: Axes, boxes: list[Box], placement: Placement) -> None:
    """Explain colours below the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    num_chunks = _num_chunks(placement)
    handles: list[Patch | Line2D] = []
    shown = {(box.kind, box.chunk) for box in boxes if box.end > box.start}
    for kind in NAMES:
        for chunk in sorted(chunk for other, chunk in shown if other == kind):
            if num_chunks > 3 and 0 < chunk < num_chunks - 1:
                continue  # shades in between
            label = NAMES[kind]
            if num_chunks > 1 and kind not in ("update", "reduce"):
                label += f", {_stages(placement, chunk)}"
            handles.append(Patch(facecolor=colour(kind, chunk, num_chunks), label=label))
    if any(box.kind == "update" and box.end == box.start for box in boxes):
        mark = Line2D([], [], color="black", label="update", linestyle="none")
        mark.set(marker="|", markersize=10, markeredgewidth=1.4)
        handles.append(mark)
    idle = Patch(facecolor=_IDLE, edgecolor=_HATCH, linewidth=0, hatch="////", label="idle")
    handles.append(idle)
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, int(figure.get_figwidth() / (0.085 * longest + 0.55)))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        frameon=False,
        fontsize=9,
    )


def _stages(placement: Placement, chunk: int) -> str:
    """Name the stages that come at one place on their ranks."""
    stages = [
        placement.stages_of(rank)[chunk]
        for rank in range(placement.num_ranks)
        if chunk < len(placement.stages_of(rank))
    ]
    first, last = min(stages), max(stages)
    if first == last:
        return f"stage {first}"
    if len(stages) == last - first + 1:
        return f"stages {first}–{last}"
    return f"stage {chunk + 1} of a rank"


def _write_numbers(
    figure: Figure, axes: Axes, boxes: list[Box], num_chunks: int, versions: bool
) -> None:
    """Write their numbers into boxes that have room for any number, all in one size."""
    labels = {box: _label(box, versions) for box in boxes if box.label and box.end > box.start}
    roomy = _with_room(figure, axes, labels, _FONT_SIZES[-1])
    for size in _FONT_SIZES:
        if len(_with_room(figure, axes, labels, size)) == len(roomy):
            break
    for box in roomy:
        dark = brightness(colour(box.kind, box.chunk, num_chunks)) < _DARK
        axes.text(
            (box.start + box.end) / 2,
            box.rank,
            labels[box],
            size=size,
            color="white" if dark else "black",
            ha="center",
            va="center_baseline",
            linespacing=1.0,
        )


def _with_room(figure: Figure, axes: Axes, labels: Labels, size: float) -> list[Box]:
    """Find the boxes into which the largest of the labels fits."""
    (left, top), (right, bottom) = axes.transData.transform([(0, 0), (1, 2 * _HALF)])
    room = _ROOM * figure.dpi / _POINTS
    extents = [_extent(figure, text, size) for text in set(labels.values())]
    width = max((width for width, _ in extents), default=0.0) + 2 * room
    height = max((height for _, height in extents), default=0.0) + room
    if height > abs(top - bottom):
        return []
    return [box for box in labels if (box.end - box.start) * (right - left) >= width]


def _extent(figure: Figure, text: str, size: float) -> tuple[float, float]:
    """Measure a text, in pixels."""
    probe = figure.text(0, 0, text, size=size, linespacing=1.0)
    extent = probe.get_window_extent()
    probe.remove()
    return extent.width, extent.height
