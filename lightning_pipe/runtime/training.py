"""What a schedule computes in training, and what comes out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_pipe.runtime.groups import Alone, Group
from lightning_pipe.runtime.reduction import Reduction
from lightning_pipe.runtime.steps import BatchSteps, Losses
from lightning_pipe.runtime.weights import Gradients
from lightning_pipe.schedule.instructions import Update

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


@dataclass(frozen=True)
class Sharing:
    """What this rank has that other ranks have too.

    Attributes:
        outside: Parameters outside the layers; on every rank, equal.
        reductions: All parameters whose gradients are summed over several ranks.
        replicas: The ranks that hold this rank's stages.
        shards: What these divide among them, if they do.
    """

    outside: Sequence[nn.Parameter] = ()
    reductions: Sequence[Reduction] = ()
    replicas: Group = field(default_factory=Alone)
    shards: Shards | None = None


@contextmanager
def withheld(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set the gradients of parameters aside; inside, they have none."""
    aside = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient
