"""PipelineStrategy: the adapter between Lightning's Trainer and a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.types import _PATH, ReduceOp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe import checks, failure
from lightning_pipe.assembly import Assembly, Settings
from lightning_pipe.checkpoint import consolidate, own_optimizer_state
from lightning_pipe.clipping import clip_over_pipeline
from lightning_pipe.data import load_alike
from lightning_pipe.relay import StepLogs
from lightning_pipe.report import PipelineReport
from lightning_pipe.runtime.distributed_transport import GlooTransport
from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.mesh import make_mesh, on_loopback
from lightning_pipe.runtime.microbatch import find_batch_size
from lightning_pipe.runtime.pipeline import Pipeline, TrainingResult
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.trainer_patches import stop_child_observer

T = TypeVar("T")
_DEFAULT_TIMEOUT = timedelta(minutes=30)


class PipelineStrategy(ParallelStrategy):
    """Train a LightningModule whose layers are spread over the ranks, as one device would.

    The module needs no change: its layers are those of its ``nn.Sequential``, or those that it
    lists in ``configure_pipeline(self) -> Sequence[nn.Module]``.

    Args:
        schedule: In which order micro-batches go through the stages: ``"naive"`` (one at a time),
            ``"gpipe"`` (all forwards, then all backwards; Huang et al. 2019), ``"1f1b"`` (one
            forward, one backward, fewer activations; Narayanan et al. 2019) or ``"interleaved"``
            (1f1b with several stages on each rank, a smaller bubble; Narayanan et al. 2021).
        num_microbatches: Into how many micro-batches a batch is cut. ``"auto"``: four for each
            stage, at most one for each sample.
        stages_per_rank: Stages on each rank; more than 1 for ``"interleaved"``.
        partition: How layers are put into stages: ``"parameters"`` (the largest stage as small as
            possible), ``"uniform"`` (equally many layers), or a list with the number of layers of
            each stage.
        module: Name of the ``nn.Sequential`` to cut, if it is not the only large one.
        activation_checkpointing: Which activations are computed again in backward instead of
            kept: ``"none"``, ``"stage"`` (all but a stage's input) or ``"layer"`` (all but the
            layers' inputs).
        weight_stashing: For asynchronous schedules; leave it.
        vertical_sync: For asynchronous schedules; leave it.
        evaluation_outputs: Who gets the output of the pipelined call in validation, test and
            prediction: ``"all"`` ranks, or only the ``"last"``, for outputs too large to send.
        pipeline_parallel_size: Number of pipeline ranks; ``"auto"``: all processes.
        data_parallel_size: Number of pipelines; only 1 so far.
        tensor_parallel_size: Ranks that share a layer; only 1 so far.
        process_group_backend: ``"gloo"`` (the default), also for GPUs.
        timeout: After which a wait for another rank ends in an error.
        start_method: ``"popen"``: the script is started once for each rank.
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
        partition: Literal["parameters", "uniform"] | list[int] = "parameters",
        module: str | None = None,
        activation_checkpointing: Literal["none", "stage", "layer"] = "none",
        weight_stashing: bool = True,
        vertical_sync: bool = False,
        evaluation_outputs: Literal["all", "last"] = "all",
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        start_method: Literal["popen"] = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        checks.check_arguments({k: v for k, v in locals().items() if k not in ("self", "__class__")})
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
        )
        self._pipeline_parallel_size = pipeline_parallel_size
        self._timeout = timeout
        self._num_nodes = 1
        self._num_ranks = 1
        self._assembly: Assembly | None = None
        self._result: TrainingResult | None = None  # withheld until backward
        self._logs: StepLogs | None = None
        self._batch_size: int | None = None
        self._reports: failure.FailureReports | None = None
        self._failed = False
        self.report: PipelineReport | None = None

    # ------------------------------------------------------------- what a ParallelStrategy must be

    def __repr__(self) -> str:
        """Shown by a Trainer that does not know this class."""
        return (
            f"PipelineStrategy(schedule={self._settings.schedule!r}), a strategy for "
            "`lightning.pytorch.Trainer`, not for `pytorch_lightning.Trainer`: import Trainer "
            "and LightningModule from `lightning.pytorch`"
        )

    @property
    def is_distributed(self) -> bool:
        """Whether ranks load different data: no replicas, so no, and samplers stay as they are."""
        return False

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """On this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a pipeline load the same."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def pipeline(self) -> Pipeline:
        """This rank's end of the pipeline; there is one from setup to teardown."""
        assert self._assembly is not None
        assert self._assembly.pipeline is not None
        return self._assembly.pipeline

    def set_world_ranks(self) -> None:
        """Tell the environment where this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _SubprocessScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Give one rank's object to all."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce over the data-parallel replicas, of which there is one: nothing to do."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any) say so."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data-parallel replicas, of which there is one: as on one device."""
        return tensor

    # --------------------------------------------------------------------------- setup and teardown

    def setup_environment(self) -> None:
        """Connect the ranks, check the module, and free the layers that others own."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._num_ranks = checks.check_world(self.world_size, self._pipeline_parallel_size)
        settings, module = self._settings, self.lightning_module
        assert module is not None
        checks.check_schedule(
            settings.schedule, settings.num_microbatches, settings.stages_per_rank, self._num_ranks
        )
        checks.check_precision(self.precision_plugin)
        checks.check_module(module, module.trainer.state.fn == TrainerFn.FITTING)
        with on_loopback(self.num_nodes):
            _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)
            module._device_mesh = make_mesh(torch.device("cpu"), self._num_ranks)
            pipelines = [list(range(self._num_ranks))]
            self._transport = GlooTransport(pipelines, self.root_device, self._timeout)
        self._failed, self._assembly = False, None
        self._reports = failure.FailureReports(
            self.global_rank, f"pipeline rank {self.global_rank} of {self._num_ranks}"
        )
        if not is_overridden("configure_model", module):
            self._shard()

    def _shard(self) -> Assembly:
        """Cut the model, once its layers exist."""
        if self._assembly is None:
            assert self.lightning_module is not None
            self._assembly = Assembly(
                self.lightning_module, self._settings, self.global_rank, self._num_ranks
            )
            self._assembly.shard()
        return self._assembly

    def setup(self, trainer: Trainer) -> None:
        """Build this rank's end of the pipeline."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        assembly = self._shard()
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        seed, states = self._shared_randomness()
        random_states = RandomStates(seed, device=self.root_device)
        random_states.set(states)
        pipeline = assembly.connect(self._transport, random_states)
        self._logs = StepLogs(self.lightning_module, pipeline)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._clip_over_all_stages(assembly)
        # Epoch values need no reduction here: all ranks log the same.
        warnings.filterwarnings("ignore", ".*It is recommended to use `self.log.*sync_dist=True")

    def _shared_randomness(self) -> tuple[int, Any]:
        """Rank 0's seed and random states, so that all ranks draw the same outside the layers."""
        states = RandomStates(0, device=self.root_device).get()
        return self.broadcast((torch.initial_seed(), states))

    def _clip_over_all_stages(self, assembly: Assembly) -> None:
        shared = {id(parameter) for parameter in assembly.shared}
        self.precision_plugin.__dict__["clip_grad_by_norm"] = clip_over_pipeline(
            self.precision_plugin,
            self._transport.all_reduce,
            self._transport.rank,
            shared,
            self.root_device,
        )

    def model_to_device(self) -> None:
        """Move what this rank owns."""
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Let a loader give the same batches on all ranks."""
        load_alike(dataloader, self.broadcast, replica=0)
        return dataloader

    def teardown(self) -> None:
        """Give rank 0 all weights and the module its own ways back."""
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        self._result = None
        if self._logs is not None:
            self._logs.close()
            self._logs = None
        if self._assembly is not None and self._assembly.pipeline is not None:
            with self._reporting():
                self._assembly.disconnect(collect=not self._failed)
        super().teardown()

    # ------------------------------------------------------------------------------------- training

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Run the schedule; gradients wait in this strategy until `backward`.

        Returns:
            The batch's mean loss, equal on all ranks.
        """
        module, logs, assembly = self.lightning_module, self._logs, self._assembly
        assert module is not None
        assert logs is not None
        assert assembly is not None

        def step(microbatch: Any, index: int) -> Any:
            with logs.microbatch(microbatch), self.precision_plugin.train_step_context():
                return module.training_step(microbatch, *args)

        with self._reporting():
            assembly.check_batch(batch)
            self._batch_size = self._batch_size or find_batch_size(batch)
            self._free_spent_gradients(module)
            logs.begin_batch()
            number = module.trainer.fit_loop.epoch_loop.total_batch_idx
            result = self.pipeline.train(step, batch, number, "train_dataloader", logs.collect)
            logs.play(result.attachment)
        self._result = result
        if result.own_weight:
            return {"loss": result.loss, "weight": torch.tensor(result.weight)}
        return result.loss

    def _free_spent_gradients(self, module: LightningModule) -> None:
        """Free gradients that Lightning would zero right after the step, rather than keep both."""
        trainer = module.trainer
        zeroes = not is_overridden("optimizer_zero_grad", module)
        if zeroes and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            for parameter in module.parameters():
                parameter.grad = None

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Deliver the gradients that `training_step` has computed, between Lightning's hooks."""
        module = self.lightning_module
        assert module is not None
        assert self._result is not None
        loss: Tensor = self.precision_plugin.pre_backward(closure_loss, module)
        self._result.deliver(1 / module.trainer.accumulate_grad_batches)
        self._result = None
        loss = self.precision_plugin.post_backward(loss, module)
        return loss

    def on_train_end(self) -> None:
        """Put the ranks' measurements together."""
        assert self._assembly is not None
        with self._reporting():
            measured: list[Any] = [None] * self.world_size
            dist.all_gather_object(measured, self.pipeline.measured)
            self.report = self._assembly.report(measured, self._batch_size)

    # ----------------------------------------------------------------------------------- evaluation

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; its pipelined calls go through the stages."""
        assert self.lightning_module is not None
        step = self.lightning_module.validation_step
        return self._evaluate("validation", "val", self.precision_plugin.val_step_context, step, args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `validation_step`."""
        assert self.lightning_module is not None
        step = self.lightning_module.test_step
        return self._evaluate("test", "test", self.precision_plugin.test_step_context, step, args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `validation_step`."""
        assert self.lightning_module is not None
        step = self.lightning_module.predict_step
        context = self.precision_plugin.predict_step_context
        return self._evaluate("prediction", "predict", context, step, args)

    def _evaluate(
        self,
        activity: str,
        prefix: str,
        context: Callable[[], AbstractContextManager[None]],
        step: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:
        assert self._logs is not None
        number = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        output = None
        with (
            self._reporting(),
            context(),
            self._logs.evaluation_step(self._settings.evaluation_outputs),
            self.pipeline.evaluating(activity, f"{prefix}_dataloader", number),
        ):
            output = step(*args)
        return output

    def on_validation_start(self) -> None:
        """Prepare to share logged values where only the last rank has outputs."""
        self._begin_evaluation()

    def on_test_start(self) -> None:
        """See `on_validation_start`."""
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        """Undo `on_validation_start`."""
        self._end_evaluation()

    def on_test_end(self) -> None:
        """Undo `on_test_start`."""
        self._end_evaluation()

    def _begin_evaluation(self) -> None:
        if self._settings.evaluation_outputs == "last" and self._logs is not None:
            self._logs.begin_evaluation()

    def _end_evaluation(self) -> None:
        if self._logs is not None:
            self._logs.end_evaluation()

    # ---------------------------------------------------------------------------------- checkpoints

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what this rank owns."""
        self._shard()
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what belongs to this rank's parameters."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(own_optimizer_state(state, optimizer))
            _optimizer_to_device(optimizer, self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None
    ) -> None:
        """Write one ordinary checkpoint, on rank 0. Collective."""
        if self._failed:
            rank_zero_warn(f"{filepath} was not written: a rank of the pipeline has failed.")
            return
        with self._reporting():
            consolidate(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # ------------------------------------------------------------------------------------- failures

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Let no rank wait for this one if it fails, and let all say why."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failed or self._reports is None:
            return
        self._failed = True
        consequence = isinstance(error, PeerLostError) or "gloo" in str(error)
        report = self._reports.of_another_rank() if consequence else None
        if report is None:
            self._reports.publish(error)
        else:
            error.add_note(f"\nThe cause is on another rank. {report}")
        failure.drop_connections()

    def on_exception(self, exception: BaseException) -> None:
        """End the other ranks, and let them speak first."""
        if isinstance(exception, (KeyboardInterrupt, SystemExit)):
            self._failed = True
            return
        self._fail(exception)
        launcher = self.launcher
        if isinstance(launcher, _SubprocessScriptLauncher) and launcher.procs:
            stop_child_observer()
            failure.end_children(launcher.procs)
