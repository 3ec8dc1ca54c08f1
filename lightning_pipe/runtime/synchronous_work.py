"""What a synchronous schedule computes: gradients of one batch, with weights of one version."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_pipe.runtime.reduction import Reduction, StageReductions
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.steps import BatchSteps, Losses, Scale, unscaled
from lightning_pipe.runtime.training import Shards
from lightning_pipe.runtime.weights import Gradients, count_bytes
from lightning_pipe.schedule.instructions import AnyBackward, Forward, Reduce, Update


class SynchronousWork:
    """Gradients of one batch, summed over its micro-batches; all weights have one version.

    Args:
        stages: This rank's.
        shared: Parameters outside the layers, which live on every rank.
        reductions: What other ranks hold, too.
        shards: What replicas divide among them, if they do.

    Attributes:
        scale_loss: Scales each loss before its backward.
        summed_at: See :class:`~lightning_pipe.runtime.executor.Work`.
    """

    summed_at: float | None = None
    scale_loss: Scale = staticmethod(unscaled)

    def __init__(
        self,
        stages: Mapping[int, Stage],
        shared: Sequence[nn.Parameter],
        reductions: Sequence[Reduction],
        shards: Shards | None = None,
    ) -> None:
        self._stages, self._shared, self._reductions = stages, list(shared), reductions
        self._shards = shards
        self._steps: BatchSteps | None = None
        self.updates: Counter[int] = Counter()

    def new_losses(self) -> Losses:
        """See :class:`TrainingWork`."""
        return Losses(scale=self.scale_loss)

    def begin(self, steps: BatchSteps | None, first: int, last_update: Update | None) -> None:
        """See :class:`TrainingWork`; all updates are left to the caller."""
        assert steps is not None
        self._steps = steps
        self.due: int | None = steps.batch.number
        self.gradients: Gradients = []
        self._sums, self._is_ending = StageReductions(self._reductions), True
        self._to_take = list(self._shared)
        self._backwards_left = dict.fromkeys(self._stages, len(steps.batch.pieces))

    def forward(self, step: Forward, activation: Any) -> Any:
        """See :class:`~lightning_pipe.runtime.executor.Work`."""
        assert self._steps is not None
        return self._steps.forward(step.stage, step.microbatch, activation)

    def backward(self, step: AnyBackward, run: Callable[[], None]) -> None:
        """See :class:`~lightning_pipe.runtime.executor.Work`."""
        if self._shards is None:
            run()
            return
        self._backwards_left[step.stage] -= 1
        self._shards.before_backward(step.stage, last=not self._backwards_left[step.stage])
        run()
        self._shards.after_backward(step.stage)

    def reduce(self, step: Reduce) -> None:
        """Start to sum the gradients of what other ranks hold, too."""
        self._sums.end_stage(step.stage)

    def update(self, step: Update) -> None:
        """Take a stage's gradients away from its parameters; Lightning's backward brings them."""
        self.summed_at = None
        self._end_stages()
        self._take(p for layer in self._stages[step.stage].layers for p in layer.parameters())
        self._take(self._to_take)
        self._to_take = []
        self.updates[step.stage] += 1

    def end_fill(self) -> None:
        """See :class:`TrainingWork`."""
        self._steps = None

    def weights(self) -> Mapping[int, tuple[int, int]]:
        """See :class:`TrainingWork`."""
        return {
            index: (1, count_bytes(p for layer in stage.layers for p in layer.parameters()))
            for index, stage in self._stages.items()
        }

    def _end_stages(self) -> None:
        """Updates come last: by the first, all stages of this rank are at their ends."""
        if self._is_ending:
            self._is_ending = False
            self._sums.finish()
            if self._reductions:
                self.summed_at = time.perf_counter()
            if self._shards is not None:
                self._shards.end_round()

    def _take(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self.gradients.append((parameter, parameter.grad))
                parameter.grad = None
