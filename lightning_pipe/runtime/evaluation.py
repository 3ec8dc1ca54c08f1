"""One pipelined call without gradients: validation, test, prediction, ``model(x)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_pipe.runtime.stage import Stage


class EvaluationRound:
    """What the executor computes in one pipelined call on one rank.

    Args:
        pieces: For each micro-batch, the call's ``(args, kwargs)``.
        stages: This rank's.
        batch: Names the random streams, with the number of the micro-batch.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        stages: Mapping[int, Stage],
        batch: int,
    ) -> None:
        self._pieces, self._stages, self._batch = pieces, stages, batch
        self.outputs: list[Any] = []  # of the micro-batches, on the rank of the last stage

    def forward(self, stage: int, microbatch: int, activation: Any) -> Any:
        """See :class:`~lightning_pipe.runtime.executor.Work`."""
        here = self._stages[stage]
        args, kwargs = self._pieces[microbatch]
        inputs = args if here.is_first else (activation,)
        output = here.forward(inputs, kwargs, self._batch, microbatch)
        if here.is_last:
            self.outputs.append(output)
        return output

    def reduce(self, stage: int) -> None:
        """There are no gradients."""

    def update(self, stage: int) -> None:
        """There are no gradients."""
