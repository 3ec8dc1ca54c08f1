"""What a Trainer has that a pipeline cannot use: callbacks, optimizers, precisions, plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import LBFGS, Optimizer

from lightning_pipe.checkpoint import PipelineCheckpointIO
from lightning_pipe.loss_scaling import scaler_of
from lightning_pipe.schedule import (
    look_up,
)

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


_OF_WHOLE_MATRICES = {"Adafactor", "Muon"}


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


def check_optimizers(
    optimizers: Sequence[Optimizer], scaled: bool = False, zero_stage: int = 0
) -> None:
    """Check that the optimizers can be used with a pipeline.

    Args:
        optimizers: Of the user's module.
        scaled: Whether losses are scaled, as ``"16-mixed"`` does.
        zero_stage: What replicas divide.

    Raises:
        MisconfigurationException: They cannot.
    """
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise MisconfigurationException(
            "LBFGS evaluates the batch several times in one step and needs all parameters on "
            "one device. Use another optimizer."
        )
    names = {type(optimizer).__name__ for optimizer in optimizers} & _OF_WHOLE_MATRICES
    if zero_stage == 3 and names:
        raise MisconfigurationException(
            f"{', '.join(names)} with zero_stage=3: it looks at whole matrices, of which a replica "
            "has a part only. Use zero_stage 1 or 2."
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
