"""What can be said about a run before it is launched: all that the strategy would refuse, at once.

Each row asks a function that the strategy asks as well, in this process and without other ranks.
What follows from something that failed is not checked.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_pipe import checks
from lightning_pipe.assembly import Settings, check_call, cut_batch
from lightning_pipe.checking.parity_runs import first_batch
from lightning_pipe.checking.preflight_memory import peak_bytes
from lightning_pipe.checking.preflight_rows import Findings, Plans, Row, StageRow, Status
from lightning_pipe.layer_times import LayerTimes
from lightning_pipe.loss_scaling import scaler_of
from lightning_pipe.partition import (
    DeferredTensors,
    PipelinedLayers,
    find_layers,
    outside_parameters,
    parameter_counts,
    partition,
    shared_between_stages,
    stage_slices,
)
from lightning_pipe.partition.call_arguments import training_call
from lightning_pipe.partition.measure import measure
from lightning_pipe.planning.infeasible import in_words
from lightning_pipe.planning.zero import Zero
from lightning_pipe.programs import Timing
from lightning_pipe.quiet import quiet_lightning
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.runtime.microbatch import find_batch_size, first_samples
from lightning_pipe.schedule import Placement, look_up, policy_for


def look(plans: Plans, progress: Callable[[int, int], None] | None = None) -> Findings:
    """Ask all there is to ask before a launch.

    Args:
        plans: What is to be run.
        progress: Called with the number of layers that have been run for the estimate of memory,
            and that of all.
    """
    return _Inspection(plans, progress).run()


class _Unknown(Exception):
    """This cannot be found out here; a run will."""


class _Inspection:
    """One look at all of it: each row may need what others have found."""

    def __init__(self, plans: Plans, progress: Callable[[int, int], None] | None) -> None:
        self._plans, self._progress = plans, progress
        self._found: dict[str, Any] = {}
        self.findings = Findings()

    def run(self) -> Findings:
        with quiet_lightning():
            self._ask("options", self._options)
            self._ask("ranks", self._ranks, "options")
            self._ask("schedule", self._schedule, "ranks")
            self._ask("ZeRO", self._zero, "ranks")
            self._ask("Trainer", self._trainer, "options")
            self._ask("precision", self._precision, "schedule", "Trainer")
            self._ask("module", self._module)
            self._ask("optimizer", self._optimizer, "Trainer", "module")
            self._ask("layers", self._layers)
            self._ask("batch", self._batch)
            self._ask("stages", self._stages, "layers", "schedule", "Trainer")
            self._ask("shared parameters", self._shared, "stages")
            self._ask("parameters outside", self._outside, "layers", "schedule")
            self._ask("BatchNorm", self._batchnorm, "layers", "options")
            self._ask("micro-batches", self._microbatches, "batch", "schedule")
            self._ask("code between layers", self._glue, "layers", "batch")
            if self._plans.memory is not None:
                needs = "Trainer", "ZeRO", "stages", "micro-batches", "code between layers"
                self._ask("memory", self._memory, *needs)
        if isinstance(self._plans.data, LightningDataModule):
            self._plans.data.trainer = None
        return self.findings

    def _ask(self, name: str, question: Callable[[], tuple[Any, str]], *needs: str) -> None:
        missing = [need for need in needs if need not in self._found]
        if missing:
            text = f"It depends on {' and '.join(missing)}."
            self.findings.rows.append(Row(name, "not checked", text))
            return
        status: Status = "ok"
        self._warnings: list[str] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of Lightning and of the user's code
                self._found[name], text = question()
        except _Unknown as unknown:
            status, text = "not checked", str(unknown)
        except MisconfigurationException as error:
            status, text = "no", str(error)
        except Exception as error:  # the user's code may raise anything
            status, text = "no", f"{type(error).__name__}: {error}"
        if status == "ok" and self._warnings:
            status, text = "warning", " ".join(filter(None, (text, *self._warnings)))
        self.findings.rows.append(Row(name, status, text))

    @contextlib.contextmanager
    def _heeding(self) -> Iterator[None]:
        """Inside, what the strategy's functions warn of goes into the row."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        self._warnings += [str(warning.message) for warning in caught]

    # --------------------------------------------------------------------- strategy and Trainer

    @property
    def _settings(self) -> Settings:
        settings: Settings = self._found["options"]._settings
        return settings

    @property
    def _placement(self) -> Placement:
        placement: Placement = self._found["schedule"].placement
        return placement

    def _options(self) -> tuple[Any, str]:
        from lightning_pipe import PipelineStrategy

        strategy = PipelineStrategy(**self._plans.strategy)
        defaults = inspect.signature(PipelineStrategy).parameters
        given = [
            f"{name}={value!r}"
            for name, value in self._plans.strategy.items()
            if value != defaults[name].default
        ]
        return strategy, f"PipelineStrategy({', '.join(given)})"

    def _ranks(self) -> tuple[Grid, str]:
        nodes = int(self._plans.trainer.get("num_nodes", 1))
        grid = checks.check_world(self._plans.devices * nodes, *self._found["options"]._sizes)
        self.findings.grid = grid
        words = f"{grid.size} processes, {grid.pipeline} in a pipeline"
        words += f", {grid.data} replicas" if grid.data > 1 else ""
        return grid, words + (f", {grid.tensor} share each layer" if grid.tensor > 1 else "")

    def _zero(self) -> tuple[Zero, str]:
        strategy, grid = self._found["options"], self._found["ranks"]
        zero = Zero(strategy._zero_stage, strategy._reshards)
        if not zero.stage:
            return zero, "0: replicas divide nothing" if grid.data > 1 else "0, one replica"
        if grid.data == 1:
            self._warnings.append(
                f"zero_stage={zero.stage} with one replica: there is nothing to divide, but "
                "weights in half precision get 32-bit copies. Set data_parallel_size."
            )
        of_rank = ("the states of the optimizer", "gradients", "parameters")[: zero.stage]
        return zero, f"{zero.stage}: {grid.data} replicas divide {', '.join(of_rank)}"

    def _schedule(self) -> tuple[Timing, str]:
        settings, ranks = self._settings, self._found["ranks"].pipeline
        checks.check_schedule(
            settings.schedule,
            settings.num_microbatches,
            settings.stages_per_rank,
            ranks,
            settings.activation_checkpointing,
            self._found["options"]._zero_stage,
        )
        timing = Timing(
            settings.schedule,
            settings.num_microbatches,
            policy_for(settings.schedule, settings.weight_stashing, settings.vertical_sync),
            look_up(settings.schedule).place(ranks, settings.stages_per_rank),
        )
        self.findings.timing = timing
        count = settings.num_microbatches
        return timing, (
            f"{settings.schedule}, {timing.placement.num_stages} stages, "
            f"{'as many micro-batches as fit' if count == 'auto' else f'{count} micro-batches'}"
        )

    def _trainer(self) -> tuple[Trainer, str]:
        strategy = self._found["options"]
        options = {"logger": False, **self._plans.trainer}
        trainer = Trainer(**{**options, "devices": self._plans.devices, "strategy": strategy})
        self._attach(trainer)
        self._found["Trainer"] = trainer  # whatever it lacks, others can look at it
        problems = list(checks.problems_of_trainer(trainer))
        io = strategy.checkpoint_io, strategy._saves_distributed_checkpoint
        problems += _refusals(checks.check_checkpoint_io, *io)
        if look_up(self._settings.schedule).continuous:
            problems += _refusals(checks.check_accumulation, trainer.accumulate_grad_batches)
            with self._heeding():
                checks.warn_of_clipping(trainer)
        if problems:
            raise MisconfigurationException(" ".join(problems))
        return trainer, f"{type(trainer.accelerator).__name__}, callbacks and profiler"

    def _attach(self, trainer: Trainer) -> None:
        """Connect it with module and data, as at the beginning of a fit."""
        module, data = self._plans.module, self._plans.data
        trainer.strategy.connect(module)
        module.trainer = trainer
        trainer.state.fn = TrainerFn.FITTING
        kind = "datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders"
        trainer._data_connector.attach_data(module, **{kind: data})
        self._times = LayerTimes(
            self._settings.partition,
            module,
            trainer.precision_plugin,
            trainer.strategy.root_device,
            lambda value: value,
        )

    def _precision(self) -> tuple[bool, str]:
        precision = self._found["Trainer"].precision_plugin
        checks.check_precision(precision, self._settings.schedule, self._settings.weight_stashing)
        return True, str(precision.precision)

    # -------------------------------------------------------------------------------- the module

    def _module(self) -> tuple[bool, str]:
        module = self._plans.module
        problems = list(checks.problems_of_module(module, fitting=True))
        if problems:
            raise MisconfigurationException(" ".join(problems))
        return True, f"{type(module).__name__}, automatic optimization"

    def _optimizer(self) -> tuple[bool, str]:
        trainer, module = self._found["Trainer"], self._plans.module
        self._build()
        try:
            with checks.expecting_one_optimizer():
                optimizers, _ = _init_optimizers_and_lr_schedulers(module)
        except MisconfigurationException:
            raise
        except Exception as error:
            raise _Unknown(
                "configure_optimizers could not be called before a run "
                f"({type(error).__name__}: {error})."
            ) from error
        checks.check_optimizers(optimizers, scaler_of(trainer.precision_plugin) is not None)
        return True, ", ".join(type(optimizer).__name__ for optimizer in optimizers)

    def _build(self) -> None:
        """Call ``configure_model``, without memory."""
        module = self._plans.module
        grid = self._found.get("ranks")
        if is_overridden("configure_model", module) and grid is not None and grid.tensor > 1:
            raise _Unknown(
                "configure_model distributes layers over the ranks that share them, and there are "
                "none before a run."
            )
        if is_overridden("configure_model", module) and "built" not in self._found:
            self._found["built"] = True
            with DeferredTensors().recording():
                module.configure_model()

    def _layers(self) -> tuple[PipelinedLayers, str]:
        module = self._plans.module
        path = self._plans.strategy.get("module")
        self._build()
        try:
            found = find_layers(module, path)
        except MisconfigurationException:
            if not is_overridden("setup", module):
                raise
            module.setup("fit")
            found = find_layers(module, path)
        where = repr(found.name) if found.name else type(module).__name__
        return found, f"{len(found.layers)} layers of {where}"

    def _stages(self) -> tuple[list[int], str]:
        found, placement = self._found["layers"], self._placement
        counts = parameter_counts(found)
        costs = self._times.of(found) or counts
        sizes = partition(self._settings.partition, costs, placement.num_stages)
        for stage, where in enumerate(stage_slices(sizes)):
            self.findings.stages.append(
                StageRow(
                    stage,
                    placement.rank_of[stage],
                    found.names[where.start],
                    found.names[where.stop - 1],
                    len(where),
                    sum(counts[layer] for layer in where),
                )
            )
        return sizes, f"{', '.join(map(str, sizes))} layers"

    def _shared(self) -> tuple[bool, str]:
        pairs = shared_between_stages(self._found["layers"], self._found["stages"])
        if self._found["schedule"].continuous:
            checks.check_tied(pairs)
        if not pairs:
            return True, "none between stages"
        named = "; ".join(f"{a!r} is {b!r}" for a, b in pairs)
        return True, f"{named}: on several ranks, their gradients are summed"

    def _outside(self) -> tuple[bool, str]:
        outside = outside_parameters(self._plans.module, self._found["layers"])
        names = [name for name, parameter in outside if parameter.requires_grad]
        if self._found["schedule"].continuous:
            checks.check_outside(names)
        if not names:
            return True, "none"
        return True, f"{', '.join(map(repr, names))}: on all ranks, their gradients are summed"

    def _batchnorm(self) -> tuple[bool, str]:
        settings, layers = self._settings, self._found["layers"].layers
        with self._heeding():
            checks.check_batchnorm(settings.deferred_batchnorm, layers)
        norms = [m for layer in layers for m in layer.modules() if isinstance(m, _BatchNorm)]
        if not norms:
            return True, "none"
        statistics = "once per batch" if settings.deferred_batchnorm else "after each micro-batch"
        if settings.num_microbatches != 1:
            self._warnings.append(
                f"{len(norms)} layers normalise each micro-batch by itself; their running "
                f"statistics are updated {statistics} (deferred_batchnorm)."
            )
            return True, ""
        return True, f"{len(norms)} layers"

    # --------------------------------------------------------------------------------- the batch

    def _batch(self) -> tuple[Any, str]:
        module = self._plans.module
        batch = first_batch(module, self._plans.data)
        if self._plans.batch_size is not None:
            batch = first_samples(batch, self._plans.batch_size)
        size = find_batch_size(batch)
        self.findings.batch_size = size
        text = f"{'an unknown number of' if size is None else size} samples"
        replicas = self._found["ranks"].data if "ranks" in self._found else 1
        return batch, text + (" for each replica" if replicas > 1 else "")

    def _microbatches(self) -> tuple[Any, str]:
        batch, timing = self._found["batch"], self._found["schedule"]
        module, size = self._plans.module, find_batch_size(batch)
        if not hasattr(module, "split_batch"):
            checks.check_batch_size(size, self._settings.num_microbatches)
            checks.check_delay(size, timing.policy, timing.placement.num_stages)
        count = timing.count(size or 1)
        pieces, sizes = cut_batch(module, batch, count)
        text = f"{len(sizes)} of {_range(sizes)} samples"
        used = timing.schedule_for(len(sizes))
        if used != timing.schedule:
            self._warnings.append(
                f"{timing.schedule!r} cannot take {len(sizes)} micro-batches; the batch would run "
                f"in the order of {used!r}. Choose another batch_size or num_microbatches."
            )
        return pieces, text

    def _glue(self) -> tuple[Any, str]:
        found = self._found["layers"]
        microbatch = self._found.get("micro-batches", [self._found["batch"]])[0]
        try:
            call = training_call(self._plans.module, found, microbatch)
        except MisconfigurationException:
            raise
        except Exception as error:
            raise _Unknown(
                f"training_step could not be called before a run ({type(error).__name__}: {error})."
            ) from error
        with self._heeding():
            check_call(found, *call)
        return call, "none"

    def _memory(self) -> tuple[bool, str]:
        """Run the layers with a micro-batch."""
        found, timing, limit = self._found["layers"], self._found["schedule"], self._plans.memory
        assert limit is not None
        precision = self._found["Trainer"].precision_plugin
        precision.convert_module(self._plans.module)  # which nobody uses any more
        microbatch = precision.convert_input(self._found["micro-batches"][0])
        args, kwargs = precision.convert_input(self._found["code between layers"])
        outside = [parameter for _, parameter in outside_parameters(self._plans.module, found)]
        samples = find_batch_size(microbatch) or 1
        profile = measure(
            self._plans.module,
            found,
            args,
            kwargs,
            samples,
            repeats=1,
            progress=self._progress,
            context=precision.forward_context,
            batch=microbatch,
        )
        peaks = self.findings.peak_bytes = peak_bytes(
            profile,
            timing,
            self._found["stages"],
            self.findings.batch_size or samples,
            self._settings.activation_checkpointing,
            outside,
            self._found["ranks"].data,
            self._found["ZeRO"],
        )
        fullest = max(range(len(peaks)), key=peaks.__getitem__)
        text = f"rank {fullest} needs {in_words(peaks[fullest])}, and has {in_words(limit)}"
        if peaks[fullest] > limit:
            raise MisconfigurationException(
                f"{text}: {in_words(peaks[fullest] - limit)} are missing. More micro-batches, "
                "activation_checkpointing='stage' or more devices need less of each; "
                "lightning-pipe plan finds what fits."
            )
        return True, text


def _refusals(check: Callable[..., None], *args: Any) -> list[str]:
    try:
        check(*args)
    except MisconfigurationException as error:
        return [str(error)]
    return []


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"
