"""What a schedule computes in training, and what comes out of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_pipe.runtime.groups import Group
from lightning_pipe.runtime.reduction import GradientSum, Reduction, StageReductions
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.steps import BatchSteps, Losses, Scale, unscaled
from lightning_pipe.runtime.weights import Gradients, WeightStore, count_bytes
from lightning_pipe.schedule.instructions import AnyBackward, Forward, Reduce, Update

ApplyUpdate = Callable[[Gradients, int], None]
"""Makes an update at once: the gradients, and the number of the batch that they come from."""


@dataclass
class BatchResult:
    """What a batch of training came to, equal on all ranks.

    Attributes:
        number: Of the batch over the whole run.
        loss: Its mean, a scalar without gradient.
        weight: Sum of the weights that the gradients must be divided by.
        own_weight: Whether the step gave weights of its own.
        attachment: What the last rank added, see :meth:`Pipeline.train`.
        lag: Rounds by which this reaches all ranks later than the batch began, without a drain.
    """

    number: int
    loss: Tensor
    weight: float
    own_weight: bool
    attachment: Any
    lag: int


@dataclass
class TrainingResult:
    """What one round of training came to.

    Attributes:
        finished: The batches of which the last rank's word has reached all, oldest first: the
            round's own with a synchronous schedule, earlier ones with an asynchronous one.
        decisions: What rank 0 had decided, see :class:`Wishes`.
        stops: Whether training stops after this round, on all ranks.
        update: Number of the batch whose update is due now; ``None`` if no update is, while the
            pipeline fills.
        gradients: For that update, this rank's, not divided by ``weight`` yet.
        weight: Sum of the weights in the gradients.
    """

    finished: list[BatchResult]
    decisions: tuple[bool, ...] = ()
    stops: bool = False
    update: int | None = None
    gradients: Gradients = field(default_factory=list)
    weight: float = 1.0

    def deliver(self, scale: float = 1.0) -> None:
        """Add the gradients, times ``scale`` and over the weight, to those of the parameters."""
        factor = scale / self.weight if self.weight else float("nan")
        for parameter, gradient in self.gradients:
            if factor != 1.0:
                gradient.mul_(factor)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self.gradients.clear()  # for all who hold the list


class TrainingWork(Protocol):
    """What the executor computes in training, round by round; see also ``executor.Work``.

    Attributes:
        due: Number of the batch whose update is left to the caller; ``None`` if there is none.
        gradients: For it.
        updates: Updates so far, by stage.
    """

    due: int | None
    gradients: Gradients
    updates: Counter[int]

    def new_losses(self) -> Losses:
        """For a batch."""
        ...

    def begin(self, steps: BatchSteps | None, first: int, last_update: Update | None) -> None:
        """Begin a round.

        Args:
            steps: Of its batch; ``None`` in a round that only drains.
            first: Number of the batch's first micro-batch; 0 begins a fill.
            last_update: The one that is left to the caller.
        """
        ...

    def end_fill(self) -> None:
        """The pipeline is empty."""
        ...

    def weights(self) -> Mapping[int, tuple[int, int]]:
        """By stage, most versions of the weights held at a time, and most bytes."""
        ...


class Shards(Protocol):
    """Gradients, or weights, too, of which each replica of a stage has a part."""

    def before_backward(self, stage: int, last: bool) -> None:
        """A backward of a stage begins; whether it is the round's last one."""
        ...

    def after_backward(self, stage: int) -> None:
        """It has ended."""
        ...

    def end_round(self) -> None:
        """All backwards have ended: give the parameters their gradients."""
        ...


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
