"""A stage: a run of layers on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_pipe.runtime.random_state import RandomStates

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
    ) -> None:
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self._keywords = keywords
        self._checkpointing = checkpointing
        self._random = random_states

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, microbatch: int
    ) -> Any:
        """Run the layers.

        Args:
            args: Positional arguments of the first layer.
            kwargs: Keyword arguments of the pipelined call.
            batch: With ``microbatch``, names the random stream.
            microbatch: See ``batch``.

        Returns:
            What the last layer returned.
        """
        if self._checkpointing == "stage" and torch.is_grad_enabled():
            return _recomputed(self._run_layers, batch, microbatch, kwargs, *args)
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
                output = _recomputed(self._run_layer, index, batch, microbatch, chosen, *args)
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


def _recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function now, and again in its backward instead of keeping what it computes.

    The random states need no saving: the function starts its streams itself. It works on copies,
    or a layer that begins in place, as ``ReLU(inplace=True)``, would spoil what is kept. Precision
    plugins change torch's default dtype for the step, but not for backward: it is kept.
    """
    dtype = torch.get_default_dtype()

    def again(*kept: Any) -> Any:
        outside = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return function(*pytree.tree_map_only(Tensor, Tensor.clone, kept))
        finally:
            torch.set_default_dtype(outside)

    return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False)
