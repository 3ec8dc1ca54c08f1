"""The user's training step, run for each micro-batch of one batch on each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pipe.runtime.call import StageOutput
from lightning_pipe.runtime.distributed_tensors import in_parallel_if_it_was, whole
from lightning_pipe.runtime.payload import flatten
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.stage import Stage

Step = Callable[[Any, int], Any]
"""The user's step: a micro-batch and its number in, the loss (or ``{"loss", "weight"}``) out."""


Scale = Callable[[Tensor], Tensor]
"""Scales a loss before its backward."""


def unscaled(loss: Tensor) -> Tensor:
    """No scaling."""
    return loss


@dataclass(frozen=True)
class MicroBatches:
    """A batch, cut.

    Attributes:
        number: Of the batch over the whole run; names the random streams.
        pieces: The micro-batches.
        sizes: Samples in each.
    """

    number: int
    pieces: Sequence[Any]
    sizes: Sequence[int]

    @property
    def shares(self) -> list[float]:
        """What each micro-batch is of the batch's samples."""
        samples = sum(self.sizes)
        return [size / samples for size in self.sizes]


@dataclass
class Losses:
    """The losses of a batch, on the rank of the last stage.

    Attributes:
        separate: Whether each micro-batch makes an update of its own, so that its gradient is not
            weighted by its share in the batch.
        takes_weights: Whether the step may return weights of its own.
        scale: Scales what is differentiated (fp16), not what is reported.
        replica_share: What this replica's samples are of those of all; gradients are summed.
        total: Sum of ``loss * weight``.
        weight: Sum of the weights; 1 unless the step returns weights of its own.
    """

    separate: bool = False
    takes_weights: bool = True
    scale: Scale = unscaled
    replica_share: float = 1.0
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
        loss = in_parallel_if_it_was(loss, output)
        self.own_weights.add(weight is not None)
        if len(self.own_weights) > 1:
            raise MisconfigurationException(
                "training_step returned a weight for some micro-batches of the batch and none "
                "for others. Return {'loss': ..., 'weight': ...} always, or never."
            )
        if weight is not None and not self.takes_weights:
            raise MisconfigurationException(
                "training_step returned a weight of its own, but with an asynchronous schedule a "
                "micro-batch is updated from before the weights of the others are known. Return "
                "the loss alone, or choose a synchronous schedule."
            )
        replica = self.replica_share if weight is None else 1.0
        weight = share if weight is None else weight
        if not weight:  # a mean over nothing is not a number, and counts for nothing
            loss = sum(leaf.sum() * 0.0 for leaf in flatten(output) if _has_gradient(leaf))
        weighted = loss * weight
        self.total = self.total + torch.as_tensor(weighted).detach()
        self.weight += weight
        due = loss if self.separate else weighted
        return self.scale(due if replica == 1.0 else due * replica)

    @property
    def mean(self) -> Tensor:
        """The batch's, a scalar without gradient."""
        total = torch.as_tensor(self.total).detach()
        return total / self.weight if self.weight else total * float("nan")


class BatchSteps:
    """The steps of one batch on one rank.

    Args:
        step: The user's.
        batch: Cut into micro-batches.
        stages: This rank's.
        random_states: Seed the streams.
        losses: Collect what the steps return.
        on_first_call: Gets the arguments of the batch's first pipelined call.
    """

    def __init__(
        self,
        step: Step,
        batch: MicroBatches,
        stages: Mapping[int, Stage],
        random_states: RandomStates,
        losses: Losses,
        on_first_call: Callable[[tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        self.batch, self.losses = batch, losses
        self._step, self._stages, self._random = step, stages, random_states
        self._on_first_call: Callable[..., None] | None = on_first_call
        self._shares = batch.shares
        self._calls = 0
        self._now: tuple[Stage, int, Any] | None = None  # the forward that is running
        self._output: Any = None  # of the call in it, on the last stage

    def forward(self, stage: int, microbatch: int, activation: Any) -> Any:
        """Run the step for the forward of one stage.

        Args:
            stage: Whose layers the pipelined call runs.
            microbatch: Number in the batch.
            activation: What entered the stage; nothing on the first.

        Returns:
            The stage's output; on the last stage the loss to differentiate.
        """
        self._now, self._calls = (self._stages[stage], microbatch, activation), 0
        self._random.seed_step(self.batch.number, microbatch)
        try:
            result = self._step(self.batch.pieces[microbatch], microbatch)
        except StageOutput as unwound:
            return unwound.with_traceback(None).output
        finally:
            self._now = None
        self._check_returned(stage)
        output, self._output = self._output, None
        return self.losses.add(result, self._shares[microbatch], output)

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
        last = microbatch + 1 == len(self.batch.pieces)
        output = stage.forward(inputs, kwargs, self.batch.number, microbatch, ends_batch=last)
        if not stage.is_last:
            raise StageOutput(output)
        self._output = output
        self._random.seed_step(self.batch.number, microbatch, after_call=True)
        return output

    @property
    def running(self) -> bool:
        """Whether a step is running, so that a pipelined call is its."""
        return self._now is not None

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
    return whole(loss), None if weight is None else float(weight)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
