"""Training, round by round: one batch in, and what has come to an end out.

A synchronous schedule empties the pipeline in every round. An asynchronous one leaves micro-batches
in flight between rounds and *drains* only where it is told to; what lies between two drains is a
fill. All else is the same: a synchronous round is a fill of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pipe.runtime.asynchronous_work import AsynchronousWork
from lightning_pipe.runtime.endings import Ending, Endings
from lightning_pipe.runtime.executor import Executor, Measurements, Program
from lightning_pipe.runtime.handshake import Agreement, Announcement, checksum
from lightning_pipe.runtime.link import Link, stable_hash
from lightning_pipe.runtime.microbatch import find_batch_size, leaves_of
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.recording import AwaitBatch, AwaitEnding, Recorder
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.steps import BatchSteps, Losses, MicroBatches, Scale, Step
from lightning_pipe.runtime.synchronous_work import SynchronousWork
from lightning_pipe.runtime.training import (
    ApplyUpdate,
    BatchResult,
    Sharing,
    TrainingResult,
    TrainingWork,
    withheld,
)
from lightning_pipe.schedule.instructions import Update


class TrainingPrograms(Protocol):
    """What a rank runs in each round.

    Attributes:
        continuous: Whether the pipeline stays full between batches.
        per_microbatch: Whether each micro-batch makes an update, and not each batch.
    """

    continuous: bool
    per_microbatch: bool

    def fill_size(self, count: int) -> int:
        """Micro-batches of each batch but the last in a fill that begins with ``count``."""
        ...

    def drains(self, size: int, count: int) -> bool:
        """Whether a batch of ``count`` micro-batches must drain a fill of batches of ``size``."""
        ...

    def lag(self, size: int) -> int:
        """Rounds until the last rank's word on a batch has reached all without any waiting."""
        ...

    def round(self, index: int, size: int, count: int, drains: bool) -> Program:
        """The program of batch ``index`` of a fill."""
        ...

    def drain(self, index: int, size: int) -> Program:
        """What empties the pipeline after ``index`` batches."""
        ...


@dataclass
class Wishes:
    """What a rank would like of a round; rank 0 decides.

    Attributes:
        asked: Whether this rank was asked to stop training.
        decisions: Counts on rank 0: what only one clock must decide.
        last: Whether this rank's data ends with this batch.
        ends: Whether training pauses after this batch, for validation or for good, given what the
            ranks agree on. All ranks must say the same.
    """

    asked: bool = False
    decisions: tuple[bool, ...] = ()
    last: bool = False
    ends: Callable[[Agreement], bool] = lambda agreement: True


@dataclass
class _Fill:
    """What is in the pipeline.

    Attributes:
        size: Micro-batches in each batch but the last.
        batches: So far.
        microbatches: So far.
        signatures: Of micro-batches that may still be in flight.
        last_batch: Number of the latest batch, over the whole run.
    """

    size: int = 0
    batches: int = 0
    microbatches: int = 0
    signatures: dict[int, Hashable] = field(default_factory=dict)
    last_batch: int = 0


class TrainingRounds:
    """Runs the training of one rank.

    Args:
        link: To the other ranks.
        stages: This rank's, by index.
        num_stages: Of the whole model.
        programs: What to run.
        random_states: Seed the streams of step and layers.
        sharing: What other ranks have, too.
        shared_buffers: Buffers outside the layers; all ranks get the last rank's.
        compares_versions: See :class:`Executor`.

    Attributes:
        apply_update: Makes the updates that are not left to the caller of :meth:`train`.
        running: Whether a round is running, so that a pipelined call belongs to it.
    """

    apply_update: ApplyUpdate

    def __init__(
        self,
        link: Link,
        stages: Mapping[int, Stage],
        num_stages: int,
        programs: TrainingPrograms,
        random_states: RandomStates,
        sharing: Sharing,
        shared_buffers: Sequence[Tensor],
        compares_versions: bool,
    ) -> None:
        self._link, self._stages, self._num_stages = link, stages, num_stages
        self._programs, self._random = programs, random_states
        self._sharing, self._buffers = sharing, list(shared_buffers)
        self._executor = Executor(
            link.mailbox, num_stages, link.transport.rank, compares_versions and programs.continuous
        )
        self._executor.offload = next(iter(stages.values())).offload  # one for all of them
        self._endings = Endings(link.transport, link.last)
        self._work: SynchronousWork | AsynchronousWork
        if programs.continuous:
            (stage,) = stages.values()
            self._work = AsynchronousWork(
                stage, programs.per_microbatch, self._apply, sharing.replicas
            )
        else:
            self._work = SynchronousWork(
                stages, sharing.outside, sharing.reductions, sharing.shards
            )
        self._fill = _Fill()
        self._parameters: list[nn.Parameter] = []  # of this rank, as the fill finds them
        self.running = False
        self._steps: BatchSteps | None = None  # of the batch that a round began with
        self._asked = False  # to stop, some rank

    def scale_losses_by(self, scale: Scale) -> None:
        """See :meth:`Pipeline.scale_losses_by`."""
        assert isinstance(self._work, SynchronousWork)
        self._work.scale_loss = scale

    def record_to(self, recorder: Recorder | None) -> None:
        """See :meth:`Pipeline.record_to`."""
        self._executor.recorder = recorder

    @property
    def in_flight(self) -> bool:
        """Whether the pipeline holds micro-batches of earlier rounds."""
        return self._fill.batches > 0

    @property
    def measured(self) -> Measurements:
        """What this rank did so far."""
        work = self._work
        return replace(self._executor.measured, updates=work.updates, weights=work.weights())

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a pipelined call made in a round."""
        if self._steps is None or not self._steps.running:
            raise MisconfigurationException(
                "The pipelined module was called from a hook of an update while the pipeline is "
                "running. Call it in `training_step`, or after the batch."
            )
        return self._steps.call(args, kwargs)

    def train(
        self,
        step: Step,
        cut: Callable[[int], MicroBatches],
        whole: Any,
        number: int,
        count: int,
        loader: str,
        attach: Callable[[], Any],
        wishes: Wishes,
    ) -> TrainingResult:
        """Run one batch; see :meth:`Pipeline.train`.

        Args:
            step: The user's.
            cut: Cuts the batch into so many micro-batches.
            whole: The batch.
            number: Of the batch over the whole run.
            count: Of micro-batches, as far as this rank knows.
            loader: Where it comes from, for errors.
            attach: Called on the last rank at the end; what it returns reaches all ranks.
            wishes: Of this rank.
        """
        heard = self._hear()
        asked, samples = wishes.asked or self._link.asked, find_batch_size(whole) or 1
        stops = asked or self._asked
        mine = Agreement(asked, stops, wishes.decisions, wishes.last, count, samples)
        agreement = self._link.settle("training", loader, number, mine, heard)
        ends = wishes.ends(agreement)
        if heard is None:
            self._link.confirm(loader, number, ends)
        batch = cut(agreement.count)
        self._check_count(batch, agreement)
        signatures = self._link.signatures("training", batch.pieces)
        announcement = Announcement(
            "training",
            loader,
            batch.number,
            stable_hash(signatures),
            checksum(leaves_of(whole)),
            arguments=0,
            ends=ends,
            agreement=agreement,
        )
        steps = BatchSteps(
            step,
            batch,
            self._stages,
            self._random,
            replace(self._work.new_losses(), replica_share=agreement.share),
            self._link.agree(announcement, heard),
        )
        fill, count = self._fill, len(batch.pieces)
        if not fill.batches:
            self._parameters = self._own_parameters()
        fill.size = fill.size or self._programs.fill_size(count)
        drains = ends or agreement.stops or self._programs.drains(fill.size, count)
        program = self._programs.round(fill.batches, fill.size, count, drains)
        first = fill.microbatches
        fill.batches, fill.microbatches = fill.batches + 1, first + count
        fill.signatures |= enumerate(signatures, first)
        fill.last_batch = batch.number

        self._endings.expect()
        self._link.expect(program, fill.signatures, self._programs.continuous)
        last = program[-1] if isinstance(program[-1], Update) else None
        self._work.begin(steps, first, last)
        self._run(program, steps)
        if self._link.is_last:
            self._say_ending(steps, attach, agreement)
        self._executor.measured.batches += 1
        self._executor.measured.fills += first == 0
        finished = self._finish(drains)
        weight = finished[-1].weight if finished and not self._programs.continuous else 1.0
        work: TrainingWork = self._work
        # The ranks of a pipeline know when it is empty; other pipelines do not.
        told = drains and self._asked and not self._link.has_peers
        stops = agreement.stops or told
        return TrainingResult(
            finished, agreement.decisions, stops, work.due, work.gradients, weight
        )

    def _check_count(self, batch: MicroBatches, agreement: Agreement) -> None:
        """Refuse pieces of which other pipelines have another number."""
        if self._link.has_peers and len(batch.pieces) != agreement.count:
            raise MisconfigurationException(
                f"`split_batch` cut batch {batch.number} into {len(batch.pieces)} micro-batches; "
                f"expected {agreement.count}, as on the other replicas. Return as many pieces as "
                "it is asked for."
            )

    def drain(self) -> list[BatchResult]:
        """Empty the pipeline; all updates are made here. Collective.

        Returns:
            The batches that come to an end.
        """
        fill = self._fill
        if not fill.batches:
            return []
        self._link.meet("draining after", "training", fill.last_batch)
        program = self._programs.drain(fill.batches, fill.size)
        if self._executor.recorder is not None:
            self._executor.recorder.begin_round(fill.batches)
        self._work.begin(None, fill.microbatches, None)
        self._run(program, None)
        return self._finish(drained=True)

    def _hear(self) -> Announcement | None:
        """What the previous rank is about to do."""
        recorder = self._executor.recorder
        if recorder is None:
            return self._link.hear()
        recorder.begin_round(self._fill.batches)
        began = time.perf_counter()
        heard = self._link.hear()
        if heard is not None:
            recorder.add(AwaitBatch(), began, time.perf_counter())
        return heard

    def _hear_endings(self, leave: int) -> list[Ending]:
        """What the last rank says of the batches that have come to an end."""
        recorder, latest = self._executor.recorder, self._fill.batches - 1 - leave
        began = time.perf_counter()
        endings = self._endings.hear(leave)
        if recorder is not None and latest >= 0 and not self._link.is_last:
            recorder.add(AwaitEnding(latest), began, time.perf_counter())
        return endings

    def _apply(self, *update: Any) -> None:
        self.apply_update(*update)

    def _run(self, program: Program, steps: BatchSteps | None) -> None:
        self._steps, self.running = steps, True
        try:
            with self._random.restored(), withheld(self._parameters), torch.enable_grad():
                self._executor.run(program, self._fill.signatures, self._work)
        finally:
            self._steps, self.running = None, False

    def _say_ending(
        self, steps: BatchSteps, attach: Callable[[], Any], agreement: Agreement
    ) -> None:
        losses = steps.losses
        own, weight = self._own_weight(losses)
        ending = Ending(
            steps.batch.number,
            losses.mean.cpu(),
            weight,
            own,
            [buffer.cpu() for buffer in self._buffers],
            attach(),
            agreement.asked,
        )
        self._endings.say(ending)

    def _own_weight(self, losses: Losses) -> tuple[bool, float]:
        """Whether steps gave weights of their own, and the sum of these over all replicas."""
        own = losses.own_weights == {True}
        if self._programs.continuous:
            return own, 1.0
        replicas = self._sharing.replicas
        given = torch.tensor([float(own), losses.weight], dtype=torch.float64)
        replicas.sum(given).wait()
        how_many, weight = given.tolist()
        if how_many not in (0, replicas.size):
            raise MisconfigurationException(
                "training_step returned a weight on some replicas and none on others. Return "
                "{'loss': ..., 'weight': ...} always, or never."
            )
        return own, weight if own else 1.0

    def _finish(self, drained: bool) -> list[BatchResult]:
        """Take the last rank's word on what has come to an end."""
        fill, lag = self._fill, self._programs.lag(self._fill.size)
        endings = self._hear_endings(0 if drained else lag)
        if drained:
            self._fill = _Fill()
            self._work.end_fill()
        oldest = fill.microbatches - self._num_stages  # which may still be in flight
        for microbatch in [m for m in fill.signatures if m < oldest]:
            del fill.signatures[microbatch]
        self._link.mailbox.end_round(self._num_stages if self._programs.continuous else 0)
        results = []
        for ending in endings:
            self._asked |= ending.asked
            if not self._link.is_last:
                for mine, last in zip(self._buffers, ending.buffers, strict=True):
                    mine.copy_(last)
            loss = ending.loss.to(self._link.transport.device)
            results.append(
                BatchResult(
                    ending.number, loss, ending.weight, ending.own_weight, ending.attachment, lag
                )
            )
        return results

    def _own_parameters(self) -> list[nn.Parameter]:
        layers = (layer for stage in self._stages.values() for layer in stage.layers)
        return [*(p for layer in layers for p in layer.parameters()), *self._sharing.outside]
