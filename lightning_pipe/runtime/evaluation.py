"""Pipelined calls without gradients: validation, test, prediction, ``model(x)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_pipe.runtime.call import StageOutput
from lightning_pipe.runtime.distributed_tensors import whole
from lightning_pipe.runtime.executor import Executor, Program
from lightning_pipe.runtime.handshake import Agreement, Announcement, checksum, passed_on
from lightning_pipe.runtime.link import Link, stable_hash
from lightning_pipe.runtime.microbatch import join_outputs, leaves_of, split_batch
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.transport import Channel
from lightning_pipe.schedule.instructions import AnyBackward, Forward, Reduce, Update


class EvaluationRound:
    """What the executor computes in one pipelined call on one rank.

    Args:
        pieces: For each micro-batch, the call's ``(args, kwargs)``.
        stages: This rank's.
        batch: Names the random streams, with the number of the micro-batch.
    """

    summed_at: float | None = None

    def __init__(
        self,
        pieces: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        stages: Mapping[int, Stage],
        batch: int,
    ) -> None:
        self._pieces, self._stages, self._batch = pieces, stages, batch
        self.outputs: list[Any] = []  # of the micro-batches, on the rank of the last stage

    def forward(self, step: Forward, activation: Any) -> Any:
        """See :class:`~lightning_pipe.runtime.executor.Work`."""
        here = self._stages[step.stage]
        args, kwargs = self._pieces[step.microbatch]
        inputs = args if here.is_first else (activation,)
        last = step.microbatch + 1 == len(self._pieces)
        output = here.forward(inputs, kwargs, self._batch, step.microbatch, ends_batch=last)
        if here.is_last:
            self.outputs.append(output)
        return output

    def backward(self, step: AnyBackward, run: Callable[[], None]) -> None:
        """There are no gradients."""

    def reduce(self, step: Reduce) -> None:
        """There are no gradients."""

    def update(self, step: Update) -> None:
        """There are no gradients."""


class Evaluation:
    """Answers the pipelined calls of one rank that are no training.

    Args:
        link: To the other ranks.
        stages: This rank's, by index.
        num_stages: Of the whole model.
        num_microbatches: Into how many the arguments of a call are cut.
        program: Gives what this rank runs for so many micro-batches.
        random_states: Seed the streams of steps and layers.
        outputs: ``"all"``: every rank gets the output of a call; ``"last"``: only the last, the
            others leave the step.

    Attributes:
        asked: Whether this rank was asked to stop.
        stop: Called on all ranks in the same call once one was asked; rank 0, where the others
            leave the step.
    """

    asked: Callable[[], bool]
    stop: Callable[[], None]

    def __init__(
        self,
        link: Link,
        stages: Mapping[int, Stage],
        num_stages: int,
        num_microbatches: Callable[[Any], int],
        program: Callable[[int], Program],
        random_states: RandomStates,
        outputs: Literal["all", "last"],
    ) -> None:
        self._link, self._stages, self._num_stages = link, stages, num_stages
        self._num_microbatches, self._program = num_microbatches, program
        self._random, self._outputs = random_states, outputs
        self.executor = Executor(link.mailbox, num_stages, link.transport.rank)
        self._step_of: tuple[str, str, int] | None = None  # activity, loader, batch
        self._calls = self._steps = 0  # for their random streams
        self._calls_in_step = 0
        self.asked, self.stop = bool, lambda: None  # nobody is ever asked

    @contextmanager
    def step(self, activity: str, loader: str, batch_number: int) -> Iterator[None]:
        """See :meth:`Pipeline.evaluating`."""
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

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call."""
        with self._random.restored(), torch.no_grad():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        self._calls_in_step += 1
        if self._leaves_steps and self._calls_in_step > 1:
            raise MisconfigurationException(
                "The step called the pipelined module twice, but with evaluation_outputs='last' "
                "the other ranks leave it at the first call. Use evaluation_outputs='all'."
            )
        arguments = (args, kwargs)
        pieces, sizes = split_batch(arguments, self._num_microbatches(arguments))
        signatures = self._link.signatures("evaluation", pieces)
        activity, loader, number = self._step_of or ("a call outside the steps", "it", self._calls)
        data = checksum(leaves_of(arguments))
        heard = self._link.hear()
        asked = self.asked() or self._link.asked
        agreement = passed_on(Agreement(asked, stops=asked), heard)
        shapes = stable_hash(signatures)
        mine = Announcement(activity, loader, number, shapes, data, 0, agreement=agreement)
        self._link.agree(mine, heard)(args, kwargs)
        program = self._program(len(pieces))
        by_microbatch = dict(enumerate(signatures))
        self._link.expect(program, by_microbatch)
        work = EvaluationRound(pieces, self._stages, -self._calls)
        self.executor.run(program, by_microbatch, work)
        self._link.mailbox.end_round()
        return self._share_output(work.outputs, sizes, agreement)

    @property
    def _leaves_steps(self) -> bool:
        """Whether all ranks but the last leave the running step at its call."""
        return self._outputs == "last" and self._step_of is not None

    def _share_output(self, outputs: list[Any], sizes: list[int], agreement: Agreement) -> Any:
        """The output of the whole batch, on all ranks or on the last one."""
        link = self._link
        output = join_outputs(outputs, sizes) if link.is_last else None
        output = pytree.tree_map_only(Tensor, whole, output)  # what a model ends in may be cut
        if self._leaves_steps:
            if agreement.stops:
                self.stop()
            if not link.is_last:
                raise StageOutput(None)
            return output
        key = self._num_stages, 0  # what no stage gets
        if link.is_last:
            # The structure of a message travels anyway; a leaf would be a message of its own.
            asked: tuple[Any, ...] = ((),) if agreement.asked else ()
            others = (r for r in range(link.transport.size) if r != link.last)
            for peer in others:
                link.mailbox.send((Channel.ACTIVATION, peer), key, None, (output, asked))
        else:
            route = (Channel.ACTIVATION, link.last)
            link.mailbox.expect(route, [(key, None)])
            output, asked = link.mailbox.receive(route, key)[0]
        if asked:
            self.stop()
        return output
