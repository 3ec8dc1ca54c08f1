"""A stage: a run of layers on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from lightning_pipe.runtime.activation_offload import ActivationOffload
from lightning_pipe.runtime.activation_partition import ActivationPartition
from lightning_pipe.runtime.batch_norm import DeferredBatchNorm
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.recomputation import Recomputation

Checkpointing = Literal["none", "stage", "layer"]


class Stage:
    """The layers that one rank runs one after the other.

    Args:
        index: Of the stage, from 0 over the whole model.
        num_stages: Of the whole model.
        layers: The stage's.
        first_layer: Number of its first layer, over the whole model.
        keywords: Says which keyword arguments of the pipelined call reach a layer, given the
            layer and how many positional arguments it gets.
        checkpointing: ``"stage"`` keeps only what enters the stage until its backward, which
            then runs the forward again (GPipe, Huang et al. 2019); ``"layer"`` what enters each
            layer.
        random_states: Seed the layers' streams, so that a second run draws the same numbers.
        deferred_batchnorm: Whether BatchNorm's running statistics are updated once per batch.
        offload: Takes what forwards save for their backward to host memory meanwhile; one for all
            stages of a rank.
        partition: Shares what checkpointing keeps with the ranks that have the same activations.

    Attributes:
        offload: See there.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        layers: Sequence[nn.Module],
        first_layer: int = 0,
        keywords: Callable[[nn.Module, int], frozenset[str]] = lambda layer, positional: (
            frozenset()
        ),
        checkpointing: Checkpointing = "none",
        random_states: RandomStates | None = None,
        deferred_batchnorm: bool = False,
        offload: ActivationOffload | None = None,
        partition: ActivationPartition | None = None,
    ) -> None:
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self._keywords = keywords
        self._checkpointing = checkpointing
        self._random = random_states
        self._norms = DeferredBatchNorm(layers) if deferred_batchnorm else None
        self.offload = offload
        units: dict[str, list[tuple[nn.Module, ...]]]
        units = {"none": [], "stage": [self.layers], "layer": [(layer,) for layer in layers]}
        around_again = self._norms.ignoring if self._norms is not None else nullcontext
        self._recomputations = [
            Recomputation(unit, around_again, partition) for unit in units[checkpointing]
        ]

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        microbatch: int,
        ends_batch: bool = False,
    ) -> Any:
        """Run the layers.

        Args:
            args: Positional arguments of the first layer.
            kwargs: Keyword arguments of the pipelined call.
            batch: With ``microbatch``, names the random stream.
            microbatch: See ``batch``.
            ends_batch: Whether this is the batch's last micro-batch.

        Returns:
            What the last layer returned.
        """
        saving = nullcontext() if self.offload is None else self.offload.saving(self.layers)
        gathering = nullcontext() if self._norms is None else self._norms.gathering()
        with saving, gathering:
            output = self._forward(args, kwargs, batch, microbatch)
        if self._norms is not None and ends_batch:
            self._norms.commit()
        return output

    def _forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, microbatch: int
    ) -> Any:
        if self._checkpointing == "stage" and torch.is_grad_enabled():
            (recomputation,) = self._recomputations
            return recomputation.run(self._run_layers, (batch, microbatch, kwargs), *args)
        return self._run_layers(batch, microbatch, kwargs, *args)

    def _run_layers(self, batch: int, microbatch: int, kwargs: dict[str, Any], *args: Any) -> Any:
        """The chain: each layer gets, as its one positional argument, what the last returned."""
        by_layer = self._checkpointing == "layer" and torch.is_grad_enabled()
        if self._random is not None and not by_layer:
            self._random.seed_stage(batch, microbatch, self.first_layer)
        for index, layer in enumerate(self.layers):
            chosen = {}
            if kwargs:
                names = self._keywords(layer, len(args))
                chosen = {name: value for name, value in kwargs.items() if name in names}
            if by_layer:
                run = self._recomputations[index].run
                output = run(self._run_layer, (index, batch, microbatch, chosen), *args)
            else:
                output = self._run_layer(index, batch, microbatch, chosen, *args)
            args = (output,)
        return output

    def _run_layer(
        self, index: int, batch: int, microbatch: int, kwargs: dict[str, Any], *args: Any
    ) -> Any:
        if self._random is not None:
            layer = self.first_layer + index
            if self._checkpointing == "layer":
                self._random.seed_stage(batch, microbatch, layer)
            else:
                self._random.seed_layer(batch, microbatch, layer)
        return self.layers[index](*args, **kwargs)
