"""What a picture of a timeline shows, before it is drawn: boxes, marks and their colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from lightning_pipe.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Event,
    Forward,
    Instruction,
    Placement,
    Reduce,
    Update,
)

Kind: TypeAlias = Literal["forward", "backward", "input", "weight", "reduce", "update"]
Colour: TypeAlias = tuple[float, float, float]

_KINDS: Final[dict[type, Kind]] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input",
    BackwardWeight: "weight",
    Reduce: "reduce",
    Update: "update",
}

NAMES: Final[dict[Kind, str]] = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, input part",
    "weight": "backward, weight part",
    "reduce": "reduction over replicas",
    "update": "update",
}
"""For the legend."""

# From the first stage of a rank to its last. Blue, orange and green stay apart for the colour-blind
# too, and what occurs in one schedule has ranges of brightness of its own: it does in grey.
_SHADES: Final[dict[Kind, tuple[str, str]]] = {
    "forward": ("#083f70", "#2a6cab"),
    "backward": ("#e8912d", "#f9c988"),
    "input": ("#d4592a", "#ea8a52"),
    "weight": ("#93d6b6", "#bfe8d6"),
    "reduce": ("#4a3b5c", "#4a3b5c"),
    "update": ("#000000", "#000000"),
}


@dataclass(frozen=True, slots=True)
class Box:
    """A time in which a rank is busy.

    Attributes:
        rank: Its row.
        start: In the unit of the timeline.
        end: The same as `start` for an update that takes no time, which is a mark.
        kind: What it does.
        chunk: Place of the stage among those of the rank, from 0.
        label: Number of the micro-batch; empty for others than computes.
        version: Of the weights that it reads.
    """

    rank: int
    start: float
    end: float
    kind: Kind
    chunk: int
    label: str
    version: int


def boxes_of(events: Iterable[Event], placement: Placement) -> list[Box]:
    """Give the boxes of all computes and updates, and of the reductions that take time."""
    chunks = [placement.rank_of[:stage].count(rank) for stage, rank in enumerate(placement.rank_of)]
    boxes = []
    for event in events:
        step, compute = event.instruction, isinstance(event.instruction, Compute)
        takes_time = event.end > event.start
        if compute or isinstance(step, Update) or (isinstance(step, Reduce) and takes_time):
            label, version = _written(step)
            kind, chunk = _KINDS[type(step)], chunks[step.stage]
            boxes.append(Box(event.rank, event.start, event.end, kind, chunk, label, version))
    return boxes


def _written(step: Instruction) -> tuple[str, int]:
    """Give the micro-batch and the version of a compute."""
    return (str(step.microbatch), step.version) if isinstance(step, Compute) else ("", 0)


def colour(kind: Kind, chunk: int, num_chunks: int) -> Colour:
    """Give the colour of a box: the darkest for the first stage of a rank."""
    dark, light = map(_rgb, _SHADES[kind])
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (a + (b - a) * share for a, b in zip(dark, light, strict=True))
    return red, green, blue


def brightness(shade: Sequence[float]) -> float:
    """Give what is left of a colour in grey, from 0 to 1 (Rec. 601)."""
    red, green, blue = shade
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _rgb(hexadecimal: str) -> Colour:
    red, green, blue = (int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue
