"""Run programs: the instructions that each round causes on one rank.

What is in flight at the end of a round (with an asynchronous schedule; a synchronous one leaves
nothing) stays for the rounds to come.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipe.runtime.activation_offload import ActivationOffload
from lightning_pipe.runtime.errors import PeerLostError, PipelineError
from lightning_pipe.runtime.mailbox import Key, Mailbox
from lightning_pipe.runtime.payload import Entrance, Spec, assemble, disassemble, flatten
from lightning_pipe.runtime.recording import AwaitReduction, Recorder
from lightning_pipe.runtime.split_backward import SplitBackward, Start, run_backward
from lightning_pipe.runtime.transport import Channel, Route
from lightning_pipe.schedule.instructions import (
    AnyBackward,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
)

Program = Sequence[Instruction]


class Work(Protocol):
    """What a round computes; the executor decides when, this decides what.

    Attributes:
        summed_at: When the latest update had the sums that it waits for first; ``None`` if none.
    """

    summed_at: float | None

    def forward(self, step: Forward, activation: Any) -> Any:
        """Run a stage. ``activation`` is what entered it (nothing on stage 0).

        Returns:
            The stage's output; on the last stage, in training, the loss to differentiate.
        """
        ...

    def backward(self, step: AnyBackward, run: Callable[[], None]) -> None:
        """Run a stage's backward, or a part of it, which is ``run``."""
        ...

    def reduce(self, step: Reduce) -> None:
        """Sum the gradients of a stage that several ranks share."""
        ...

    def update(self, step: Update) -> None:
        """Update the weights of a stage, or hand its gradients over to whoever does."""
        ...


@dataclass
class Measurements:
    """What one rank did, over the rounds since the last reset.

    Attributes:
        wall: Seconds from the first instruction of each round to its last.
        busy: Of these, seconds in forwards and backwards.
        peak_in_flight: For each stage, most micro-batches whose backward was still due.
        rounds: How many.
        batches: How many batches began in them.
        fills: How often the pipeline was filled.
        updates: For each stage.
        weights: For each stage, most versions of its weights held at a time, and most bytes.
        backwards_skipped: For each stage, backwards with nothing to do, as all is frozen up to it.
        gradient_bytes_saved: For each stage, bytes of gradients not sent to the stage before it,
            where nothing needs them.
    """

    wall: float = 0.0
    busy: float = 0.0
    peak_in_flight: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    batches: int = 0
    fills: int = 0
    updates: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    backwards_skipped: Counter[int] = field(default_factory=Counter)
    gradient_bytes_saved: Counter[int] = field(default_factory=Counter)


class Executor:
    """One rank's interpreter of instructions. It knows no schedule and no rank.

    Args:
        mailbox: Sends and receives.
        num_stages: Of the whole model.
        rank: Of the pipeline, for errors.
        compares_versions: Send with each activation the version of the weights that it was
            computed with, and compare it with the plan.

    Attributes:
        measured: What it did so far.
        recorder: Is told of every instruction, if there is one.
        offload: Is told what will be computed, if there is one.
    """

    recorder: Recorder | None = None
    offload: ActivationOffload | None = None

    def __init__(
        self, mailbox: Mailbox, num_stages: int, rank: int, compares_versions: bool = False
    ) -> None:
        self._rank = rank
        self.measured = Measurements()
        self._state = _State(mailbox, num_stages - 1, compares_versions, self.measured)

    def run(self, program: Program, signatures: Mapping[int, Hashable], work: Work) -> None:
        """Run one round.

        Args:
            program: In order.
            signatures: For each micro-batch, what its messages' shapes are known by.
            work: Computes.

        Raises:
            Exception: Whatever the work raises, with a note that says where.
        """
        state, measured, recorder = self._state, self.measured, self.recorder
        state.signatures = signatures
        computes = [instruction for instruction in program if isinstance(instruction, Compute)]
        pairs = zip_longest(computes, computes[1:])
        start, busy = time.perf_counter(), 0.0
        for instruction in program:
            began = time.perf_counter()
            try:
                if self.offload is not None and isinstance(instruction, Compute):
                    self.offload.look_ahead(*next(pairs))
                state.execute(instruction, work)
            except Exception as error:
                _say_where(error, instruction, self._rank)
                raise
            ended = time.perf_counter()
            if isinstance(instruction, Compute):
                busy += ended - began
            if recorder is not None:
                if isinstance(instruction, Update) and work.summed_at is not None:
                    wait = AwaitReduction(instruction.stage, instruction.update)
                    recorder.add(wait, began, work.summed_at)
                    began = work.summed_at
                recorder.add(instruction, began, ended)
        measured.wall += time.perf_counter() - start
        measured.busy += busy
        measured.rounds += 1
        measured.peak_in_flight |= state.peak  # the larger of the two


class _State:
    """What was computed or received, and is not used up yet."""

    def __init__(
        self, mailbox: Mailbox, last: int, compares_versions: bool, measured: Measurements
    ) -> None:
        self._mailbox, self._last, self._compares_versions = mailbox, last, compares_versions
        self._measured = measured
        self.signatures: Mapping[int, Hashable] = {}
        self._activations: dict[Key, tuple[Any, Spec]] = {}  # by the stage they enter
        self._gradients: dict[Key, list[Tensor | None]] = {}  # by the stage they come back to
        self._entrances: dict[Key, Entrance] = {}
        self._roots: dict[Key, Tensor | list[GradientEdge]] = {}  # of the graphs in flight
        self._splits: dict[Key, SplitBackward] = {}  # whose second part is due
        self._in_flight: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()

    def execute(self, instruction: Instruction, work: Work) -> None:  # noqa: C901 (a case each)
        """Give an instruction its meaning."""
        match instruction:
            case ReceiveActivation():
                self.receive_activation(instruction)
            case Forward():
                self.forward(instruction, work)
            case SendActivation():
                self.send_activation(instruction)
            case ReceiveGradient():
                self.receive_gradient(instruction)
            case Backward():
                self.backward(instruction, work)
            case BackwardInput():
                self.backward_input(instruction, work)
            case BackwardWeight():
                self.backward_weight(instruction, work)
            case SendGradient():
                self.send_gradient(instruction)
            case Reduce():
                work.reduce(instruction)
            case Update():
                work.update(instruction)

    def forward(self, step: Forward, work: Work) -> None:
        stage, microbatch = key = step.stage, step.microbatch
        activation = None
        if stage > 0:
            activation, entrance = _enter(*self._activations.pop(key))
            if entrance is not None:
                self._entrances[key] = entrance
        output = work.forward(step, activation)
        if stage == self._last:
            if torch.is_grad_enabled():
                self._roots[key] = output
        else:
            leaves, spec = disassemble(output)
            # Edges, not tensors: what was sent need not be kept.
            self._roots[key] = [
                get_gradient_edge(leaf)
                for leaf in leaves
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            if self._compares_versions:
                output = output, step.version
            self._activations[stage + 1, microbatch] = output, spec
        self._in_flight[stage] += 1
        self.peak[stage] = max(self.peak[stage], self._in_flight[stage])

    def backward(self, step: Backward, work: Work) -> None:
        key = step.stage, step.microbatch
        starts = self._starts(key)
        work.backward(step, lambda: run_backward(starts))
        self._leave(key, self._entrances.pop(key, None))
        self._in_flight[step.stage] -= 1

    def backward_input(self, step: BackwardInput, work: Work) -> None:
        key = step.stage, step.microbatch
        entrance = self._entrances.pop(key, None)
        split = self._splits[key] = SplitBackward(self._starts(key), entrance)
        work.backward(step, split.input)
        self._leave(key, entrance)

    def backward_weight(self, step: BackwardWeight, work: Work) -> None:
        work.backward(step, self._splits.pop((step.stage, step.microbatch)).weight)
        self._in_flight[step.stage] -= 1

    def _starts(self, key: Key) -> list[Start]:
        """Where a backward starts: at the loss, or at a stage's outputs, given their gradients."""
        root = self._roots.pop(key)
        if isinstance(root, Tensor):
            return [(get_gradient_edge(root), torch.ones_like(root))] if root.requires_grad else []
        if not root:
            self._measured.backwards_skipped[key[0]] += 1
        gradients = self._gradients.pop(key)
        return [(edge, g) for edge, g in zip(root, gradients, strict=True) if g is not None]

    def _leave(self, key: Key, entrance: Entrance | None) -> None:
        """Keep the gradients of what entered a stage for the stage before."""
        stage, microbatch = key
        if stage > 0:
            gradients = entrance.gradients if entrance is not None else ()
            # Copies: autograd may have made the same memory a parameter's gradient, to which the
            # next micro-batch adds.
            copies = [None if gradient is None else gradient.clone() for gradient in gradients]
            self._gradients[stage - 1, microbatch] = copies

    def send_activation(self, step: SendActivation) -> None:
        key = step.stage + 1, step.microbatch
        activation, _ = self._activations.pop(key)
        self._send((Channel.ACTIVATION, step.peer), key, activation)

    def receive_activation(self, step: ReceiveActivation) -> None:
        key = step.stage, step.microbatch
        activation, spec = self._mailbox.receive((Channel.ACTIVATION, step.peer), key)
        if self._compares_versions:
            activation, version = activation
            spec = Spec(disassemble(activation)[1].structure, spec.leaves[:-1])
            if version != step.version:
                raise PipelineError(
                    f"The activation was computed with version {version} of the weights of stage "
                    f"{step.stage - 1}, but the plan says {step.version}. Please report it."
                )
        if torch.is_grad_enabled() and not spec.requires_grad:
            self._measured.gradient_bytes_saved[key[0]] += spec.floating_bytes
        self._activations[key] = activation, spec

    def send_gradient(self, step: SendGradient) -> None:
        key = step.stage - 1, step.microbatch
        self._send((Channel.GRADIENT, step.peer), key, self._gradients.pop(key))

    def receive_gradient(self, step: ReceiveGradient) -> None:
        stage, microbatch = key = step.stage, step.microbatch
        self._gradients[key], spec = self._mailbox.receive((Channel.GRADIENT, step.peer), key)
        if spec.tensors:  # nothing is sent where nothing needs a gradient
            self._mailbox.confirm((Channel.ACTIVATION, step.peer), (stage + 1, microbatch))

    def _send(self, route: Route, key: Key, tree: Any) -> None:
        self._mailbox.send(route, key, self.signatures[key[1]], tree)


def _enter(tree: Any, spec: Spec) -> tuple[Any, Entrance | None]:
    """The activation without its history, its tensors requiring gradients as at the sender."""
    if not torch.is_grad_enabled() or not spec.requires_grad:
        return tree, None
    leaves = flatten(tree)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    needed = [leaf.requires_grad for leaf in spec.tensors]
    entrance = Entrance([t for t, need in zip(tensors, needed, strict=True) if need])
    entered = iter(entrance.enter())
    tensors = [next(entered) if need else t for t, need in zip(tensors, needed, strict=True)]
    constants = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, Tensor)]
    return assemble(list(tensors), constants, spec), entrance


def _say_where(error: Exception, instruction: Instruction, rank: int) -> None:
    microbatch = getattr(instruction, "microbatch", None)
    where = f"pipeline rank {rank}, stage {instruction.stage}"
    where += "" if microbatch is None else f", micro-batch {microbatch}"
    doing = "waiting in" if isinstance(error, PeerLostError) else "in"
    error.add_note(f"lightning_pipe: {where}, {doing} {type(instruction).__name__}")
