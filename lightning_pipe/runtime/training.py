"""One batch of training: the user's step for every Forward, the gradients withheld."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pipe.runtime.call import StageOutput
from lightning_pipe.runtime.payload import flatten
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.transport import Transport

Step = Callable[[Any, int], Any]
"""The user's step: a micro-batch and its number in, the loss (or ``{"loss", "weight"}``) out."""

Gradients = list[tuple[nn.Parameter, Tensor]]


@dataclass
class TrainingResult:
    """What a batch of training came to, equal on all ranks.

    Attributes:
        loss: The batch's mean, a scalar without gradient.
        weight: Sum of the weights that the gradients must be divided by.
        own_weight: Whether the step gave weights of its own.
        attachment: What the last rank added, see :meth:`Pipeline.train`.
        gradients: This rank's, not divided by ``weight`` yet.
    """

    loss: Tensor
    weight: float
    own_weight: bool
    attachment: Any
    gradients: Gradients = field(default_factory=list)

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
        self.gradients = []


@dataclass
class Losses:
    """The losses of a batch, on the rank of the last stage.

    Attributes:
        total: Sum of ``loss * weight``.
        weight: Sum of the weights; 1 unless the step returns weights of its own.
    """

    total: Tensor | float = 0.0
    weight: float = 0.0
    own_weights: set[bool] = field(default_factory=set)

    def add(self, result: Any, share: float, output: Any) -> Tensor:
        """Take one step's result.

        Args:
            result: What the step returned.
            share: Of the micro-batch in the batch's samples.
            output: Of the pipelined call, to which the step applied its loss.

        Returns:
            What to differentiate.
        """
        loss, weight = _loss_and_weight(result)
        self.own_weights.add(weight is not None)
        if len(self.own_weights) > 1:
            raise MisconfigurationException(
                "training_step returned a weight for some micro-batches of the batch and none "
                "for others. Return {'loss': ..., 'weight': ...} always, or never."
            )
        weight = share if weight is None else weight
        if not weight:  # a mean over nothing is not a number, and counts for nothing
            loss = sum(leaf.sum() * 0.0 for leaf in flatten(output) if _has_gradient(leaf))
        weighted = loss * weight
        self.total = self.total + torch.as_tensor(weighted).detach()
        self.weight += weight
        return weighted


class TrainingRound:
    """What the executor computes in one batch of training on one rank.

    Args:
        step: The user's.
        microbatches: Pieces of the batch.
        sizes: Samples in each.
        stages: This rank's.
        batch: Number of the batch over the whole run; names the random streams.
        random_states: Seed the streams.
        shared: Parameters outside the layers, which live on every rank.
        transport: Sums the gradients of ``shared``.
        on_first_call: Gets the arguments of the round's first pipelined call.
    """

    def __init__(
        self,
        step: Step,
        microbatches: Sequence[Any],
        sizes: Sequence[int],
        stages: Mapping[int, Stage],
        batch: int,
        random_states: RandomStates,
        shared: Sequence[nn.Parameter],
        transport: Transport,
        on_first_call: Callable[[tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        self._step, self._microbatches, self._sizes = step, microbatches, sizes
        self._stages, self._batch, self._random = stages, batch, random_states
        self._shared, self._transport = list(shared), transport
        self._on_first_call: Callable[..., None] | None = on_first_call
        self._to_reduce = set(stages)
        self._calls = 0
        self._now: tuple[Stage, int, Any] | None = None  # the Forward that is running
        self._output: Any = None  # of the call in it, on the last stage
        self.losses = Losses()
        self.gradients: Gradients = []

    def forward(self, stage: int, microbatch: int, activation: Any) -> Any:
        """See :class:`~lightning_pipe.runtime.executor.Work`."""
        self._now, self._calls = (self._stages[stage], microbatch, activation), 0
        self._random.seed_step(self._batch, microbatch)
        try:
            result = self._step(self._microbatches[microbatch], microbatch)
        except StageOutput as unwound:
            return unwound.with_traceback(None).output
        finally:
            self._now = None
        self._check_returned(stage)
        share = self._sizes[microbatch] / sum(self._sizes)
        output, self._output = self._output, None
        return self.losses.add(result, share, output)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the pipelined call that the user's step makes."""
        assert self._now is not None
        stage, microbatch, activation = self._now
        self._calls += 1
        self._refuse_second_call()
        if self._on_first_call is not None:
            self._on_first_call(args, kwargs)
            self._on_first_call = None
        inputs = args if stage.is_first else (activation,)
        output = stage.forward(inputs, kwargs, self._batch, microbatch)
        if not stage.is_last:
            raise StageOutput(output)
        self._output = output
        self._random.seed_step(self._batch, microbatch, after_call=True)
        return output

    def reduce(self, stage: int) -> None:
        """Sum the gradients of the parameters outside the layers, after this rank's last stage."""
        self._to_reduce.discard(stage)
        if self._shared and not self._to_reduce:
            _sum_gradients(self._shared, self._transport)

    def update(self, stage: int) -> None:
        """Take a stage's gradients away from its parameters; Lightning's backward brings them."""
        self._take(p for layer in self._stages[stage].layers for p in layer.parameters())
        if self._shared:
            self._take(self._shared)
            self._shared = []

    def _take(self, parameters: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self.gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def _refuse_second_call(self) -> None:
        if self._calls > 1:
            raise MisconfigurationException(
                "training_step called the pipelined module twice. A schedule runs it once per "
                "micro-batch: put both inputs into one call (concatenate them along dimension "
                "0), or train without a pipeline."
            )

    def _check_returned(self, stage: int) -> None:
        if self._calls == 0:
            raise MisconfigurationException(
                "training_step did not call the pipelined module. Call it once in every step "
                "(name another with PipelineStrategy(module=...) if it is the wrong one)."
            )
        if not self._stages[stage].is_last:
            raise MisconfigurationException(
                "training_step caught the exception by which a stage leaves it at the pipelined "
                "call. Replace `except:` or `except BaseException` around the call by `except "
                "Exception`."
            )
        self._refuse_second_call()  # again, if the step has caught the error


def _loss_and_weight(result: Any) -> tuple[Tensor, float | None]:
    loss, weight = result, None
    if isinstance(result, Mapping):
        loss, weight = result.get("loss"), result.get("weight")
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            f"training_step returned {type(result).__name__}"
            f"{'' if not isinstance(result, Mapping) else f' with keys {list(result)}'}; a "
            "pipeline needs the loss: a tensor, {'loss': tensor}, or {'loss': tensor, 'weight': "
            "number}."
        )
    if loss.is_meta:
        raise MisconfigurationException(
            "The loss is on the meta device: training_step used parameters of layers that live "
            "on other ranks (a penalty over all parameters?). Use weight_decay, or compute the "
            "penalty inside the layers."
        )
    if not loss.requires_grad:
        raise MisconfigurationException(
            "The loss of training_step does not depend on any parameter that requires a gradient: "
            "all are frozen, or it was detached."
        )
    if loss.numel() != 1:
        raise MisconfigurationException(
            f"The loss has shape {tuple(loss.shape)}; expected a scalar. Reduce it: loss.mean()."
        )
    return loss, None if weight is None else float(weight)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _sum_gradients(parameters: Sequence[nn.Parameter], transport: Transport) -> None:
    """Sum gradients over all ranks; a parameter that no rank has one for keeps none."""
    parameters = [p for p in parameters if p.requires_grad]
    present = torch.tensor([float(p.grad is not None) for p in parameters])
    transport.all_reduce(present)
    for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            transport.all_reduce(parameter.grad)
