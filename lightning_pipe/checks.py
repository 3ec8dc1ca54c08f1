"""What cannot work is refused at setup: what was given, what is expected, what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer

from lightning_pipe.checkpoint import PipelineCheckpointIO
from lightning_pipe.loss_scaling import scaler_of
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.schedule import (
    SCHEDULES,
    ScheduleError,
    VersionPolicy,
    look_up,
    make_plan,
    policy_for,
    schedule_names,
)

_CHOICES = {
    "activation_checkpointing": ("none", "stage", "layer"),
    "evaluation_outputs": ("all", "last"),
    "start_method": ("popen", "fork", "spawn"),
}

_REFUSED_CALLBACKS: dict[type[Callback], str] = {
    BatchSizeFinder: (
        "looks for the batch size at which memory runs out, but in a pipeline one rank runs out of "
        "it while the others wait. Choose the batch size yourself; what a rank keeps of a "
        "batch is made smaller by num_microbatches and activation_checkpointing."
    ),
    ModelPruning: (
        "compares and replaces the parameters of all layers, but a rank has only those of its own "
        "stages. Prune the trained model without a pipeline."
    ),
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Check the constructor's arguments as far as they can be without a model.

    Raises:
        MisconfigurationException: One cannot work, or has no effect.
    """
    schedule = arguments["schedule"]
    for name, choices in _CHOICES.items():
        if arguments[name] not in choices:
            raise MisconfigurationException(
                f"PipelineStrategy({name}={arguments[name]!r}): expected one of "
                f"{', '.join(map(repr, choices))}."
            )
    _check_sizes(arguments)
    if arguments["process_group_backend"] not in (None, "gloo"):
        raise MisconfigurationException(
            f"PipelineStrategy(process_group_backend={arguments['process_group_backend']!r}): "
            "expected 'gloo', the only backend so far (tensors of a GPU travel through the host)."
        )
    count = arguments["num_microbatches"]
    if count != "auto" and (not isinstance(count, int) or count < 1):
        raise MisconfigurationException(
            f"PipelineStrategy(num_microbatches={count!r}): expected 'auto' or a number from 1."
        )
    _check_activations(arguments)
    if arguments["partition"] == "time" and arguments["tensor_parallel_size"] != 1:
        raise MisconfigurationException(
            "PipelineStrategy(partition='time') with tensor_parallel_size="
            f"{arguments['tensor_parallel_size']}: layers are measured on one rank, but need "
            "several. Use 'parameters', 'uniform' or a list of layers."
        )
    check_schedule(schedule, count, arguments["stages_per_rank"], num_ranks=None)
    check_zero(schedule, arguments["zero_stage"], arguments["reshard_after_forward"])
    try:
        policy_for(schedule, arguments["weight_stashing"], arguments["vertical_sync"])
    except ScheduleError as error:
        raise MisconfigurationException(f"PipelineStrategy: {error}") from error


def check_schedule(
    schedule: str,
    num_microbatches: Any,
    stages_per_rank: int,
    num_ranks: int | None,
    activation_checkpointing: str = "none",
    zero_stage: int = 0,
) -> None:
    """Check that a schedule is known and takes its options.

    Args:
        schedule: Its name.
        num_microbatches: A number, or "auto", which adapts itself.
        stages_per_rank: A number.
        num_ranks: As long as it is unknown, what depends on it is not checked.
        activation_checkpointing: The option.
        zero_stage: The option.

    Raises:
        MisconfigurationException: With the reason and what would be valid.
    """
    if not isinstance(stages_per_rank, int) or stages_per_rank < 1:
        raise MisconfigurationException(
            f"PipelineStrategy(stages_per_rank={stages_per_rank!r}): expected a number from 1."
        )
    if schedule in SCHEDULES and schedule not in schedule_names():
        raise MisconfigurationException(
            f"PipelineStrategy(schedule={schedule!r}) does not train. Choose one of "
            f"{', '.join(schedule_names())}."
        )
    try:
        recipe = look_up(schedule)
        if num_ranks is None:
            return
        placement = recipe.place(num_ranks, stages_per_rank)
        count = num_microbatches
        if count == "auto":
            count = recipe.most_microbatches(placement)
        plan = make_plan(schedule, placement, (count, count) if recipe.continuous else count)
    except ScheduleError as error:
        raise MisconfigurationException(f"PipelineStrategy: {error}") from error
    if not placement.in_order:
        raise MisconfigurationException(
            f"PipelineStrategy(schedule={schedule!r}): its stages are on ranks "
            f"{placement.rank_of}; expected ranks numbered in the order in which a micro-batch "
            "reaches them first. Number them so."
        )
    if plan.split:
        _check_split(schedule, zero_stage)
    if plan.split and activation_checkpointing != "none":
        raise MisconfigurationException(
            f"PipelineStrategy(activation_checkpointing={activation_checkpointing!r}): schedule="
            f"{schedule!r} runs backwards in two parts, and each would compute the forward again. "
            "Set activation_checkpointing='none', or choose '1f1b' or 'interleaved'."
        )


def _check_split(schedule: str, zero_stage: int) -> None:
    if zero_stage > 1:
        raise MisconfigurationException(
            f"PipelineStrategy(zero_stage={zero_stage}) with schedule={schedule!r}, which runs "
            "backwards in two parts: gradients of weights come later than where they would be "
            "divided. Use zero_stage=1, or '1f1b' or 'interleaved'."
        )


def check_module(module: LightningModule, fitting: bool) -> None:
    """Check that a LightningModule does nothing that a pipeline cannot do.

    Args:
        module: The user's.
        fitting: Whether it is to be trained.

    Raises:
        MisconfigurationException: It does.
    """
    for problem in problems_of_module(module, fitting):
        raise MisconfigurationException(problem)


def problems_of_module(module: LightningModule, fitting: bool) -> Iterator[str]:
    """Give all that `check_module` refuses a LightningModule for."""
    name = type(module).__name__
    if getattr(module, "example_input_array", None) is not None:
        yield (
            f"{name}.example_input_array is set, and Lightning would call the model with it "
            "outside of the pipeline. Set it to None; the summary works without it."
        )
    if not fitting:
        return
    if not module.automatic_optimization:
        yield (
            f"{name} uses manual optimization (automatic_optimization=False), but the schedule of "
            "a pipeline decides when to run backward. Use automatic optimization."
        )
    if is_overridden("backward", module):
        yield (
            f"{name} overrides `backward`, but in a pipeline every stage runs a backward of its "
            "own. Remove it; `on_before_backward` and `on_after_backward` are called as usual."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield (
            f"{name}.training_step takes `dataloader_iter`, but a pipeline cuts the batch before "
            "the step. Let it take `batch`."
        )


def check_trainer(trainer: Trainer) -> None:
    """Check that callbacks and profiler of a Trainer can be used with a pipeline.

    Raises:
        MisconfigurationException: One cannot.
    """
    for problem in problems_of_trainer(trainer):
        raise MisconfigurationException(problem)


def problems_of_trainer(trainer: Trainer) -> Iterator[str]:
    """Give all that `check_trainer` refuses a Trainer for."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"{type(callback).__name__} {reason}"
    profiler = getattr(trainer, "profiler", None)
    if isinstance(profiler, PyTorchProfiler) and profiler._schedule is not None:
        yield (
            "PyTorchProfiler with a schedule (there is one by default) starts and stops while "
            "messages of the pipeline are under way, which lets torch crash the process. Use "
            "Trainer(profiler=PyTorchProfiler(schedule=None)), or profiler='simple'."
        )


def check_replicas(
    trainer: Trainer, num_replicas: int, zero_stage: int, syncs_batchnorm: bool
) -> None:
    """Check what replicas cannot do together.

    Args:
        trainer: Which is about to run.
        num_replicas: How many.
        zero_stage: What they divide.
        syncs_batchnorm: Whether the Trainer was asked for that.

    Raises:
        MisconfigurationException: With the reason.
    """
    if num_replicas > 1 and syncs_batchnorm:
        raise MisconfigurationException(
            "Trainer(sync_batchnorm=True) with several replicas: torch's SyncBatchNorm needs one "
            "GPU for each rank and NCCL. Leave it out: statistics are then those of a replica, "
            "and rank 0's are saved; or use LayerNorm or GroupNorm."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if zero_stage == 3 and isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise MisconfigurationException(
                f"{type(callback).__name__} with zero_stage=3: it averages whole parameters, of "
                "which a replica has a part only. Use zero_stage=2."
            )


def check_accumulation(num_batches: int) -> None:
    """Refuse to accumulate gradients over batches with an asynchronous schedule.

    Raises:
        MisconfigurationException: It is to be done.
    """
    if num_batches != 1:
        raise MisconfigurationException(
            f"accumulate_grad_batches={num_batches} with an asynchronous schedule: 'pipedream' "
            "updates from every micro-batch, and 'pipedream_2bw' accumulates over "
            "num_microbatches. Leave it at 1."
        )


@contextmanager
def expecting_one_optimizer() -> Iterator[None]:
    """Inside, let Lightning's error about several optimizers not propose manual optimization.

    Raises:
        MisconfigurationException: ``configure_optimizers`` returned several.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            "configure_optimizers returned several optimizers, but a pipeline takes one. Put the "
            "parameters into groups of one optimizer."
        ) from error


def check_optimizers(optimizers: Sequence[Optimizer], scaled: bool = False) -> None:
    """Check that the optimizers can be used with a pipeline.

    Args:
        optimizers: Of the user's module.
        scaled: Whether losses are scaled, as ``"16-mixed"`` does.

    Raises:
        MisconfigurationException: They cannot.
    """
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise MisconfigurationException(
            "LBFGS evaluates the batch several times in one step and needs all parameters on "
            "one device. Use another optimizer."
        )
    if scaled and any(_optimizer_handles_unscaling(optimizer) for optimizer in optimizers):
        raise MisconfigurationException(
            "A fused optimizer (fused=True) with a loss scaler, as precision='16-mixed' has: it "
            "looks for overflow in its own step, on its own stage only. Use fused=False, or "
            "precision='bf16-mixed'."
        )


def check_precision(precision: Precision, schedule: str, weight_stashing: bool) -> None:
    """Check that a precision plugin can be used with a pipeline.

    Args:
        precision: The plugin.
        schedule: Its name.
        weight_stashing: Whether backwards read the weights of their forwards.

    Raises:
        MisconfigurationException: It scales losses, or keeps weights that must not be kept.
    """
    if look_up(schedule).continuous and scaler_of(precision) is not None:
        raise MisconfigurationException(
            f"precision={precision.precision!r} scales the loss, and all stages would have to skip "
            f"an update together, but with schedule={schedule!r} they update at different times. "
            "Use precision 'bf16-mixed', 'bf16-true', '32-true' or '64-true', or a synchronous "
            "schedule ('1f1b')."
        )
    if not weight_stashing and isinstance(precision, MixedPrecision):
        raise MisconfigurationException(
            f"PipelineStrategy(weight_stashing=False) with precision={precision.precision!r}: "
            "autocast keeps copies of the weights of a forward for its backward, which would read "
            "these instead of the newest. Use weight_stashing=True, or precision 'bf16-true' or "
            "'32-true'."
        )


def warn_of_clipping(trainer: Trainer) -> None:
    """Say once what gradient clipping means where stages are updated at different times."""
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    if trainer.gradient_clip_val and by_norm:
        rank_zero_warn(
            f"gradient_clip_val={trainer.gradient_clip_val} with an asynchronous schedule clips by "
            "the norm of each stage's gradients, not of the whole model's: stages are updated at "
            "different times."
        )


def check_checkpoint_io(io: CheckpointIO, saves_directories: bool) -> None:
    """Refuse a way of writing files where directories are written.

    Raises:
        MisconfigurationException: It is the user's, and would never be called.
    """
    if saves_directories and type(io) is not PipelineCheckpointIO:
        raise MisconfigurationException(
            f"PipelineStrategy(save_distributed_checkpoint=True) with {type(io).__name__}: a "
            "CheckpointIO writes files, but each rank writes its part of a directory. Remove the "
            "plugin, or use save_distributed_checkpoint=False."
        )


def _check_activations(arguments: dict[str, Any]) -> None:
    """Check that what is kept of activations can be divided, if it is to be."""
    if not arguments["partition_activations"]:
        return
    keeps, ranks = arguments["activation_checkpointing"], arguments["tensor_parallel_size"]
    if keeps == "none" or ranks == 1:
        raise MisconfigurationException(
            f"PipelineStrategy(partition_activations=True) with activation_checkpointing={keeps!r} "
            f"and tensor_parallel_size={ranks}: it divides what checkpointing keeps among the "
            "ranks that share a layer. Set activation_checkpointing='stage' or 'layer' and "
            "tensor_parallel_size from 2, or leave it out."
        )


def check_zero(schedule: str, zero_stage: Any, reshards: bool) -> None:
    """Check what replicas divide among them.

    Args:
        schedule: Its name.
        zero_stage: The option.
        reshards: Whether layers are gathered for each micro-batch.

    Raises:
        MisconfigurationException: It does not go with the schedule.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise MisconfigurationException(
            f"PipelineStrategy(zero_stage={zero_stage!r}): expected 0, 1, 2 or 3."
        )
    if reshards and zero_stage != 3:
        raise MisconfigurationException(
            f"PipelineStrategy(reshard_after_forward=True) with zero_stage={zero_stage}: only "
            "zero_stage=3 gathers parameters, which could be freed after a forward. Leave it out."
        )
    if zero_stage > 1 and look_up(schedule).continuous:
        raise MisconfigurationException(
            f"PipelineStrategy(zero_stage={zero_stage}) with schedule={schedule!r}: a replica has "
            "only a part of the gradients or of the weights, but old versions of the weights are "
            "kept whole, and every micro-batch updates them. Use zero_stage=1, or a synchronous "
            "schedule ('1f1b')."
        )


def _check_sizes(arguments: dict[str, Any]) -> None:
    """Check the numbers of ranks, as far as they can be without knowing how many there are."""
    for name in ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size"):
        size = arguments[name]
        alternative = "" if name == "tensor_parallel_size" else ", or 'auto'"
        if not (size == "auto" and alternative) and (not isinstance(size, int) or size < 1):
            raise MisconfigurationException(
                f"PipelineStrategy({name}={size!r}): expected a number from 1{alternative}."
            )
    if arguments["data_parallel_size"] == arguments["pipeline_parallel_size"] == "auto":
        raise MisconfigurationException(
            "PipelineStrategy(data_parallel_size='auto') fills the world with replicas, so it must "
            "know how long a pipeline is. Set pipeline_parallel_size to a number."
        )


def check_world(
    world_size: int,
    pipeline_parallel_size: Any,
    data_parallel_size: Any = 1,
    tensor_parallel_size: int = 1,
    rank: int = 0,
) -> Grid:
    """What each rank does, given the number of processes.

    Args:
        world_size: The number.
        pipeline_parallel_size: The option.
        data_parallel_size: The option.
        tensor_parallel_size: The option.
        rank: Of this process.

    Raises:
        MisconfigurationException: They do not fit.
    """
    known = [size for size in (pipeline_parallel_size, data_parallel_size) if size != "auto"]
    ranks = prod(known) * tensor_parallel_size
    fits = world_size % ranks == 0 if len(known) == 1 else world_size == ranks
    if fits:
        rest = world_size // ranks
        pipeline, data = (
            rest if size == "auto" else size
            for size in (pipeline_parallel_size, data_parallel_size)
        )
        return Grid(pipeline, data, tensor_parallel_size, rank)
    raise MisconfigurationException(
        f"PipelineStrategy(pipeline_parallel_size={pipeline_parallel_size!r}, data_parallel_size="
        f"{data_parallel_size!r}, tensor_parallel_size={tensor_parallel_size}) with {world_size} "
        f"processes: expected {'a multiple of ' if len(known) == 1 else ''}{ranks}, their product. "
        f"Use Trainer(devices={ranks}) on one node, or leave pipeline_parallel_size at 'auto'. "
        "More stages than ranks come from stages_per_rank."
    )


def check_tied(pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse parameters that live in several stages, where stages are updated by themselves.

    Raises:
        MisconfigurationException: There are some.
    """
    if pairs:
        named = "; ".join(f"{a!r} is {b!r}" for a, b in pairs)
        raise MisconfigurationException(
            f"Parameters are shared between stages: {named}. With an asynchronous schedule these "
            "are updated at different times, and would come apart. Give each its own parameter, "
            "choose a partition that puts both into one stage, or a synchronous schedule ('1f1b')."
        )


def check_batchnorm(deferred: bool, layers: Sequence[nn.Module]) -> None:
    """Refuse statistics over all ranks, and warn of deferred ones where no layer has any.

    Args:
        deferred: Whether running statistics are to be deferred.
        layers: Which are cut into stages.

    Raises:
        MisconfigurationException: There is an ``nn.SyncBatchNorm``.
    """
    modules = [module for layer in layers for module in layer.modules()]
    if any(isinstance(module, nn.SyncBatchNorm) for module in modules):
        raise MisconfigurationException(
            "The layers have an nn.SyncBatchNorm, which would mix the statistics of the ranks, but "
            "these run different layers. Use nn.BatchNorm1d, 2d or 3d."
        )
    if deferred and not any(isinstance(module, _BatchNorm) for module in modules):
        rank_zero_warn(
            "PipelineStrategy(deferred_batchnorm=True), but the layers have no BatchNorm: "
            "it has no effect."
        )


def check_unchanged(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> None:
    """Refuse layers that have changed since they were cut into stages.

    Args:
        before: Their parameters by name, as they were.
        now: As they are.

    Raises:
        MisconfigurationException: They have.
    """
    names = [n for n in {**before, **now} if before.get(n) is not now.get(n)]
    if names:
        raise MisconfigurationException(
            f"Parameters of layers were replaced in `setup`, of the module or of a callback: "
            f"{', '.join(map(repr, names[:5]))}{' ...' if len(names) > 5 else ''}. By then the "
            "model is cut into stages. Change layers in `__init__` or in `configure_model`."
        )


def check_outside(names: Sequence[str]) -> None:
    """Refuse parameters outside the layers, which an asynchronous schedule cannot update.

    Raises:
        MisconfigurationException: There are some.
    """
    if names:
        raise MisconfigurationException(
            f"Parameters outside the pipelined layers: {', '.join(map(repr, names))}. They live on "
            "every stage, but with an asynchronous schedule stages are updated at different "
            "times. Move them into a layer, or choose a synchronous schedule ('1f1b')."
        )


def check_delay(batch_size: int | None, policy: VersionPolicy, num_stages: int) -> None:
    """Refuse 2BW for batches that cannot be cut into as many micro-batches as there are stages.

    Raises:
        MisconfigurationException: The first batch is too small.
    """
    too_small = batch_size is not None and batch_size < num_stages
    if policy is VersionPolicy.DOUBLE_BUFFERED and too_small:
        raise MisconfigurationException(
            f"PipelineStrategy(schedule='pipedream_2bw') with a batch of {batch_size} samples on "
            f"{num_stages} stages: expected at least one sample, and micro-batch, per stage. Use "
            f"a batch_size of {num_stages} or more, or another schedule."
        )


def check_batch_size(batch_size: int | None, num_microbatches: Any) -> None:
    """Refuse to cut the first batch into more micro-batches than it has samples.

    Raises:
        MisconfigurationException: It is too small.
    """
    if num_microbatches != "auto" and batch_size is not None and num_microbatches > batch_size:
        raise MisconfigurationException(
            f"PipelineStrategy(num_microbatches={num_microbatches}) with a batch of {batch_size} "
            f"samples: expected at most one micro-batch per sample. Use num_microbatches <= "
            f"{batch_size}, or a larger batch_size."
        )
