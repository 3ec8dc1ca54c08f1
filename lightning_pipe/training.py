"""The training half of the adapter: Lightning's steps, run by a pipeline.

Lightning calls ``training_step``, then ``zero_grad``, then ``backward``, all inside of
``optimizer_step``. Here the first runs a round and withholds its gradients, and ``backward``
delivers them. While the pipeline of an asynchronous schedule fills, there is nothing to deliver and
no update; where a round makes several, the last one is Lightning's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe import checks
from lightning_pipe import trainer_patches as patches
from lightning_pipe.coordination import Coordination
from lightning_pipe.relay import StepLogs
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.runtime.training import BatchResult, TrainingResult
from lightning_pipe.updates import Updates


class PipelineTraining:
    """One fit on one rank.

    Args:
        module: The user's.
        pipeline: This rank's.
        precision: Of the Trainer.
        logs: Of the steps.
        coordination: With the other ranks.
        optimizer: Gives the optimizer.
    """

    def __init__(
        self,
        module: LightningModule,
        pipeline: Pipeline,
        precision: Precision,
        logs: StepLogs,
        coordination: Coordination,
        optimizer: Callable[[], Optimizer],
    ) -> None:
        self._module, self._pipeline, self._precision = module, pipeline, precision
        self._trainer: Trainer = module.trainer
        self._logs, self._coordination = logs, coordination
        self._optimizer = optimizer
        self._updates = Updates(module, precision, optimizer)
        self._result: TrainingResult | None = None  # withheld until backward
        self._owed: int | None = None  # batch whose asynchronous update Lightning has yet to make
        self._names: set[str] = set()  # of all that training steps have logged
        self._fresh = True  # Lightning may log what this round has played
        self._step = 0  # under which loggers put what the latest round logs
        self._number = 0  # of its batch
        self._stepping = False
        # In this fill: which parameters require gradients, which modules train or evaluate.
        self._trained: list[tuple[nn.Parameter, bool]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._spent_unseen = False
        self._undo: list[patches.Undo] = [patches.tell_parameters_apart()]
        if pipeline.continuous:
            pipeline.apply_updates_by(self._updates.apply)
            pipeline.before_call = self.drain
            self._undo += [
                patches.before_pauses(self._trainer, self.drain),
                patches.hide_stale_values(self._trainer, self._hidden),
            ]
            warnings.filterwarnings("ignore", r".*`lr_scheduler\.step\(\)` before `optimizer")

    def close(self) -> None:
        """Give Lightning its own ways back."""
        for undo in self._undo:
            undo()
        self._undo = []

    @property
    def begins_epoch(self) -> bool:
        """Whether the running batch is the first of its epoch."""
        return self._trainer.fit_loop.batch_idx == 0

    def begin(self) -> None:
        """Find out whether anyone looks at the gradients of the batch before."""
        hooks = "optimizer_zero_grad", "on_before_zero_grad"
        self._spent_unseen = not any(is_overridden(hook, self._module) for hook in hooks) and (
            not any(
                is_overridden("on_before_zero_grad", callback, Callback)
                for callback in self._trainer.callbacks  # type: ignore[attr-defined]
            )
        )

    def training_step(self, batch: Any, args: Sequence[Any]) -> Any:
        """Run a round.

        Args:
            batch: As Lightning gives it.
            args: Further arguments of the user's step.

        Returns:
            The mean loss, equal on all ranks, of the batch that came to an end last: this one with
            a synchronous schedule, an earlier one else. Not a number while the pipeline fills.
        """
        module, logs = self._module, self._logs

        def step(microbatch: Any, index: int) -> Any:
            with logs.microbatch(microbatch), self._precision.train_step_context():
                result = module.training_step(microbatch, *args)
                logs.weigh(result)
                return result

        number = self._trainer.fit_loop.epoch_loop.total_batch_idx
        if self._pipeline.continuous:
            self._check_continuous()
            self._updates.remember(number)
            self._look_at_modules()
        self._free_spent_gradients()
        logs.begin_batch()
        result = self._pipeline.train(
            step, batch, number, "train_dataloader", logs.collect, self._coordination.wishes()
        )
        self._coordination.conclude(result)
        self._result = result
        self._owed = result.update if self._pipeline.continuous else None
        self._step, self._number = patches.batches_logged(self._trainer), number
        self._play(result.finished)
        if not result.finished:
            return torch.tensor(float("nan"), device=module.device)
        last = result.finished[-1]
        if last.own_weight:
            return {"loss": last.loss, "weight": torch.tensor(last.weight)}
        return last.loss

    def backward(self, closure_loss: Tensor) -> Tensor:
        """Deliver the gradients of the round, if an update is due."""
        assert self._result is not None
        loss: Tensor = self._precision.pre_backward(closure_loss, self._module)
        self._result.deliver(1 / self._trainer.accumulate_grad_batches)
        self._result = None
        return self._precision.post_backward(loss, self._module)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run Lightning's closure, and step if an update is due."""
        if not self._pipeline.continuous:
            return self._precision.optimizer_step(
                optimizer, model=self._module, closure=closure, **kwargs
            )
        self._stepping = True
        try:
            outcome = closure()
            batch, self._owed = self._owed, None
            if batch is None:
                return outcome
            with self._updates.of(batch):
                return self._precision.optimizer_step(
                    optimizer, model=self._module, closure=lambda: outcome, **kwargs
                )
        finally:
            self._stepping = False

    def drain(self) -> None:
        """Empty the pipeline between two steps, and log what comes out as in a step. Collective."""
        if self._stepping:
            self._refuse_drain()
            return
        self._check_update_made()
        if self._pipeline.in_flight:
            self._drain()

    def _drain(self) -> None:
        with patches.as_in_training_step(self._trainer), _training_again(self._modes):
            for result in self._pipeline.drain():
                self._play_and_log(result)

    def _look_at_modules(self) -> None:
        """Let a new fill begin where a hook has frozen or unfrozen parameters."""
        if self._pipeline.in_flight and any(p.requires_grad != was for p, was in self._trained):
            self._drain()
        if not self._pipeline.in_flight:
            self._trained = [(p, p.requires_grad) for p in self._module.parameters()]
            self._modes = [(child, child.training) for child in self._module.modules()]

    def _play(self, finished: Sequence[BatchResult]) -> None:
        """Log in a training step; what belongs to its step Lightning gives to loggers itself."""
        self._fresh = [self._step_of(result) for result in finished] == [self._step]
        if self._fresh:
            self._play_one(finished[0])
            return
        for result in finished:
            self._play_and_log(result)

    def _play_and_log(self, result: BatchResult) -> None:
        if self._fresh:  # not yet given to loggers by Lightning
            patches.log_step(self._trainer, self._step, self._names)
            self._fresh = False
        self._play_one(result)
        patches.log_step(self._trainer, self._step_of(result), self._names)

    def _play_one(self, result: BatchResult) -> None:
        self._names.update(call.name for call in result.attachment.calls)
        self._logs.play(result.attachment)

    def _step_of(self, result: BatchResult) -> int:
        """Under which loggers put it; always equally late, also where a drain completes it."""
        return self._step - self._number + result.number + result.lag

    def _hidden(self) -> frozenset[str]:
        """What Lightning must not give to loggers at the end of this batch."""
        fresh, self._fresh = self._fresh, False
        return frozenset() if fresh else frozenset(self._names)

    def _free_spent_gradients(self) -> None:
        """Free gradients that Lightning would zero right after the step, rather than keep both."""
        trainer = self._trainer
        if self._spent_unseen and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            for group in self._optimizer().param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _check_continuous(self) -> None:
        """Refuse what an asynchronous schedule cannot do, and callbacks may bring about."""
        if patches.skips_backward(self._trainer):
            raise MisconfigurationException(
                "Training steps without backward, as StochasticWeightAveraging runs them to update "
                "BatchNorm's statistics, are not possible with an asynchronous schedule. Choose a "
                "synchronous one ('1f1b')."
            )
        checks.check_accumulation(self._trainer.accumulate_grad_batches)
        self._check_update_made()

    def _check_update_made(self) -> None:
        if self._owed is not None:
            raise MisconfigurationException(
                f"The update from batch {self._owed} was not made: `optimizer_step` of the module "
                "did not step. An asynchronous schedule makes every update; leave the step out of "
                "your hook's hands, or choose a synchronous schedule ('1f1b')."
            )

    def _refuse_drain(self) -> None:
        if self._pipeline.in_flight:
            raise MisconfigurationException(
                "The weights were asked for (for a checkpoint, or by a pipelined call) within a "
                "training step of an asynchronous schedule, while updates are under way. Do it "
                "between steps: in `on_train_batch_start` or `on_train_batch_end`."
            )


@contextmanager
def _training_again(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Inside it is as it was in the fill's first step, for backward and what it computes again.

    Whoever makes a call to look at samples, say, may have called ``eval()`` before.
    """
    before = [(child, child.training) for child, _ in modes]
    for child, training in modes:
        child.training = training
    try:
        with torch.inference_mode(False):
            yield
    finally:
        for child, training in before:
            child.training = training
