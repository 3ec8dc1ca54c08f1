"""Run a program: the instructions that one round causes on one rank."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.mailbox import Key, Mailbox
from lightning_pipe.runtime.payload import Entrance, Spec, assemble, disassemble, flatten
from lightning_pipe.runtime.transport import Channel, Route
from lightning_pipe.schedule.instructions import (
    Backward,
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
    """What a round computes; the executor decides when, this decides what."""

    def forward(self, stage: int, microbatch: int, activation: Any) -> Any:
        """Run a stage. ``activation`` is what entered it (nothing on stage 0).

        Returns:
            The stage's output; on the last stage, in training, the loss to differentiate.
        """
        ...

    def reduce(self, stage: int) -> None:
        """Sum the gradients of a stage that several ranks share."""
        ...

    def update(self, stage: int) -> None:
        """Hand the gradients of a stage over to whoever updates its weights."""
        ...


@dataclass
class Measurements:
    """What one rank did, over the rounds since the last reset.

    Attributes:
        wall: Seconds from the first instruction of each round to its last.
        busy: Of these, seconds in Forward and Backward instructions.
        peak_in_flight: For each stage, most micro-batches whose backward was still due.
        rounds: How many.
    """

    wall: float = 0.0
    busy: float = 0.0
    peak_in_flight: Counter[int] = field(default_factory=Counter)
    rounds: int = 0


class Executor:
    """One rank's interpreter of instructions. It knows no schedule and no rank.

    Args:
        mailbox: Sends and receives.
        num_stages: Of the whole model.
        rank: Of the pipeline, for errors.
    """

    def __init__(self, mailbox: Mailbox, num_stages: int, rank: int) -> None:
        self._mailbox, self._rank = mailbox, rank
        self._last = num_stages - 1
        self.measured = Measurements()

    def run(self, program: Program, signatures: Sequence[Hashable], work: Work) -> None:
        """Run one round.

        Args:
            program: In order.
            signatures: For each micro-batch, what its messages' shapes are known by.
            work: Computes.

        Raises:
            Exception: Whatever the work raises, with a note that says where.
        """
        state = _State(self._mailbox, signatures, self._last)
        start, busy = time.perf_counter(), 0.0
        for instruction in program:
            began = time.perf_counter()
            try:
                state.execute(instruction, work)
            except Exception as error:
                _say_where(error, instruction, self._rank)
                raise
            if isinstance(instruction, (Forward, Backward)):
                busy += time.perf_counter() - began
        self.measured.wall += time.perf_counter() - start
        self.measured.busy += busy
        self.measured.rounds += 1
        for stage, peak in state.peak.items():
            self.measured.peak_in_flight[stage] = max(self.measured.peak_in_flight[stage], peak)


class _State:
    """What one round has computed and not used up yet."""

    def __init__(self, mailbox: Mailbox, signatures: Sequence[Hashable], last: int) -> None:
        self._mailbox, self._signatures, self._last = mailbox, signatures, last
        self._activations: dict[Key, tuple[Any, Spec]] = {}  # by the stage they enter
        self._gradients: dict[Key, list[Tensor | None]] = {}  # by the stage they come back to
        self._entrances: dict[Key, Entrance] = {}
        self._roots: dict[Key, Tensor | list[GradientEdge]] = {}  # of the graphs in flight
        self._in_flight: Counter[int] = Counter()
        self.peak: dict[int, int] = defaultdict(int)

    def execute(self, instruction: Instruction, work: Work) -> None:
        """Give an instruction its meaning."""
        match instruction:
            case ReceiveActivation(stage, microbatch, peer):
                self.receive_activation((stage, microbatch), peer)
            case Forward(stage, microbatch):
                self.forward((stage, microbatch), work)
            case SendActivation(stage, microbatch, peer):
                self.send_activation((stage + 1, microbatch), peer)
            case ReceiveGradient(stage, microbatch, peer):
                self.receive_gradient((stage, microbatch), peer)
            case Backward(stage, microbatch):
                self.backward((stage, microbatch))
            case SendGradient(stage, microbatch, peer):
                self.send_gradient((stage - 1, microbatch), peer)
            case Reduce(stage):
                work.reduce(stage)
            case Update(stage):
                work.update(stage)

    def forward(self, key: Key, work: Work) -> None:
        stage, microbatch = key
        activation = None
        if stage > 0:
            activation, entrance = _enter(*self._activations.pop(key))
            if entrance is not None:
                self._entrances[key] = entrance
        output = work.forward(stage, microbatch, activation)
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
            self._activations[stage + 1, microbatch] = output, spec
        self._in_flight[stage] += 1
        self.peak[stage] = max(self.peak[stage], self._in_flight[stage])

    def backward(self, key: Key) -> None:
        stage, microbatch = key
        root = self._roots.pop(key)
        if isinstance(root, Tensor):
            if root.requires_grad:
                torch.autograd.backward(root)
        else:
            gradients = self._gradients.pop(key)
            due = [(edge, g) for edge, g in zip(root, gradients, strict=True) if g is not None]
            if due:
                edges, given = zip(*due, strict=True)
                torch.autograd.backward(edges, given)
        self._in_flight[stage] -= 1
        if stage > 0:
            entrance = self._entrances.pop(key, None)
            gradients = list(entrance.gradients) if entrance is not None else []
            # Copies: autograd may have made the same memory a parameter's gradient, to which the
            # next micro-batch adds.
            copies = [None if gradient is None else gradient.clone() for gradient in gradients]
            self._gradients[stage - 1, microbatch] = copies

    def send_activation(self, key: Key, peer: int) -> None:
        activation, _ = self._activations.pop(key)
        self._send((Channel.ACTIVATION, peer), key, activation)

    def receive_activation(self, key: Key, peer: int) -> None:
        self._activations[key] = self._mailbox.receive((Channel.ACTIVATION, peer), key)

    def send_gradient(self, key: Key, peer: int) -> None:
        self._send((Channel.GRADIENT, peer), key, self._gradients.pop(key))

    def receive_gradient(self, key: Key, peer: int) -> None:
        self._gradients[key], spec = self._mailbox.receive((Channel.GRADIENT, peer), key)
        stage, microbatch = key
        if spec.tensors:  # nothing is sent where nothing needs a gradient
            self._mailbox.confirm((Channel.ACTIVATION, peer), (stage + 1, microbatch))

    def _send(self, route: Route, key: Key, tree: Any) -> None:
        self._mailbox.send(route, key, self._signatures[key[1]], tree)


def _enter(tree: Any, spec: Spec) -> tuple[Any, Entrance | None]:
    """The activation without its history, its tensors requiring gradients as at the sender."""
    if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in spec.tensors):
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
