"""One rank's end of a pipeline: trains batches, answers calls. It needs no Trainer."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pipe.runtime.call import StageOutput
from lightning_pipe.runtime.evaluation import EvaluationRound
from lightning_pipe.runtime.executor import Executor, Measurements, Program
from lightning_pipe.runtime.handshake import Announcement, Handshake, checksum, compare
from lightning_pipe.runtime.mailbox import Key, Mailbox
from lightning_pipe.runtime.microbatch import join_outputs, leaves_of, split_batch
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.training import Step, TrainingResult, TrainingRound
from lightning_pipe.runtime.transport import Channel, PendingObject, Route, Transport, send_object
from lightning_pipe.schedule.instructions import ReceiveActivation, ReceiveGradient

Split = Callable[[Any, int], tuple[list[Any], list[int]]]
PlanFor = Callable[[Literal["training", "evaluation"], int], Program]


@dataclass
class _Prepared:
    """A rank's program, and the messages it receives, in order, by route."""

    program: Program
    receives: dict[Route, list[Key]]


class Pipeline:
    """One rank of a pipeline.

    Args:
        stages: This rank's, by index.
        num_stages: Of the whole model.
        num_microbatches: Into which a batch is cut, or a function of the batch size.
        plan_for: Gives this rank's program for training or evaluating so many micro-batches.
        transport: Connects the ranks; the last stage lives on the last rank.
        random_states: Seed the streams of step and layers.
        shared: Parameters outside the layers; on every rank, equal.
        all_parameters: Of the whole model, un-owned ones included: which of them are frozen is
            part of what messages look like.
        split: Cuts a batch.
        num_evaluated: Into how many micro-batches the arguments of a call outside training are
            cut; as in training, if not given.
        shared_buffers: Buffers outside the layers; after a batch all ranks have the last rank's.
        evaluation_outputs: ``"all"``: every rank gets the output of a call that is no training;
            ``"last"``: only the last, the others leave the step.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        num_microbatches: Callable[[Any], int],
        plan_for: PlanFor,
        transport: Transport,
        random_states: RandomStates,
        shared: Sequence[nn.Parameter] = (),
        all_parameters: Sequence[nn.Parameter] = (),
        split: Split = split_batch,
        num_evaluated: Callable[[Any], int] | None = None,
        shared_buffers: Sequence[Tensor] = (),
        evaluation_outputs: Literal["all", "last"] = "all",
    ) -> None:
        self.stages, self.num_stages = dict(stages), num_stages
        self._num_microbatches, self._plan_for, self._split = num_microbatches, plan_for, split
        self._transport, self._random = transport, random_states
        self._shared, self._parameters = list(shared), list(all_parameters)
        self._num_evaluated = num_evaluated or num_microbatches
        self._buffers = list(shared_buffers)
        self._outputs = evaluation_outputs
        self._mailbox = Mailbox(transport)
        self._handshake = Handshake(transport)
        self._trainer = Executor(self._mailbox, num_stages, transport.rank)
        self._evaluator = Executor(self._mailbox, num_stages, transport.rank)
        self._prepared: dict[tuple[str, int], _Prepared] = {}
        self._round: TrainingRound | None = None
        self._step_of: tuple[str, str, int] | None = None  # activity, loader, batch
        self._calls = self._steps = 0  # outside training, for their random streams
        self._calls_in_step = 0

    @property
    def measured(self) -> Measurements:
        """What this rank did in training so far."""
        return self._trainer.measured

    def train(
        self,
        step: Step,
        batch: Any,
        batch_number: int,
        loader: str = "the training dataloader",
        attach: Callable[[], Any] = lambda: None,
    ) -> TrainingResult:
        """Run one batch through the schedule.

        Gradients that the parameters have stay as they are; the batch's are in the result.

        Args:
            step: The user's; called for each micro-batch on each stage.
            batch: The same on all ranks.
            batch_number: Over the whole run; names the random streams.
            loader: Where the batch comes from, for errors.
            attach: Called on the last rank at the end; what it returns reaches all ranks.

        Raises:
            PipelineError: The ranks disagree, or one is gone.
        """
        microbatches, sizes = self._split(batch, self._num_microbatches(batch))
        signatures = self._signatures("training", microbatches)
        prepared = self._prepare("training", len(microbatches))
        announcement = Announcement(
            "training", loader, batch_number, _hash(signatures), checksum(leaves_of(batch)), 0
        )
        heard = self._handshake.hear()
        if heard is not None:
            compare(announcement, heard, self._transport.rank, arguments=False)

        def on_first_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._agree(announcement, heard, args, kwargs)

        work = TrainingRound(
            step, microbatches, sizes, self.stages, batch_number, self._random, self._shared,
            self._transport, on_first_call,
        )  # fmt: skip
        ending = self._expect_ending()
        self._expect(prepared, signatures)
        self._round = work
        try:
            with self._random.restored(), _withheld(self._own_parameters()), torch.enable_grad():
                self._trainer.run(prepared.program, signatures, work)
        finally:
            self._round = None
        result = self._finish(work, ending, attach)
        self._mailbox.end_round()
        return result

    @contextmanager
    def evaluating(self, activity: str, loader: str, batch_number: int) -> Iterator[None]:
        """Inside, calls belong to a step: it is named in errors, and may be left (``"last"``).

        Args:
            activity: "validation", "test" or "prediction".
            loader: Where the batch comes from.
            batch_number: Of the batch in it.
        """
        self._step_of = activity, loader, batch_number
        self._steps += 1
        self._calls_in_step = 0
        with self._random.restored():
            self._random.seed_step(-self._steps, 0)
            try:
                yield
            except StageOutput:
                pass
            finally:
                self._step_of = None

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self._transport.rank == self._transport.size - 1

    def from_last(self, value: Any) -> Any:
        """Give the last rank's value to all; the others' is ignored. Collective."""
        last = self._transport.size - 1
        if not self.is_last:
            return PendingObject(self._transport, Channel.CONTROL, last).wait()
        for peer in range(last):
            send_object(self._transport, Channel.CONTROL, peer, value)
        return value

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the pipelined call."""
        if self._round is not None:
            return self._round.call(args, kwargs)
        with self._random.restored(), torch.no_grad():
            return self._evaluate(args, kwargs)

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        self._calls_in_step += 1
        if self._leaves_steps and self._calls_in_step > 1:
            raise MisconfigurationException(
                "The step called the pipelined module twice, but with evaluation_outputs='last' "
                "the other ranks leave it at the first call. Use evaluation_outputs='all'."
            )
        whole = (args, kwargs)
        pieces, sizes = split_batch(whole, self._num_evaluated(whole))
        signatures = self._signatures("evaluation", pieces)
        prepared = self._prepare("evaluation", len(pieces))
        activity, loader, number = self._step_of or ("a call outside the steps", "it", self._calls)
        arguments = checksum(leaves_of(whole))
        mine = Announcement(activity, loader, number, _hash(signatures), arguments, arguments)
        heard = self._handshake.hear()
        if heard is not None:
            compare(mine, heard, self._transport.rank, arguments=True)
        self._handshake.say(mine)
        self._expect(prepared, signatures)
        work = EvaluationRound(pieces, self.stages, -self._calls)
        self._evaluator.run(prepared.program, signatures, work)
        self._mailbox.end_round()
        return self._share_output(work.outputs, sizes)

    @property
    def _leaves_steps(self) -> bool:
        """Whether all ranks but the last leave the running step at its call."""
        return self._outputs == "last" and self._step_of is not None

    def _share_output(self, outputs: list[Any], sizes: list[int]) -> Any:
        """The output of the whole batch, on all ranks or on the last one."""
        last = self._transport.size - 1
        output = join_outputs(outputs, sizes) if self.is_last else None
        if self._leaves_steps:
            if not self.is_last:
                raise StageOutput(None)
            return output
        key = self.num_stages, 0  # what no stage gets
        if not self.is_last:
            route = (Channel.ACTIVATION, last)
            self._mailbox.expect(route, [(key, None)])
            return self._mailbox.receive(route, key)[0]
        for peer in range(last):
            self._mailbox.send((Channel.ACTIVATION, peer), key, None, output)
        return output

    def _agree(
        self,
        announcement: Announcement,
        heard: Announcement | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Compare the arguments of a round's first call, and tell the next rank."""
        arguments = checksum(leaves_of((args, kwargs)))
        mine = Announcement(**{**vars(announcement), "arguments": arguments})
        if heard is not None:
            compare(mine, heard, self._transport.rank, arguments=True)
        self._handshake.say(mine)

    def _expect_ending(self) -> PendingObject | None:
        last = self._transport.size - 1
        if self._transport.rank == last:
            return None
        return PendingObject(self._transport, Channel.CONTROL, last)

    def _finish(
        self, work: TrainingRound, ending: PendingObject | None, attach: Callable[[], Any]
    ) -> TrainingResult:
        """Bring what only the last rank knows to all."""
        if ending is None:
            losses = work.losses
            assert isinstance(losses.total, Tensor)
            loss = losses.total / losses.weight if losses.weight else losses.total * float("nan")
            own = losses.own_weights == {True}
            weight = losses.weight if own else 1.0
            buffers = [buffer.cpu() for buffer in self._buffers]
            message = self.from_last((loss.detach().cpu(), weight, own, buffers, attach()))
        else:
            message = ending.wait()
        loss, weight, own, buffers, attachment = message
        if ending is not None:
            for mine, last in zip(self._buffers, buffers, strict=True):
                mine.copy_(last)
        loss = loss.to(self._transport.device)
        return TrainingResult(loss, weight, own, attachment, work.gradients)

    def _own_parameters(self) -> Iterable[nn.Parameter]:
        for stage in self.stages.values():
            for layer in stage.layers:
                yield from layer.parameters()
        yield from self._shared

    def _signatures(self, kind: str, microbatches: Sequence[Any]) -> list[Hashable]:
        autocast = kind == "evaluation" and torch.is_autocast_enabled(self._transport.device.type)
        trained = _hash([parameter.requires_grad for parameter in self._parameters])
        return [(kind, autocast, trained, _shapes(microbatch)) for microbatch in microbatches]

    def _prepare(self, kind: Literal["training", "evaluation"], count: int) -> _Prepared:
        prepared = self._prepared.get((kind, count))
        if prepared is None:
            program = self._plan_for(kind, count)
            receives: dict[Route, list[Key]] = defaultdict(list)
            for instruction in program:
                match instruction:
                    case ReceiveActivation(stage, microbatch, peer):
                        receives[Channel.ACTIVATION, peer].append((stage, microbatch))
                    case ReceiveGradient(stage, microbatch, peer):
                        receives[Channel.GRADIENT, peer].append((stage, microbatch))
            prepared = self._prepared[kind, count] = _Prepared(program, dict(receives))
        return prepared

    def _expect(self, prepared: _Prepared, signatures: Sequence[Hashable]) -> None:
        for route, keys in prepared.receives.items():
            self._mailbox.expect(route, [(key, signatures[key[1]]) for key in keys])


@contextmanager
def _withheld(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set the gradients of parameters aside; inside, they have none."""
    aside = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient


def _shapes(microbatch: Any) -> Hashable:
    return tuple(
        (tuple(leaf.shape), leaf.dtype)
        for leaf in leaves_of(microbatch)
        if isinstance(leaf, Tensor)
    )


def _hash(value: Any) -> int:
    """A hash that is the same in every process."""
    return zlib.crc32(repr(value).encode())
