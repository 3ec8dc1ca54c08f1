"""One rank's part of a LightningModule, made into a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn

from lightning_pipe import checks
from lightning_pipe.layer_exchange import collect_layers, fetch_layers, held_layers
from lightning_pipe.partition import (
    DeferredTensors,
    PipelinedLayers,
    check_glue,
    find_layers,
    keyword_names,
    materialise,
    outside_buffers,
    outside_parameters,
    parameter_counts,
    partition,
    restore_class,
    return_freed_memory,
    shard,
    shared_between_stages,
    stage_slices,
    swap_class,
)
from lightning_pipe.programs import RankPrograms, Timing
from lightning_pipe.report import PipelineReport, StageReport
from lightning_pipe.runtime.activation_offload import ActivationOffload
from lightning_pipe.runtime.activation_partition import partition_over
from lightning_pipe.runtime.call import PipelinedModule, attach
from lightning_pipe.runtime.consensus import Consensus
from lightning_pipe.runtime.executor import Measurements
from lightning_pipe.runtime.host_copies import host_copies
from lightning_pipe.runtime.microbatch import find_batch_size, split_batch
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.stage import Checkpointing, Stage
from lightning_pipe.runtime.training import Sharing
from lightning_pipe.runtime.transport import Transport
from lightning_pipe.schedule import Plan, look_up, make_plan, policy_for, simulate
from lightning_pipe.sharing import Groups, SharedParameters

_LONG_FILL = 100  # micro-batches; a longer one has no noticeable bubble, and takes long to simulate
_DEBUG = "LIGHTNING_PIPE_DEBUG"  # variable of the environment: compare versions at every message


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
    weight_stashing: bool = True
    vertical_sync: bool = False
    deferred_batchnorm: bool = False
    activation_offload: bool = False
    partition_activations: bool = False


class Assembly:
    """Cuts a model and keeps this rank's part.

    Args:
        root: The user's LightningModule, its layers built.
        settings: How.
        rank: Of the pipeline.
        num_ranks: Of the pipeline.
        seconds_of: Gives the seconds of each layer, if it is to be cut by them.

    Raises:
        MisconfigurationException: The model cannot be cut so.
    """

    def __init__(
        self,
        root: LightningModule,
        settings: Settings,
        rank: int,
        num_ranks: int,
        seconds_of: Callable[[PipelinedLayers], Sequence[float] | None] = lambda found: None,
    ) -> None:
        self._root, self._settings, self._rank = root, settings, rank
        self._placement = look_up(settings.schedule).place(num_ranks, settings.stages_per_rank)
        self._timing = Timing(
            settings.schedule,
            settings.num_microbatches,
            policy_for(settings.schedule, settings.weight_stashing, settings.vertical_sync),
            self._placement,
        )
        self._found = find_layers(root, settings.module)
        self._counts = parameter_counts(self._found)
        costs = seconds_of(self._found) or self._counts
        self._sizes = partition(settings.partition, costs, self._placement.num_stages)
        if self._timing.continuous:
            checks.check_tied(shared_between_stages(self._found, self._sizes))
        checks.check_batchnorm(settings.deferred_batchnorm, self._found.layers)
        self._layers_of = stage_slices(self._sizes)
        self._own_stages = self._placement.stages_of(rank)
        self._first_batch = True
        self._collects = False  # whether rank 0 had the whole model, and gets it back
        self.module = self._found.module
        self.pipeline: Pipeline | None = None

    @property
    def timing(self) -> Timing:
        """What runs when, and where."""
        return self._timing

    @property
    def shared(self) -> list[nn.Parameter]:
        """The parameters outside the layers, which every rank has."""
        return [parameter for _, parameter in outside_parameters(self._root, self._found)]

    def shard(self, deferred: DeferredTensors | None = None) -> None:
        """Free what other ranks own, and make what all own equal. Collective.

        Args:
            deferred: How the layers were built that have no memory yet; they get it here, each on
                the rank that owns it.
        """
        owned = [index for stage in self._own_stages for index in self._layers_of[stage]]
        names, layers = self._found.names, self._found.layers
        by_name = dict(zip(names, layers, strict=True))
        held = held_layers(by_name)
        self._collects = held[0].keys() == by_name.keys() and not any(held[0].values())
        fetch_layers(by_name, [names[index] for index in owned], held)
        shard(self._found, owned)
        if deferred is not None:
            materialise(self._root, deferred)
        return_freed_memory()
        self._parameters = _parameters_of(self._found)

    def settle(self, groups: Groups) -> SharedParameters:
        """Make what several ranks own equal, and refuse layers that have changed since. Collective.

        Hooks called ``setup`` come between; they may add parameters outside the layers.

        Args:
            groups: Make groups of ranks.

        Returns:
            What this rank shares with others.

        Raises:
            MisconfigurationException: Layers have changed.
        """
        now = find_layers(self._root, self._settings.module)
        checks.check_unchanged(self._parameters, _parameters_of(now))
        self._parameters = {}  # with ZeRO-3 only parts of them stay in memory
        with torch.no_grad():
            for buffer in outside_buffers(self._root, self._found):
                dist.broadcast(buffer.data, src=0)
        shared = self.shares(groups)
        shared.make_equal()
        return shared

    def shares(self, groups: Groups) -> SharedParameters:
        """What this rank shares with others. Collective.

        Args:
            groups: Make groups of ranks.
        """
        return SharedParameters(
            self._found, self._sizes, self._placement, self._rank, self.shared, groups
        )

    def connect(
        self,
        transport: Transport,
        random_states: RandomStates,
        sharing: Sharing,
        consensus: Consensus | None = None,
        tensor_group: Any = None,
    ) -> Pipeline:
        """Let the pipelined module's calls go through the pipeline.

        Args:
            transport: Connects the ranks.
            random_states: Seed the streams of step and layers.
            sharing: What this rank has that others have, too.
            consensus: With other pipelines, if there are any.
            tensor_group: The process group of the ranks that have parts of the same layers.
        """
        found, settings = self._found, self._settings
        offload = partition = None
        if settings.activation_offload:
            offload = ActivationOffload(host_copies(transport.device))
        if settings.partition_activations:
            partition = partition_over(tensor_group)
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
                settings.deferred_batchnorm,
                offload=offload,
                partition=partition,
            )
        self.pipeline = Pipeline(
            stages,
            self._placement.num_stages,
            self._count,
            RankPrograms(self._timing, self._rank, transport.receive_model),
            transport,
            random_states,
            sharing,
            list(self._root.parameters()),
            self._split,
            self._count_evaluated,
            outside_buffers(self._root, self._found),  # now: a change of dtype replaces buffers
            settings.evaluation_outputs,
            compares_versions=os.environ.get(_DEBUG, "") not in ("", "0"),
            last_rank=self._placement.rank_of[-1],
            consensus=consensus,
        )
        swap_class(found.module, PipelinedModule)
        attach(found.module, _CheckedOnce(self.pipeline, self))
        return self.pipeline

    def disconnect(self, collect: bool) -> None:
        """Give the pipelined module its own ``forward`` back.

        Args:
            collect: Whether rank 0 gets the weights of all layers, if it had them at first: a
                model that was built layer by layer may be too large for it. Collective then.
        """
        if collect and self._collects:
            collect_layers(dict(zip(self._found.names, self._found.layers, strict=True)))
        attach(self._found.module, None)
        restore_class(self._found.module)
        self.pipeline = None

    def check_batch(self, batch: Any) -> None:
        """Refuse a first batch that is too small; a later one may be short."""
        if self._timing.continuous:
            outside = outside_parameters(self._root, self._found)
            checks.check_outside([name for name, p in outside if p.requires_grad])
        if self._first_batch and not hasattr(self._root, "split_batch"):
            batch_size = find_batch_size(batch)
            checks.check_batch_size(batch_size, self._settings.num_microbatches)
            checks.check_delay(batch_size, self._timing.policy, self._placement.num_stages)
        self._first_batch = False

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See :func:`check_call`."""
        check_call(self._found, args, kwargs)

    def report(self, measured: Sequence[Measurements], batch_size: int | None) -> PipelineReport:
        """Say what a training run came to.

        Args:
            measured: By rank.
            batch_size: Of a batch.
        """
        count = self._timing.count(batch_size or 1)
        wall = max(m.wall for m in measured)  # a rank's own ends when others are still cooling down
        timeline = simulate(self._typical_plan(count, measured[0]))
        stages, trained_counts = [], parameter_counts(self._found, trained=True)
        for index, where in enumerate(self._layers_of):
            rank = self._placement.rank_of[index]
            names = self._found.names[where.start], self._found.names[where.stop - 1], len(where)
            parameters = sum(self._counts[layer] for layer in where)
            trained = sum(trained_counts[layer] for layer in where)
            versions, weight_bytes = measured[rank].weights[index]
            stages.append(
                StageReport(
                    rank,
                    names,
                    parameters,
                    measured[rank].peak_in_flight[index],
                    measured[rank].updates[index],
                    versions,
                    weight_bytes,
                    trained,
                    measured[rank].backwards_skipped[index],
                    measured[rank].gradient_bytes_saved[index],
                )
            )
        return PipelineReport(
            self._settings.schedule,
            count,
            tuple(stages),
            timeline.mean_bubble,
            tuple(1 - m.busy / wall if wall else 0.0 for m in measured),
            measured[0].batches,
            self._timing.continuous,
        )

    def _typical_plan(self, count: int, measured: Measurements) -> Plan:
        """What was run again and again: a batch, or a fill of as many as there were on average."""
        timing = self._timing
        if not timing.continuous:
            return make_plan(timing.schedule_for(count), timing.placement, count)
        batches = min(
            max(1, round(measured.batches / max(measured.fills, 1))), max(1, _LONG_FILL // count)
        )
        return make_plan(
            timing.schedule, timing.placement, (count,) * batches, policy=timing.policy
        )

    def _keywords(self, layer: nn.Module, num_positional: int) -> frozenset[str]:
        if not self._found.keywords:
            return frozenset()
        return keyword_names(layer, num_positional)

    def _split(self, batch: Any, count: int) -> tuple[list[Any], list[int]]:
        return cut_batch(self._root, batch, count)

    def _count_evaluated(self, arguments: Any) -> int:
        """As in training; one if the module cuts its batches by itself, which a call's are not."""
        return 1 if hasattr(self._root, "split_batch") else self._count(arguments)

    def _count(self, batch: Any) -> int:
        size = find_batch_size(batch)
        count = self._timing.count(size or 1)
        return min(count, size) if size and not hasattr(self._root, "split_batch") else count


def check_call(found: PipelinedLayers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what the layers would not see of a pipelined call: keywords, and code between them.

    Raises:
        MisconfigurationException: There is something.
    """
    if kwargs and not found.keywords:
        raise MisconfigurationException(
            f"The pipelined nn.Sequential {found.name!r} was called with keyword "
            f"arguments {sorted(kwargs)}, which it does not take. Define "
            "`configure_pipeline(self)` to pass keyword arguments to layers."
        )
    check_glue(found, args, kwargs)


def cut_batch(module: LightningModule, batch: Any, count: int) -> tuple[list[Any], list[int]]:
    """Cut a batch as the module's own `split_batch` does, or along dimension 0.

    Args:
        module: The user's.
        batch: Of it.
        count: Number of micro-batches.

    Returns:
        The micro-batches, and the number of samples in each.
    """
    own = getattr(module, "split_batch", None)
    if own is None:
        return split_batch(batch, count)
    pieces = list(own(batch, count))
    return pieces, [find_batch_size(piece) or 1 for piece in pieces]


def _parameters_of(found: PipelinedLayers) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for prefix, layer in zip(found.names, found.layers, strict=True)
        for name, parameter in layer.named_parameters(prefix, remove_duplicate=False)
    }


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
