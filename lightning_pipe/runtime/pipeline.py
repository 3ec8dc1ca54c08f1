"""One rank's end of a pipeline: trains batches, answers calls. It needs no Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from lightning_pipe.runtime.consensus import Consensus
from lightning_pipe.runtime.evaluation import Evaluation
from lightning_pipe.runtime.executor import Measurements, Program
from lightning_pipe.runtime.link import Link
from lightning_pipe.runtime.microbatch import split_batch
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.recording import Recorder
from lightning_pipe.runtime.rounds import TrainingPrograms, TrainingRounds, Wishes
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.steps import MicroBatches, Scale, Step
from lightning_pipe.runtime.training import ApplyUpdate, BatchResult, Sharing, TrainingResult
from lightning_pipe.runtime.transport import Transport

Split = Callable[[Any, int], tuple[list[Any], list[int]]]


class Programs(TrainingPrograms, Protocol):
    """What a rank runs."""

    def evaluation(self, count: int) -> Program:
        """For a call with so many micro-batches."""
        ...


class Pipeline:
    """One rank of a pipeline.

    Args:
        stages: This rank's, by index.
        num_stages: Of the whole model.
        num_microbatches: Into which a batch is cut, or a function of the batch size.
        programs: What this rank runs.
        transport: Connects the ranks.
        random_states: Seed the streams of step and layers.
        sharing: What this rank has that others have, too.
        all_parameters: Of the whole model, un-owned ones included: which of them are frozen is
            part of what messages look like.
        split: Cuts a batch.
        num_evaluated: Into how many micro-batches the arguments of a call outside training are
            cut; as in training, if not given.
        shared_buffers: Buffers outside the layers; after a batch all ranks have the last rank's.
        evaluation_outputs: ``"all"``: every rank gets the output of a call that is no training;
            ``"last"``: only the last, the others leave the step.
        compares_versions: Whether an asynchronous schedule sends with each activation the version
            of the weights that it was computed with, to be compared with the plan.
        last_rank: The rank of the last stage; by default the last one.
        consensus: With other pipelines, if there are any.

    Attributes:
        before_call: Called before a pipelined call outside of training while micro-batches of
            training are in flight; must drain them.
    """

    before_call: Callable[[], Any]

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        num_microbatches: Callable[[Any], int],
        programs: Programs,
        transport: Transport,
        random_states: RandomStates,
        sharing: Sharing | None = None,
        all_parameters: Sequence[nn.Parameter] = (),
        split: Split = split_batch,
        num_evaluated: Callable[[Any], int] | None = None,
        shared_buffers: Sequence[Tensor] = (),
        evaluation_outputs: Literal["all", "last"] = "all",
        compares_versions: bool = False,
        last_rank: int | None = None,
        consensus: Consensus | None = None,
    ) -> None:
        self.stages = dict(stages)
        self._num_microbatches, self._split = num_microbatches, split
        last = transport.size - 1 if last_rank is None else last_rank
        self._link = Link(transport, last, all_parameters, consensus)
        self._training = TrainingRounds(
            self._link,
            self.stages,
            num_stages,
            programs,
            random_states,
            sharing or Sharing(),
            shared_buffers,
            compares_versions,
        )
        self._evaluation = Evaluation(
            self._link,
            self.stages,
            num_stages,
            num_evaluated or num_microbatches,
            programs.evaluation,
            random_states,
            evaluation_outputs,
        )
        self.before_call = self.drain
        self.is_last = self._link.is_last
        self.from_last, self.meet = self._link.from_last, self._link.meet
        self.continuous = programs.continuous

    @property
    def measured(self) -> Measurements:
        """What this rank did in training so far."""
        return self._training.measured

    @property
    def in_flight(self) -> bool:
        """Whether micro-batches are left in the pipeline, between batches."""
        return self._training.in_flight

    def record_to(self, recorder: Recorder | None) -> None:
        """Let a recorder keep what this rank does in training; ``None``: no more."""
        self._training.record_to(recorder)

    def apply_updates_by(self, apply_update: ApplyUpdate) -> None:
        """Set who makes the updates that are not left to the caller of :meth:`train`."""
        self._training.apply_update = apply_update

    def scale_losses_by(self, scale: Scale) -> None:
        """Scale each loss before its backward, not as it is reported (synchronous schedules).

        Gradients are scaled then; whoever steps divides them (16-bit floats need it).
        """
        self._training.scale_losses_by(scale)

    def stop_outside_training(self, asked: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Let calls outside training bring all ranks to a stop.

        Args:
            asked: Whether this rank was asked to.
            stop: Called on all ranks in the same call.
        """
        self._evaluation.asked, self._evaluation.stop = asked, stop

    def train(
        self,
        step: Step,
        batch: Any,
        batch_number: int,
        loader: str = "the training dataloader",
        attach: Callable[[], Any] = lambda: None,
        wishes: Wishes | None = None,
    ) -> TrainingResult:
        """Run one batch through the schedule.

        Gradients that the parameters have stay as they are; the batch's are in the result.

        Args:
            step: The user's; called for each micro-batch on each stage.
            batch: The same on all ranks.
            batch_number: Over the whole run; names the random streams.
            loader: Where the batch comes from, for errors.
            attach: Called on the last rank at the end; what it returns reaches all ranks.
            wishes: Of this rank; by default the pipeline is drained.

        Raises:
            PipelineError: The ranks disagree, or one is gone.
        """

        def cut(count: int) -> MicroBatches:
            return MicroBatches(batch_number, *self._split(batch, count))

        count = self._num_microbatches(batch)
        return self._training.train(
            step, cut, batch, batch_number, count, loader, attach, wishes or Wishes()
        )

    def drain(self) -> list[BatchResult]:
        """Empty the pipeline, if it is not empty. Collective; all updates are made here.

        Returns:
            The batches that came to an end.
        """
        return self._training.drain()

    def evaluating(
        self, activity: str, loader: str, batch_number: int
    ) -> AbstractContextManager[None]:
        """Inside, calls belong to a step: it is named in errors, and may be left (``"last"``).

        Args:
            activity: "validation", "test" or "prediction".
            loader: Where the batch comes from.
            batch_number: Of the batch in it.
        """
        return self._evaluation.step(activity, loader, batch_number)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the pipelined call."""
        if self._training.running:
            return self._training.call(args, kwargs)
        if self._training.in_flight:
            self.before_call()
        return self._evaluation.call(args, kwargs)
