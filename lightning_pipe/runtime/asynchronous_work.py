"""What an asynchronous schedule computes: gradients with the versions of weights of its plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_pipe.runtime.groups import Group
from lightning_pipe.runtime.reduction import GradientSum
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.steps import BatchSteps, Losses
from lightning_pipe.runtime.training import ApplyUpdate
from lightning_pipe.runtime.weights import Gradients, WeightStore
from lightning_pipe.schedule.instructions import AnyBackward, Forward, Reduce, Update


class AsynchronousWork:
    """Gradients of one stage, each computed with the version of the weights that its plan names.

    Args:
        stage: This rank's.
        per_microbatch: Whether every micro-batch makes an update (PipeDream), or every batch (2BW).
        apply_update: Makes the updates that are not left to the caller.
        replicas: The ranks that hold this stage, too.

    Attributes:
        summed_at: See :class:`~lightning_pipe.runtime.executor.Work`.
    """

    summed_at: float | None = None

    def __init__(
        self, stage: Stage, per_microbatch: bool, apply_update: ApplyUpdate, replicas: Group
    ) -> None:
        self._stage, self._per_microbatch, self._apply = stage, per_microbatch, apply_update
        self._replicas = replicas
        self._store = WeightStore(stage.layers)
        self._update_of: dict[int, int] = {}  # micro-batches in flight
        self._batch_of: dict[int, int] = {}  # updates to come
        self._gathered: dict[int, list[Tensor | None]] = {}  # gradients, by update
        self._sums: dict[int, GradientSum] = {}  # of these over the replicas, by update
        self._batches = 0  # of the fill
        self.updates: Counter[int] = Counter()

    def new_losses(self) -> Losses:
        """See :class:`TrainingWork`."""
        return Losses(separate=self._per_microbatch, takes_weights=False)

    def begin(self, steps: BatchSteps | None, first: int, last_update: Update | None) -> None:
        """See :class:`TrainingWork`."""
        self._steps, self._first, self._last_update = steps, first, last_update
        self.due: int | None = None
        self.gradients: Gradients = []
        if steps is None:
            return
        if first == 0:
            self._store.begin_fill()
            self._batches = 0
        self._batches += 1

    def forward(self, step: Forward, activation: Any) -> Any:
        """See :class:`~lightning_pipe.runtime.executor.Work`."""
        assert self._steps is not None
        update = step.microbatch if self._per_microbatch else self._batches - 1
        self._update_of[step.microbatch] = update
        self._batch_of[update] = self._steps.batch.number
        with self._store.reading(step.version):
            return self._steps.forward(step.stage, step.microbatch - self._first, activation)

    def backward(self, step: AnyBackward, run: Callable[[], None]) -> None:
        """See :class:`~lightning_pipe.runtime.executor.Work`."""
        with self._store.reading(step.version):
            run()
        update = self._update_of.pop(step.microbatch)
        gradients = self._store.take_gradients(step.version)
        so_far = self._gathered.setdefault(update, gradients)
        if so_far is not gradients:
            self._gathered[update] = [_sum(a, b) for a, b in zip(so_far, gradients, strict=True)]

    def reduce(self, step: Reduce) -> None:
        """Start to sum the gradients over the replicas."""
        if self._replicas.size > 1:
            gradients = self._gathered.pop(step.update)
            self._sums[step.update] = GradientSum(self._store.parameters, gradients, self._replicas)

    def update(self, step: Update) -> None:
        """Update now, or leave the last update of the round to the caller."""
        sums = self._sums.pop(step.update, None)
        summed = self._gathered.pop(step.update) if sums is None else sums.wait()
        self.summed_at = None if sums is None else time.perf_counter()
        gradients = self._store.with_parameters(summed)
        batch = self._batch_of.pop(step.update)
        self._store.advance(step.keeps, in_flight=bool(self._update_of))
        self.updates[step.stage] += 1
        if step is self._last_update:
            self.due, self.gradients = batch, gradients
        else:
            self._apply(gradients, batch)

    def end_fill(self) -> None:
        """See :class:`TrainingWork`."""
        self._store.end_fill()
        self._steps = None

    def weights(self) -> Mapping[int, tuple[int, int]]:
        """See :class:`TrainingWork`."""
        store = self._store
        return {self._stage.index: (store.peak_versions, store.peak_bytes)}


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)
