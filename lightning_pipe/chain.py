"""Run layers one after the other as a pipeline does, without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_pipe.partition.layers import keyword_names


def run_layers(layers: Iterable[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Call layers as :class:`~lightning_pipe.PipelineStrategy` chains those of a model.

    A ``forward`` that is nothing but this call computes the same on one device and in a pipeline,
    which makes modules of other libraries into pipelined ones::

        def configure_pipeline(self):
            return [self.embed, *self.blocks, self.head]

        def forward(self, tokens, mask=None):
            return run_layers(self.configure_pipeline(), tokens, mask=mask)

    Args:
        layers: In order. The first gets ``args``, each other what the one before returned, as one
            positional argument.
        args: Positional arguments of the first layer.
        kwargs: Each reaches all layers whose ``forward`` names it explicitly.

    Returns:
        What the last layer returned.

    Raises:
        ValueError: There are no layers.
    """
    called = False
    for layer in layers:
        names = keyword_names(layer, len(args))
        chosen = {name: value for name, value in kwargs.items() if name in names}
        args, called = (layer(*args, **chosen),), True
    if not called:
        raise ValueError("run_layers got no layers; expected at least one.")
    return args[0]
