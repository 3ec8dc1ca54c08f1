"""PipelineStrategy: the adapter between Lightning's Trainer and a pipeline."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipe import checks
from lightning_pipe.assembly import Assembly, Settings
from lightning_pipe.checkpoint import CheckpointError, PipelineCheckpointIO
from lightning_pipe.clipping import clip_over
from lightning_pipe.connections import Connections
from lightning_pipe.coordination import Coordination
from lightning_pipe.data import load_alike
from lightning_pipe.evaluation import PipelineEvaluation
from lightning_pipe.failure import FailureGuard
from lightning_pipe.layer_times import LayerTimes
from lightning_pipe.loss_scaling import SharedScaler, scaler_of
from lightning_pipe.partition import DeferredTensors, has_deferred
from lightning_pipe.process_launcher import ProcessLauncher
from lightning_pipe.processes import PipelineProcesses
from lightning_pipe.programs import Timing
from lightning_pipe.relay import StepLogs
from lightning_pipe.report import PipelineReport
from lightning_pipe.runtime.microbatch import find_batch_size
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.saving import PipelineCheckpoints
from lightning_pipe.sharing import SharedParameters
from lightning_pipe.trainer_patches import count_throughput_by_replica
from lightning_pipe.training import PipelineTraining
from lightning_pipe.zero import Division

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class PipelineStrategy(PipelineProcesses):
    """Train a LightningModule whose layers are spread over the ranks, as one device would.

    The module needs no change: its layers are those of its ``nn.Sequential``, or those that it
    lists in ``configure_pipeline(self) -> Sequence[nn.Module]``.

    Args:
        schedule: In which order micro-batches go through the stages: ``"naive"`` (one at a time),
            ``"gpipe"`` (all forwards, then all backwards; Huang et al. 2019), ``"1f1b"`` (one
            forward, one backward, fewer activations; Narayanan et al. 2019), ``"interleaved"``
            (1f1b with several stages on each rank, a smaller bubble; Narayanan et al. 2021),
            ``"zero_bubble"`` (gradients of weights fill the bubble; Qi et al. 2024), the name of a
            schedule that you have registered, or of a CSV file as ``torch.distributed.pipelining``
            writes them; or, asynchronous, without a bubble between batches, ``"pipedream"`` (an
            update after every backward; Narayanan et al. 2019) or ``"pipedream_2bw"`` (one per
            batch, delayed by one; Narayanan et al. 2021).
        num_microbatches: Into how many micro-batches a batch is cut. ``"auto"``: four for each
            stage, at most one for each sample; 1 for ``"pipedream"``, as many as stages for
            ``"pipedream_2bw"``.
        stages_per_rank: Stages on each rank; more than 1 for ``"interleaved"``; for
            ``"zero_bubble"`` 1, or 2 there and back.
        partition: How layers are put into stages: ``"parameters"`` (the largest stage as small as
            possible), ``"uniform"`` (equally many layers), ``"time"`` (by seconds of forward and
            backward, measured on the module's ``example_input_array`` or on the first batch), the
            name of a profile that ``lightning-pipe profile`` saved (``"profile.json"``), or a list
            with the number of layers of each stage.
        module: Name of the ``nn.Sequential`` to cut, if it is not the only large one.
        activation_checkpointing: Which activations are computed again in backward instead of
            kept: ``"none"``, ``"stage"`` (all but a stage's input) or ``"layer"`` (all but the
            layers' inputs).
        activation_offload: Whether what is kept for backward waits for it in the host's memory
            (ZeRO-R, Rajbhandari et al. 2020); it comes back one computation ahead. For GPUs.
        partition_activations: Whether the ranks that share a layer each keep a part of what
            ``activation_checkpointing`` keeps, which all of them have alike (ZeRO-R).
        weight_stashing: For ``"pipedream"``: whether a backward reads the same version of the
            weights as its forward did, of which a stage then keeps one for each micro-batch in
            flight. Without, it reads the newest, and gradients are of no single version.
        vertical_sync: For ``"pipedream"`` with weight stashing: whether a micro-batch reads on all
            stages the version that the first stage had when it entered.
        evaluation_outputs: Who gets the output of the pipelined call in validation, test and
            prediction: ``"all"`` ranks, or only the ``"last"``, for outputs too large to send.
        deferred_batchnorm: Whether BatchNorm layers update their running statistics once per
            batch, from all of its samples, instead of after each micro-batch (GPipe's way;
            torchgpipe, Kim et al. 2020). Batches are normalised by micro-batch either way.
        save_distributed_checkpoint: Whether a checkpoint is a directory, into which each rank
            writes its own part, instead of one ordinary file. For models that no host can hold.
        pipeline_parallel_size: Ranks in a pipeline; ``"auto"``: as many as there are.
        data_parallel_size: Replicas of the pipeline, each with a share of the data; gradients are
            those of all samples. ``"auto"``: as many as there are ranks for.
        tensor_parallel_size: Ranks that share each layer: in ``configure_model`` the module
            distributes them over ``self.device_mesh["tensor_parallel"]``, as with Lightning's
            ``ModelParallelStrategy``.
        zero_stage: What the replicas of a stage divide among them instead of holding it each (ZeRO,
            Rajbhandari et al. 2020): 0 nothing, 1 the states of the optimizer, 2 gradients too, 3
            parameters too. With parameters of half precision each replica also keeps 32-bit copies
            of those that it updates.
        reshard_after_forward: For ``zero_stage=3``: whether a layer's parameters are gathered for
            each micro-batch and freed after it, and gradients divided after each; by default both
            happen once for each batch.
        process_group_backend: ``"gloo"`` (the default), also for GPUs.
        timeout: After which a wait for another rank ends in an error.
        start_method: How the ranks' processes are started: ``"popen"`` runs the script once for
            each, ``"fork"`` (for notebooks) and ``"spawn"`` run the Trainer's function in them, and
            give weights and results back to the process that called it.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.

    Raises:
        MisconfigurationException: An argument cannot work, or has no effect.
    """

    def __init__(
        self,
        schedule: str = "1f1b",
        num_microbatches: int | Literal["auto"] = "auto",
        stages_per_rank: int = 1,
        partition: Literal["parameters", "uniform", "time"] | str | list[int] = "parameters",
        module: str | None = None,
        activation_checkpointing: Literal["none", "stage", "layer"] = "none",
        activation_offload: bool = False,
        partition_activations: bool = False,
        weight_stashing: bool = True,
        vertical_sync: bool = False,
        evaluation_outputs: Literal["all", "last"] = "all",
        deferred_batchnorm: bool = False,
        save_distributed_checkpoint: bool = False,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = 1,
        tensor_parallel_size: int = 1,
        zero_stage: Literal[0, 1, 2, 3] = 0,
        reshard_after_forward: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        start_method: Literal["popen", "fork", "spawn"] = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        checks.check_arguments(
            {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        )
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        self._settings = Settings(
            schedule,
            num_microbatches,
            stages_per_rank,
            partition if isinstance(partition, str) else tuple(partition),
            module,
            activation_checkpointing,
            evaluation_outputs,
            weight_stashing,
            vertical_sync,
            deferred_batchnorm,
            activation_offload,
            partition_activations,
        )
        self._saves_distributed_checkpoint = save_distributed_checkpoint
        self._start_method = start_method
        self._sizes = pipeline_parallel_size, data_parallel_size, tensor_parallel_size
        self._zero_stage, self._reshards = zero_stage, reshard_after_forward
        self._division: Division | None = None  # from setup to teardown
        self._timeout = timeout
        self._awaits_layers = False  # in a run, until `configure_model` is called
        self._mesh: DeviceMesh | None = None  # kept over runs, as the process group is
        self._assembly: Assembly | None = None
        self._layer_times: LayerTimes | None = None  # in a run
        self._logs: StepLogs | None = None
        self._coordination: Coordination | None = None  # in a run
        self._training: PipelineTraining | None = None  # while fitting
        self._scaler: SharedScaler | None = None  # while fitting in 16-bit floats
        self._batch_size: int | None = None
        self._guard = FailureGuard()
        self.report: PipelineReport | None = None

    def __repr__(self) -> str:
        """Shown by a Trainer that does not know this class."""
        return (
            f"PipelineStrategy(schedule={self._settings.schedule!r}), a strategy for "
            "`lightning.pytorch.Trainer`, not for `pytorch_lightning.Trainer`: import Trainer "
            "and LightningModule from `lightning.pytorch`"
        )

    @property
    def pipeline(self) -> Pipeline:
        """This rank's end of the pipeline; there is one from setup to teardown."""
        assert self._assembly is not None
        assert self._assembly.pipeline is not None
        return self._assembly.pipeline

    @property
    def timing(self) -> Timing:
        """Which schedule runs, and where the stages are; from setup to teardown."""
        assert self._assembly is not None
        return self._assembly.timing

    @property
    def _fit(self) -> PipelineTraining:
        assert self._training is not None
        return self._training

    # --------------------------------------------------------------------------- setup and teardown

    def setup_environment(self) -> None:
        """Connect the ranks, check the module, and free the layers that others own."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self.grid = checks.check_world(self.world_size, *self._sizes, rank=self.global_rank)
        settings, module = self._settings, self.lightning_module
        assert module is not None
        checks.check_schedule(
            settings.schedule,
            settings.num_microbatches,
            settings.stages_per_rank,
            self.grid.pipeline,
            settings.activation_checkpointing,
            self._zero_stage,
        )
        self._layer_times = LayerTimes(
            settings.partition, module, self.precision_plugin, self.root_device, self.broadcast
        )
        checks.check_precision(self.precision_plugin, settings.schedule, settings.weight_stashing)
        checks.check_module(module, module.trainer.state.fn == TrainerFn.FITTING)
        checks.check_trainer(module.trainer)
        checks.check_replicas(
            module.trainer, self.grid.data, self._zero_stage, self._layer_sync is not None
        )
        checks.check_checkpoint_io(self.checkpoint_io, self._saves_distributed_checkpoint)
        self._connections = Connections(
            self.grid,
            self.root_device,
            self._timeout,
            self.cluster_environment,
            self.num_nodes,
            self._mesh,
            for_layers=self.grid.tensor > 1 or self._zero_stage == 3,
        )
        self._mesh = module._device_mesh = self._connections.mesh
        self._assembly = None
        self._checkpoints = PipelineCheckpoints(
            module,
            lambda: self.optimizers,
            lambda: self.checkpoint_io,
            self._saves_distributed_checkpoint,
        )
        self._guard = FailureGuard()
        self._guard.connect(self.global_rank, self.world_size, self._drop_connections)
        self._awaits_layers = is_overridden("configure_model", module)
        if not self._awaits_layers:  # before callbacks' `setup`, which copy the module
            self._shard(early=True)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around ``configure_model``: defer what it builds, then build this rank's part of it."""
        with super().tensor_init_context(empty_init):
            if not self._awaits_layers:  # `trainer.init_module()`, before a run or inside the hook
                yield
                return
            self._awaits_layers = False
            deferred = DeferredTensors()
            with deferred.recording():
                yield
        self._shard(deferred)

    def _shard(self, deferred: DeferredTensors | None = None, early: bool = False) -> None:
        """Cut the model, once its layers exist; later, if its `setup` may build them."""
        module = self.lightning_module
        if self._assembly is not None or module is None:
            return
        assert self._layer_times is not None
        if early and self._layer_times.needs_data:
            return
        try:
            place, ranks = self.grid.pipeline_rank, self.grid.pipeline
            assembly = Assembly(module, self._settings, place, ranks, self._layer_times.of)
        except MisconfigurationException:
            if early and is_overridden("setup", module):
                return
            raise
        self._assembly = assembly
        assembly.shard(deferred)

    def setup(self, trainer: Trainer) -> None:
        """Build this rank's end of the pipeline."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._shard()
        assembly = self._assembly
        assert assembly is not None
        connections = self._connections
        with connections.making_groups():
            shared = assembly.settle(connections.groups)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        replicas = connections.mesh["data_parallel"]
        division = Division(self._zero_stage, shared, replicas, self._reshards)
        self._division = division
        seed, states = self._shared_randomness()
        random_states = RandomStates(seed, self.grid.data_rank, self.root_device)
        random_states.set(states)
        pipeline = assembly.connect(
            connections.transport,
            random_states,
            shared.sharing(division.shards, division.whole),
            connections.consensus,
            connections.mesh["tensor_parallel"].get_group(),
        )
        context = self.precision_plugin.forward_context
        gather = connections.gather_metrics
        self._logs = StepLogs(self.lightning_module, pipeline, context, gather)
        self._evaluation = PipelineEvaluation(
            pipeline, self._logs, self._settings.evaluation_outputs
        )
        coordination = self._coordination = Coordination(trainer, self)
        coordination.stops_evaluations = not connections.consensus.is_needed
        if coordination.stops_evaluations:  # replicas may evaluate unequally: they stop later
            pipeline.stop_outside_training(lambda: coordination.asked, coordination.stop)
        if trainer.state.fn == TrainerFn.FITTING:
            with checks.expecting_one_optimizer():
                self.setup_optimizers(trainer)
            self._checkpoints.forget_absent_states()
            scales = scaler_of(self.precision_plugin) is not None
            checks.check_optimizers(self.optimizers, scales, self._zero_stage)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
            division.divide(self.optimizers[0])
            self._training = PipelineTraining(
                self.lightning_module,
                pipeline,
                self.precision_plugin,
                self._logs,
                coordination,
                lambda: self.optimizers[0],
            )
            self._clip_over_ranks(shared, division)
            if pipeline.continuous:
                checks.warn_of_clipping(trainer)
            else:
                if scaler_of(self.precision_plugin) is not None:
                    self._scaler = SharedScaler(self.precision_plugin, self.root_device)
                    pipeline.scale_losses_by(self._scaler.scale)
        count_throughput_by_replica(trainer, self.grid.data)
        if not self.is_distributed:  # then epoch values need no reduction: all ranks log the same
            advice = ".*It is recommended to use `self.log.*sync_dist=True"
            warnings.filterwarnings("ignore", advice)

    def _shared_randomness(self) -> tuple[int, Any]:
        """Rank 0's seed, and random states so that all ranks of a replica draw the same.

        If the run was seeded, replicas begin with the same states, as with DDP.
        """
        states = RandomStates(0, device=self.root_device).get()
        return self.broadcast(torch.initial_seed()), self._connections.broadcast_in_replica(states)

    def _replicas(self) -> Any:
        return self._connections.replicas

    def _clip_over_ranks(self, shared: SharedParameters, division: Division) -> None:
        """Clip by the norm over all stages, or over all parts of one where each has its own."""
        grid, groups = self.grid, self._connections.groups
        group = groups.peers if self.pipeline.continuous else groups.world

        def copies(parameter: Tensor) -> int:
            return shared.holders(parameter) * division.copies(parameter) * grid.tensor

        self.precision_plugin.__dict__["clip_grad_by_norm"] = clip_over(
            self.precision_plugin, group, copies, self.root_device
        )

    def model_to_device(self) -> None:
        """Move what this rank owns."""
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader give the same batches on all ranks."""
        load_alike(dataloader, self._connections.broadcast_in_replica, self.grid.data_rank)
        return dataloader

    def teardown(self) -> None:
        """Give rank 0 all weights and the module its own ways back."""
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        self._close_scaler()
        if self._training is not None:
            self._training.close()
            self._training = None
        if self._coordination is not None:
            self._coordination.close()
            self._coordination = None
        if self._logs is not None:
            self._logs.close()
            self._logs = None
        if self._assembly is not None and self._assembly.pipeline is not None:
            intact = not self._guard.failed
            with self._guard.watching():
                if intact:
                    self.pipeline.meet("the end, after", "its dataloaders", 0)
                    self._close_division()
                self._assembly.disconnect(collect=intact)
                if intact:
                    self.barrier("all messages have arrived")
                    self._connections.close()
                    if not self._connections.keeps_mesh:
                        self._forget_mesh()
        if self._layer_times is not None:  # the calling process of forked ranks has none
            self._layer_times.give_back()
        if self._assembly is None and has_deferred(self.lightning_module):
            self._lightning_module = None  # it cannot be moved: an error has stopped its making
        super().teardown()

    # ------------------------------------------------------------------------------------- training

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Run the schedule; gradients wait until `backward`.

        Returns:
            A batch's mean loss, equal on all ranks. With an asynchronous schedule it is that of
            the batch that has just come to its end, and not a number while the pipeline fills.
        """
        assert self._assembly is not None
        with self._guard.watching():
            if self._fit.begins_epoch:  # a run may be resumed at the short batch that ends one
                self._assembly.check_batch(batch)
            self._batch_size = self._batch_size or find_batch_size(batch)
            return self._fit.training_step(batch, args)

    def on_train_start(self) -> None:
        """Look at the hooks that will be called."""
        self._fit.begin()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Deliver the gradients that `training_step` has computed, between Lightning's hooks."""
        return self._fit.backward(closure_loss)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step, unless the pipeline is filling and there is no update yet."""
        return self._fit.optimizer_step(optimizer, closure, **kwargs)

    def on_train_end(self) -> None:
        """Put the ranks' measurements together."""
        assert self._assembly is not None
        assert self.lightning_module is not None
        next_batch = self.lightning_module.trainer.fit_loop.total_batch_idx + 1
        with self._guard.watching():
            self._fit.drain()
            self.pipeline.meet("the end of training before", "train_dataloader", next_batch)
            measured: list[Any] = [None] * self.world_size
            dist.all_gather_object(measured, self.pipeline.measured)
            measured = [measured[rank] for rank in self.grid.pipelines()[0]]
            self.report = self._assembly.report(measured, self._batch_size)

    # ----------------------------------------------------------------------------------- evaluation

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; its pipelined calls go through the stages."""
        return self._evaluate("validation_step", "validation", "val", args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `validation_step`."""
        return self._evaluate("test_step", "test", "test", args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `validation_step`."""
        return self._evaluate("predict_step", "prediction", "predict", args)

    def _evaluate(self, hook: str, activity: str, prefix: str, args: tuple[Any, ...]) -> Any:
        step = getattr(self.lightning_module, hook)
        context = getattr(self.precision_plugin, f"{prefix}_step_context")
        with self._guard.watching():
            return self._evaluation.step(activity, prefix, context, step, args)

    def on_validation_start(self) -> None:
        """Prepare to share logged values where only the last rank has outputs."""
        self._evaluation.begin()
        self._hold_all()

    def on_test_start(self) -> None:
        """See `on_validation_start`."""
        self.on_validation_start()

    def on_predict_start(self) -> None:
        """Gather divided layers, so that replicas may predict different numbers of batches."""
        self._hold_all()

    def on_validation_end(self) -> None:
        """Undo `on_validation_start`."""
        self._evaluation.end()
        self._hold_parts()

    def on_test_end(self) -> None:
        """Undo `on_test_start`."""
        self.on_validation_end()

    def on_predict_end(self) -> None:
        """Undo `on_predict_start`."""
        self._hold_parts()

    def _hold_all(self) -> None:
        assert self._division is not None
        with self._guard.watching():
            self._division.hold_all()

    def _hold_parts(self) -> None:
        assert self._division is not None
        self._division.hold_parts()

    # ---------------------------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, for a checkpoint: after the updates of all batches so far. Collective."""
        self._notice_interruption()
        if self._training is not None and not self._guard.failed:
            with self._guard.watching():
                self._training.drain()
        return super().lightning_module_state_dict()

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what this rank needs of a file, or of a directory of parts."""
        assert self.lightning_module is not None
        self._shard()
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        return self._checkpoints.load(checkpoint_path, weights_only, with_optimizers=fits)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what this rank owns."""
        self._shard()
        super().load_model_state_dict(self._checkpoints.weights_of(checkpoint), strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what belongs to this rank's parameters."""
        assert self._division is not None
        self._checkpoints.load_optimizers(checkpoint, self.root_device, self._division)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None
    ) -> None:
        """Write one ordinary checkpoint on rank 0, or a directory on all. Collective."""
        if isinstance(self.launcher, ProcessLauncher):  # this process is none of the ranks
            self.launcher.save_checkpoint(checkpoint, filepath, storage_options)
            return
        self._notice_interruption()
        if self._guard.failed:
            rank_zero_warn(f"{filepath} was not written: a rank of the pipeline has failed.")
            return
        error = None
        with self._guard.watching():
            try:
                self._checkpoints.save(checkpoint, filepath, storage_options)
            except (CheckpointError, MisconfigurationException) as failure:
                # On all ranks: none waits for another.
                error = failure
        if error is not None:
            raise error

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a file or a directory, on rank 0."""
        if self.is_global_zero:
            self._checkpoints.remove(filepath)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or one that writes files safely and reads them sparingly."""
        if self._checkpoint_io is None:
            self._checkpoint_io = PipelineCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = PipelineCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def _notice_interruption(self) -> None:
        """Callbacks learn of an exception before this strategy does; the others may be training."""
        if isinstance(self.launcher, ProcessLauncher):  # this process is none of the ranks
            return
        error, module = sys.exception(), self.lightning_module
        status = module.trainer.state.status if module is not None else None
        if error is not None and status == TrainerStatus.INTERRUPTED:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Give up, unless all ranks have agreed to stop together."""
        together = self._coordination is not None and self._coordination.stops
        if not (together and isinstance(error, SIGTERMException)):
            self._guard.fail(error)

    def _close_division(self) -> None:
        if self._division is not None:
            self._division.close()
            self._division = None

    def _close_scaler(self) -> None:
        if self._scaler is not None:
            self._scaler.close()
            self._scaler = None

    def _drop_connections(self) -> None:
        """Let go of all that keeps this rank's connections open."""
        self._close_scaler()
        self._connections.abandon()
        self._forget_mesh()

    def _forget_mesh(self) -> None:
        self._mesh = self._division = None
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = None

    def on_exception(self, exception: BaseException) -> None:
        """End the other ranks, and let them speak first."""
        self._fail(exception)
        self._guard.end(self.launcher, exception)
