"""Seconds of each layer, for ``partition="time"`` and for a saved profile; equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_pipe.data import untouched
from lightning_pipe.partition import PipelinedLayers, Profile, call_arguments, measure
from lightning_pipe.trainer_patches import training_data

_CPU = torch.device("cpu")


class LayerTimes:
    """Finds out what the layers of a model take, once, on rank 0.

    They are measured on the module's ``example_input_array``, or else on the first batch of the
    training, which is loaded once more: neither loaders nor random states notice. Where there is
    neither, as in evaluation, there are no times.

    Args:
        partition: The option of PipelineStrategy.
        module: The user's.
        precision: Of the Trainer.
        device: Of this rank.
        broadcast: Gives rank 0's value to all.
    """

    def __init__(
        self,
        partition: str | Sequence[int],
        module: LightningModule,
        precision: Precision,
        device: torch.device,
        broadcast: Callable[[Any], Any],
    ) -> None:
        self._partition, self._module, self._precision = partition, module, precision
        self._device, self._broadcast = device, broadcast
        self._example: Any = None
        if partition == "time":
            # Lightning would call the model with it, outside of the pipeline.
            self._example = getattr(module, "example_input_array", None)
            if self._example is not None:
                module.example_input_array = None

    def give_back(self) -> None:
        """Let the module have its example again."""
        if self._example is not None:
            self._module.example_input_array = self._example

    @property
    def needs_data(self) -> bool:
        """Whether nothing can be measured before the data are there."""
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        return self._partition == "time" and self._example is None and fitting

    def of(self, found: PipelinedLayers) -> list[float] | None:
        """Seconds of forward and backward of each layer; ``None`` if the option wants no times.

        Collective, if it does.

        Raises:
            MisconfigurationException: A profile is of another model; or there is nothing to
                measure on.
        """
        if not isinstance(self._partition, str):
            return None
        if self._partition != "time" and not self._partition.endswith(".json"):
            return None
        if self._partition == "time" and self._example is None and not self.needs_data:
            return None
        outcome: list[float] | str | None = None
        if self._module.global_rank == 0:
            try:
                layers = self._profile(found).layers
                outcome = [layer.forward_seconds + layer.backward_seconds for layer in layers]
            except MisconfigurationException as error:  # on all ranks: some errors are tried again
                outcome = str(error)
        outcome = self._broadcast(outcome)
        if isinstance(outcome, str):
            raise MisconfigurationException(outcome)
        return outcome

    def _profile(self, found: PipelinedLayers) -> Profile:
        if self._partition == "time":
            return self._measured(found)
        profile = Profile.load(str(self._partition))
        names = tuple(layer.name for layer in profile.layers)
        numbers = tuple(map(str, range(len(names))))  # of costs that the user estimated
        given = f"PipelineStrategy(partition={self._partition!r})"
        if len(names) != len(found.names):
            raise MisconfigurationException(
                f"{given}: the profile has {len(names)} layers, the model {len(found.names)}. "
                "Profile this model: `lightning-pipe profile`."
            )
        if names not in (found.names, numbers):
            other, own = next((a, b) for a, b in zip(names, found.names, strict=True) if a != b)
            raise MisconfigurationException(
                f"{given}: the profile is of another model: it has a layer {other!r} where this "
                f"one has {own!r}. Profile this model: `lightning-pipe profile`."
            )
        return profile

    def _measured(self, found: PipelinedLayers) -> Profile:
        module, batch = self._module, None
        if self._example is None:
            batch = self._first_batch()
        else:
            module.example_input_array = self._example
        try:
            args, kwargs, batch_size = call_arguments(module, found, batch)
        finally:
            if self._example is not None:
                module.example_input_array = None
        args, kwargs = self._in_dtype_of(found, (args, kwargs))
        mixed = isinstance(self._precision, MixedPrecision)
        context = self._precision.forward_context if mixed else nullcontext
        return measure(
            module, found, args, kwargs, batch_size, device=self._device, context=context
        )

    def _first_batch(self) -> Any:
        trainer = self._module.trainer
        with isolate_rng():
            data = training_data(trainer)
            with untouched(data):
                batches = iter(data)
                if batches is data:
                    raise MisconfigurationException(
                        f"PipelineStrategy(partition='time'): the training data, a "
                        f"{type(data).__name__}, can be read only once. Set the module's "
                        "`example_input_array`, or cut by a saved profile: `lightning-pipe "
                        "profile`."
                    )
                batch = next(batches)
            return trainer.strategy.batch_to_device(batch, _CPU)

    def _in_dtype_of(self, found: PipelinedLayers, call: Any) -> Any:
        """What the pipelined module will be called with where all floats have the same dtype."""
        if not isinstance(self._precision, (DoublePrecision, HalfPrecision)):
            return call
        floats = (p.dtype for p in found.module.parameters() if p.is_floating_point())
        dtype = next(floats, torch.get_default_dtype())

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(call, Tensor, convert)
