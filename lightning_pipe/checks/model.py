"""What a LightningModule and its batches do that a pipeline cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_pipe.schedule import (
    VersionPolicy,
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
