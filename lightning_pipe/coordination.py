"""When to pause and when to stop: one decision for all ranks, and no rendezvous for it.

Lightning lets all ranks wait for each other before or after every batch to ask who has received
SIGTERM and what rank 0's clock says. Here rank 0 decides when a batch begins, and its decisions
travel down the pipeline with the message that goes ahead of the batch. Another rank that is asked
to stop says so in the same message; the last rank tells rank 0 with its word on the batch. Outside
training that message goes ahead of a pipelined call, and the last rank tells all with the output.

The signal of a SLURM job that is about to end is one of these decisions: all ranks save and requeue
after the batch with which rank 0 has told them. It may come to all ranks, and rank 0's counts. One
that comes in a validation is acted on with the next training batch; after the last one there is
nothing left to requeue for. Outside `fit` no checkpoint is saved: the ranks cannot meet wherever
they happen to be, and there is no progress to keep; rank 0 warns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pipe import trainer_patches as patches
from lightning_pipe.runtime.errors import PipelineError
from lightning_pipe.runtime.handshake import Agreement
from lightning_pipe.runtime.rounds import Wishes
from lightning_pipe.runtime.training import TrainingResult


@dataclass
class _Clock:
    """Something that is due at a time.

    Attributes:
        is_due: Asks the clock of this process.
        install: Lets Lightning take the decision, which its argument gives (``None``: there is
            none yet), instead of asking the clocks of all ranks.
    """

    is_due: Callable[[], bool]
    install: Callable[[Callable[[], bool | None]], patches.Undo]


class Coordination:
    """The decisions of a run, on one rank.

    Args:
        trainer: Which is about to run.
        strategy: Its strategy.

    Attributes:
        asked: Whether this rank has received SIGTERM.
        stops: Whether all ranks have agreed to stop after the running batch.
        stops_evaluations: Whether they can do so outside training.
    """

    def __init__(self, trainer: Trainer, strategy: Strategy) -> None:
        self._trainer, self._strategy = trainer, strategy
        self.stops = self.asked = False
        self.stops_evaluations = True
        self._requeue_asked = self._requeue_due = False
        self._requeue_is_decided: Callable[[], bool] = lambda: False
        self._decisions: tuple[bool, ...] | None = None  # in the order of the clocks
        self._clocks = _clocks(trainer, strategy)
        self._fits = trainer.state.fn == TrainerFn.FITTING
        self._undo = [patches.take_sigterm(trainer, self._take_signal)]
        self._undo.append(patches.take_requeue_signal(trainer, self._take_requeue_signal))
        if self._fits and patches.requeues(trainer):
            self._clocks.append(_Clock(lambda: self._requeue_asked, self._install_requeue))
        for index, clock in enumerate(self._clocks):
            self._undo.append(clock.install(partial(self._decision, index)))

    def close(self) -> None:
        """Give Lightning its own ways back."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def wishes(self) -> Wishes:
        """What this rank wants of the round that begins."""
        asked = self.asked or self.stops  # an evaluation may have ended after they agreed
        due = tuple(clock.is_due() for clock in self._clocks)
        return Wishes(asked, due, patches.data_ends(self._trainer), self._pauses)

    def conclude(self, result: TrainingResult) -> None:
        """Act on what was agreed on in a round."""
        self._requeue_due = self._requeue_is_decided()
        if result.stops:
            self.stop()

    def stop(self) -> None:
        """All ranks have agreed to stop after the running batch."""
        if not self.stops:
            rank_zero_info("A rank has received SIGTERM: all stop after this batch.")
        self.stops = True
        patches.stop_as_after_sigterm(self._trainer)

    def _take_signal(self) -> None:
        if not self._fits and not self.stops_evaluations and not self.asked:
            rank_zero_warn(
                "SIGTERM: this goes on to its end, since replicas may have different numbers of "
                "batches, and could not stop together."
            )
        self.asked = True

    def _take_requeue_signal(self) -> None:
        if not self._fits and not self._requeue_asked:
            rank_zero_warn(
                "SLURM has sent its signal, and this job is neither saved nor requeued: the ranks "
                "of a pipeline do so in `fit` only. Give it more time, or submit it again."
            )
        self._requeue_asked = True

    def _install_requeue(self, decide: Callable[[], bool | None]) -> patches.Undo:
        self._requeue_is_decided = lambda: bool(decide())
        return patches.after_batch_hooks(self._trainer, self._requeue)

    def _requeue(self) -> None:
        """Save a checkpoint together, and let rank 0 requeue the job, if that is due."""
        if self._requeue_due:
            self._requeue_asked = self._requeue_due = False
            patches.save_and_requeue(self._trainer, self._strategy.broadcast)

    def _decision(self, index: int) -> bool | None:
        return None if self._decisions is None else self._decisions[index]

    def _pauses(self, agreement: Agreement) -> bool:
        """Take what was agreed on, from which follows whether training pauses after the batch."""
        self._decisions = agreement.decisions
        if agreement.last and not patches.data_ends(self._trainer):
            self._end_epoch()
        return patches.pauses_after_batch(self._trainer)

    def _end_epoch(self) -> None:
        """The data of another replica ends with this batch."""
        trainer = self._trainer
        if (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches:
            raise PipelineError(
                f"The data of another replica ends with batch {trainer.fit_loop.batch_idx}, in the "
                "middle of an accumulation, in which this replica would go on. Give the data the "
                "same length on all replicas, or a length that accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches} divides."
            )
        patches.end_epoch(trainer)


def _clocks(trainer: Trainer, strategy: Strategy) -> list[_Clock]:
    """All that depends on the time, in the same order on all ranks."""
    clocks: list[_Clock] = []
    if trainer.state.fn != TrainerFn.FITTING:
        return clocks
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer) and callback._duration is not None:
            if callback._interval == "step":
                clocks.append(_timer(callback, strategy))
        elif isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            clocks.append(_time_based_checkpoint(callback, strategy))
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        clocks.append(_time_between_validations(trainer))
    return clocks


def _timer(timer: Timer, strategy: Strategy) -> _Clock:
    def is_due() -> bool:
        assert timer._duration is not None
        return timer.time_elapsed() >= timer._duration

    return _Clock(is_due, _answering(strategy, timer, "_check_time_remaining", negated=False))


def _time_based_checkpoint(checkpoint: ModelCheckpoint, strategy: Strategy) -> _Clock:
    def is_due() -> bool:
        interval, before = checkpoint._train_time_interval, checkpoint._last_time_checked
        assert interval is not None
        return before is not None and time.monotonic() - before >= interval.total_seconds()

    # What it broadcasts is whether to skip the checkpoint.
    return _Clock(is_due, _answering(strategy, checkpoint, "on_train_batch_end", negated=True))


def _time_between_validations(trainer: Trainer) -> _Clock:
    def is_due() -> bool:
        interval, before = trainer._val_check_time_interval, trainer._last_val_time  # type: ignore[attr-defined]
        return bool(time.monotonic() - before >= interval)

    return _Clock(is_due, lambda decide: patches.decide_when_to_validate(trainer, decide))


def _answering(
    strategy: Strategy, callback: Callback, method: str, negated: bool
) -> Callable[[Callable[[], bool | None]], patches.Undo]:
    def install(decide: Callable[[], bool | None]) -> patches.Undo:
        def answer() -> bool | None:
            decision = decide()
            return None if decision is None else decision is not negated

        return patches.answer_broadcast(strategy, callback, method, answer)

    return install
