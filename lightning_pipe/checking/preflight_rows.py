"""What is asked before a launch, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch import LightningModule

from lightning_pipe.programs import Timing
from lightning_pipe.runtime.mesh import Grid

Status = Literal["ok", "warning", "no", "not checked"]


@dataclass(frozen=True)
class Row:
    """One question, and the answer.

    Attributes:
        name: What was looked at.
        status: The answer.
        text: What was found, or the reason and the remedy.
    """

    name: str
    status: Status
    text: str


@dataclass(frozen=True)
class StageRow:
    """One stage, as the model would be cut.

    Attributes:
        stage: Its number.
        rank: On which it is.
        first: Name of its first layer.
        last: Name of its last layer.
        num_layers: Number of its layers.
        parameters: Number of elements.
    """

    stage: int
    rank: int
    first: str
    last: str
    num_layers: int
    parameters: int


@dataclass
class Findings:
    """All rows.

    Attributes:
        rows: In the order in which they were asked.
        stages: As the model would be cut; none if it cannot be.
        grid: Of the ranks, if that is known.
        timing: What would run when, if that is known.
        batch_size: Of the first batch, if that is known.
        peak_bytes: Estimated, by rank, if memory was asked for.
    """

    rows: list[Row] = field(default_factory=list)
    stages: list[StageRow] = field(default_factory=list)
    grid: Grid | None = None
    timing: Timing | None = None
    batch_size: int | None = None
    peak_bytes: tuple[int, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether nothing is in the way."""
        return all(row.status != "no" for row in self.rows)

    @property
    def num_ranks(self) -> int:
        """Of all pipelines, over all nodes."""
        assert self.grid is not None
        return self.grid.size


@dataclass(frozen=True)
class Plans:
    """What is to be run.

    Attributes:
        module: The user's, not yet used. It is attached to a Trainer here.
        data: A datamodule, a dataloader, or nothing where the module has its own.
        devices: Number of processes on each node.
        strategy: Arguments of PipelineStrategy.
        trainer: Arguments of the Trainer, strategy and devices left out.
        batch_size: Samples to take of the first batch; all by default.
        memory: Bytes that each rank has. Layers are run one by one to estimate what it needs.
    """

    module: LightningModule
    data: Any
    devices: int
    strategy: Mapping[str, Any]
    trainer: Mapping[str, Any]
    batch_size: int | None = None
    memory: float | None = None
