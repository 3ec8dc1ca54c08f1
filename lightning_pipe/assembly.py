"""One rank's part of a LightningModule, made into a pipeline."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipe import checks
from lightning_pipe.checkpoint import collect_layers, fetch_layers
from lightning_pipe.partition import (
    check_glue,
    find_layers,
    keyword_names,
    outside_buffers,
    outside_parameters,
    parameter_counts,
    partition,
    restore_class,
    shard,
    shared_between_stages,
    stage_slices,
    swap_class,
)
from lightning_pipe.report import PipelineReport, StageReport
from lightning_pipe.runtime.call import PipelinedModule, attach
from lightning_pipe.runtime.executor import Measurements, Program
from lightning_pipe.runtime.microbatch import find_batch_size, split_batch
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.stage import Checkpointing, Stage
from lightning_pipe.runtime.transport import ReceiveModel, Transport
from lightning_pipe.schedule import Placement, accepts, make_plan, simulate


@dataclass(frozen=True)
class Settings:
    """The options of PipelineStrategy that say how a model becomes a pipeline."""

    schedule: str
    num_microbatches: int | Literal["auto"]
    stages_per_rank: int
    partition: str | Sequence[int]
    module: str | None
    activation_checkpointing: Checkpointing
    evaluation_outputs: Literal["all", "last"]


class Assembly:
    """Cuts a model and keeps this rank's part.

    Args:
        root: The user's LightningModule, its layers built.
        settings: How.
        rank: Of the pipeline.
        num_ranks: Of the pipeline.

    Raises:
        MisconfigurationException: The model cannot be cut so.
    """

    def __init__(
        self, root: LightningModule, settings: Settings, rank: int, num_ranks: int
    ) -> None:
        self._root, self._settings, self._rank = root, settings, rank
        self._placement = Placement.round_robin(num_ranks, settings.stages_per_rank)
        self._found = find_layers(root, settings.module)
        self._counts = parameter_counts(self._found)
        self._sizes = partition(settings.partition, self._counts, self._placement.num_stages)
        checks.check_tied(shared_between_stages(self._found, self._sizes))
        self._layers_of = stage_slices(self._sizes)
        self._own_stages = self._placement.stages_of(rank)
        self._first_batch = True
        outside = outside_parameters(root, self._found)
        self.shared: list[nn.Parameter] = [parameter for _, parameter in outside]
        self._receive_model: ReceiveModel = "posted"
        self.module = self._found.module
        self.pipeline: Pipeline | None = None

    def shard(self) -> None:
        """Free what other ranks own, and make what all own equal. Collective."""
        owned = [index for stage in self._own_stages for index in self._layers_of[stage]]
        names, layers = self._found.names, self._found.layers
        by_name = dict(zip(names, layers, strict=True))
        fetch_layers(by_name, [names[index] for index in owned])
        shard(self._found, owned)
        _return_freed_memory()
        with torch.no_grad():
            for tensor in [*self.shared, *outside_buffers(self._root, self._found)]:
                dist.broadcast(tensor.data, src=0)

    def connect(self, transport: Transport, random_states: RandomStates) -> Pipeline:
        """Let the pipelined module's calls go through the pipeline.

        Args:
            transport: Connects the ranks.
            random_states: Seed the streams of step and layers.
        """
        found, settings = self._found, self._settings
        self._receive_model = transport.receive_model
        keywords = cache(self._keywords)  # signatures are slow to read, and do not change
        stages = {}
        for index in self._own_stages:
            where = self._layers_of[index]
            stages[index] = Stage(
                index,
                self._placement.num_stages,
                [found.layers[layer] for layer in where],
                where.start,
                keywords,
                settings.activation_checkpointing,
                random_states,
            )
        self.pipeline = Pipeline(
            stages,
            self._placement.num_stages,
            self._count,
            self._program,
            transport,
            random_states,
            self.shared,
            list(self._root.parameters()),
            self._split,
            self._count_evaluated,
            outside_buffers(self._root, self._found),  # now: a change of dtype replaces buffers
            settings.evaluation_outputs,
        )
        swap_class(found.module, PipelinedModule)
        attach(found.module, _CheckedOnce(self.pipeline, self))
        return self.pipeline

    def disconnect(self, collect: bool) -> None:
        """Give the pipelined module its own ``forward`` back.

        Args:
            collect: Whether rank 0 gets the weights of all layers; collective then.
        """
        if collect:
            collect_layers(dict(zip(self._found.names, self._found.layers, strict=True)))
        attach(self._found.module, None)
        restore_class(self._found.module)
        self.pipeline = None

    def check_batch(self, batch: Any) -> None:
        """Refuse a first batch that is too small; a later one may be short."""
        if self._first_batch and not hasattr(self._root, "split_batch"):
            checks.check_batch_size(find_batch_size(batch), self._settings.num_microbatches)
        self._first_batch = False

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what the layers would not see: keywords, and code between them."""
        if kwargs and not self._found.keywords:
            raise MisconfigurationException(
                f"The pipelined nn.Sequential {self._found.name!r} was called with keyword "
                f"arguments {sorted(kwargs)}, which it does not take. Define "
                "`configure_pipeline(self)` to pass keyword arguments to layers."
            )
        check_glue(self._found, args, kwargs)

    def report(self, measured: Sequence[Measurements], batch_size: int | None) -> PipelineReport:
        """Say what a training run came to.

        Args:
            measured: By rank.
            batch_size: Of a batch.
        """
        count = self._count_for(batch_size)
        wall = max(m.wall for m in measured)  # a rank's own ends when others are still cooling down
        plan = make_plan(self._schedule_for(count), self._placement, count)
        stages = []
        for index, where in enumerate(self._layers_of):
            rank = self._placement.rank_of[index]
            names = self._found.names[where.start], self._found.names[where.stop - 1], len(where)
            parameters = sum(self._counts[layer] for layer in where)
            stages.append(
                StageReport(rank, names, parameters, measured[rank].peak_in_flight[index])
            )
        return PipelineReport(
            self._settings.schedule,
            count,
            tuple(stages),
            simulate(plan).mean_bubble,
            tuple(1 - m.busy / wall if wall else 0.0 for m in measured),
            measured[0].rounds,
        )

    def _keywords(self, layer: nn.Module, num_positional: int) -> frozenset[str]:
        if not self._found.keywords:
            return frozenset()
        return keyword_names(layer, num_positional)

    def _program(self, kind: Literal["training", "evaluation"], count: int) -> Program:
        schedule = "forward" if kind == "evaluation" else self._schedule_for(count)
        plan = make_plan(schedule, self._placement, count, self._receive_model)
        return plan.programs[self._rank]

    def _schedule_for(self, count: int) -> str:
        """The schedule, or F-then-B over the same stages for a count that it cannot take."""
        fits = accepts(self._settings.schedule, self._placement, count)
        return self._settings.schedule if fits else "gpipe"

    def _split(self, batch: Any, count: int) -> tuple[list[Any], list[int]]:
        own = getattr(self._root, "split_batch", None)
        if own is None:
            return split_batch(batch, count)
        pieces = list(own(batch, count))
        return pieces, [find_batch_size(piece) or 1 for piece in pieces]

    def _count_evaluated(self, arguments: Any) -> int:
        """As in training; one if the module cuts its batches by itself, which a call's are not."""
        return 1 if hasattr(self._root, "split_batch") else self._count(arguments)

    def _count(self, batch: Any) -> int:
        return self._count_for(find_batch_size(batch))

    def _count_for(self, batch_size: int | None) -> int:
        """Into how many micro-batches a batch is cut."""
        if self._settings.num_microbatches != "auto":
            return self._settings.num_microbatches
        most = 1 if self._settings.schedule == "naive" else 4 * self._placement.num_stages
        most = min(most, batch_size or 1)
        fitting = (
            count
            for count in range(most, 0, -1)
            if accepts(self._settings.schedule, self._placement, count)
        )
        return next(fitting, most)


def _return_freed_memory() -> None:
    """Let glibc give the layers' memory back to the system.

    It keeps freed blocks of up to 32 MB, once a block of their size was freed before: 150 of 200 MB
    stayed with a process on four ranks.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


class _CheckedOnce:
    """Looks at the first call in each mode before it answers it."""

    def __init__(self, pipeline: Pipeline, assembly: Assembly) -> None:
        self._pipeline, self._assembly = pipeline, assembly
        self._checked_modes: set[bool] = set()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`~lightning_pipe.runtime.call.Callee`."""
        training = self._assembly.module.training
        if training not in self._checked_modes:
            self._assembly.check_call(args, kwargs)
            self._checked_modes.add(training)
        return self._pipeline.call(args, kwargs)
