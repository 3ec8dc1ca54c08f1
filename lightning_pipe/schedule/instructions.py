"""What a rank can be told to do, and what each instruction has to wait for.

A plan is a list of these instructions per rank. They are plain data: the executor gives them their
meaning, and `dependencies` gives the only rule about their order. Lowering, validation and
simulation all read that one rule, so they cannot disagree about it.

The spelling of ``str(instruction)`` is the one of ``torch.distributed.pipelining``: ``2F0`` is the
forward of micro-batch 0 on stage 2, ``2RECV_B0`` the receipt of the gradient that ``2B0`` starts
from.

A backward is one instruction, or two: `BackwardInput`, for which other stages wait, and
`BackwardWeight`, for which nobody does, so that it can fill a bubble (Qi et al. 2024). A plan says
in ``split`` which micro-batches have it in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # programs.py is built from instructions, not the other way round
    from lightning_pipe.schedule.programs import Plan


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage's layers on one micro-batch.

    Roughly: ``output[stage, i] = layers[stage](input[stage, i])`` with the weights of ``version``.

    Two forwards of one stage and micro-batch are the same step whichever weights they read:
    `dependencies` names steps, so ``version`` takes no part in ``==``. Compare it explicitly.

    Attributes:
        stage: Stage whose layers run.
        microbatch: Micro-batch, numbered from 0 over the life of a fill.
        version: Number of updates that the weights to be read have seen since the fill began.
    """

    stage: int
    microbatch: int
    version: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Spell it as torch does, ``2F0``."""
        return f"{self.stage}F{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's full backward: gradients of its input and of its weights.

    Roughly: ``output[stage, i].backward(output_gradient[stage, i])``; gradients of weights add up.

    Attributes:
        stage: Stage whose backward runs.
        microbatch: Micro-batch, numbered from 0 over the life of a fill.
        version: Version of the weights to be read; takes no part in ``==`` (see `Forward`).
    """

    stage: int
    microbatch: int
    version: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Spell it as torch does, ``2B0``."""
        return f"{self.stage}B{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Run the part of a stage's backward that the stage before waits for.

    Roughly: ``grad(output[stage, i], input[stage, i], output_gradient[stage, i])``.

    Attributes:
        stage: Stage whose backward runs.
        microbatch: Micro-batch, numbered from 0 over the life of a fill.
        version: Version of the weights to be read; takes no part in ``==`` (see `Forward`).
    """

    stage: int
    microbatch: int
    version: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Spell it as torch does, ``2I0``."""
        return f"{self.stage}I{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Run the rest of a stage's backward: the gradients of its weights.

    Roughly: ``weights.grad += grad(output[stage, i], weights, output_gradient[stage, i])``.

    Attributes:
        stage: Stage whose backward runs.
        microbatch: Micro-batch, numbered from 0 over the life of a fill.
        version: Version of the weights to be read; takes no part in ``==`` (see `Forward`).
    """

    stage: int
    microbatch: int
    version: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Spell it as torch does, ``2W0``."""
        return f"{self.stage}W{self.microbatch}"


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send a stage's output to the rank of the next stage.

    Roughly: ``send(output[stage, i], to=peer)``; returns at once.

    Attributes:
        stage: Stage that computed the activation.
        microbatch: Micro-batch that it belongs to.
        peer: Rank of ``stage + 1``.
        version: Version of the weights that computed it; takes no part in ``==``.
    """

    stage: int
    microbatch: int
    peer: int
    version: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Spell it as torch does, ``2SEND_F0``."""
        return f"{self.stage}SEND_F{self.microbatch}"


@dataclass(frozen=True, slots=True)
class ReceiveActivation:
    """Wait for a stage's input from the rank of the previous stage.

    Roughly: ``input[stage, i] = receive(source=peer)``.

    Attributes:
        stage: Stage that will use the activation.
        microbatch: Micro-batch that it belongs to.
        peer: Rank of ``stage - 1``.
        version: Version of the sender's weights that computed it; takes no part in ``==``.
    """

    stage: int
    microbatch: int
    peer: int
    version: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Spell it as torch does, ``2RECV_F0``."""
        return f"{self.stage}RECV_F{self.microbatch}"


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the gradient of a stage's input to the rank of the previous stage.

    Roughly: ``send(input[stage, i].grad, to=peer)``; returns at once.

    Attributes:
        stage: Stage whose `Backward` or `BackwardInput` computed the gradient.
        microbatch: Micro-batch that it belongs to.
        peer: Rank of ``stage - 1``.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        """Spell it as torch does, ``2SEND_B0``."""
        return f"{self.stage}SEND_B{self.microbatch}"


@dataclass(frozen=True, slots=True)
class ReceiveGradient:
    """Wait for the gradient of a stage's output from the rank of the next stage.

    Roughly: ``output_gradient[stage, i] = receive(source=peer)``.

    Attributes:
        stage: Stage whose `Backward` or `BackwardInput` will use the gradient.
        microbatch: Micro-batch that it belongs to.
        peer: Rank of ``stage + 1``.
    """

    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        """Spell it as torch does, ``2RECV_B0``."""
        return f"{self.stage}RECV_B{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine a stage's weight gradients over its data-parallel replicas.

    Roughly: ``all_reduce(parameter.grad for parameter in layers[stage])``.

    Attributes:
        stage: Stage whose gradients are complete.
        update: Number of the update that they are for, from 0 over the life of a fill.
    """

    stage: int
    update: int = 0

    def __str__(self) -> str:
        """Spell it as torch does, ``2REDUCE_GRAD``; later ones of a fill with their number."""
        return f"{self.stage}REDUCE_GRAD{self.update or ''}"


@dataclass(frozen=True, slots=True)
class Update:
    """Apply a stage's gradients to its newest weights.

    Roughly: ``optimizer[stage].step()``, which makes version ``update + 1`` out of ``update``.

    Attributes:
        stage: Stage whose weights move on by one version.
        update: Number of the update, from 0 over the life of a fill.
        keeps: Oldest version that a later instruction of the stage reads, or the new version if
            none reads an older one: all below it can be dropped. Takes no part in ``==``.
    """

    stage: int
    update: int = 0
    keeps: int = field(default=1, compare=False)

    def __str__(self) -> str:
        """Spell it ``2UPDATE`` (torch has none); later ones of a fill with their number."""
        return f"{self.stage}UPDATE{self.update or ''}"


GradientSource: TypeAlias = Backward | BackwardInput
"""What computes the gradient of a stage's input."""
LastBackward: TypeAlias = Backward | BackwardWeight
"""What ends a micro-batch on a stage: its activations are kept until then."""
AnyBackward: TypeAlias = Backward | BackwardInput | BackwardWeight
Compute: TypeAlias = Forward | AnyBackward
Send: TypeAlias = SendActivation | SendGradient
Receive: TypeAlias = ReceiveActivation | ReceiveGradient
Communication: TypeAlias = Send | Receive
Instruction: TypeAlias = Compute | Communication | Reduce | Update


def dependencies(instruction: Instruction, plan: Plan) -> tuple[Instruction, ...]:
    """Name the instructions, on any rank, that must be complete before this one may start.

    Stages on one rank hand over locally; between ranks an activation or a gradient is sent and
    received. Only direct dependencies are named: what those wait for is left out.

    Args:
        instruction: Any instruction of the plan.
        plan: Gives the placement, which micro-batches make an update, and which backwards are
            split; its programs are not read.

    Returns:
        The dependencies; none for a forward on stage 0.
    """
    match instruction:
        case Forward(stage, i):
            return _input_of(stage, i, plan)
        case Backward(stage, i) | BackwardInput(stage, i):
            return Forward(stage, i), *_output_gradient_of(stage, i, plan)
        case BackwardWeight(stage, i):
            return (BackwardInput(stage, i),)
        case ReceiveActivation(stage, i):
            return (SendActivation(stage - 1, i, peer=plan.placement.rank_of[stage]),)
        case ReceiveGradient(stage, i):
            return (SendGradient(stage + 1, i, peer=plan.placement.rank_of[stage]),)
        case SendActivation(stage, i):
            return (Forward(stage, i),)
        case SendGradient(stage, i):
            return (gradient_source(stage, i, plan),)
        case Reduce(stage, update):
            return tuple(last_backward(stage, i, plan) for i in plan.microbatches_of(update))
        case Update(stage, update):
            return (Reduce(stage, update),)


def gradient_source(stage: int, i: int, plan: Plan) -> GradientSource:
    """Name what computes the gradient of a stage's input."""
    return BackwardInput(stage, i) if (stage, i) in plan.split else Backward(stage, i)


def last_backward(stage: int, i: int, plan: Plan) -> LastBackward:
    """Name what completes the gradients of a stage's weights."""
    return BackwardWeight(stage, i) if (stage, i) in plan.split else Backward(stage, i)


def _input_of(stage: int, i: int, plan: Plan) -> tuple[Instruction, ...]:
    """Name what brings a forward its input; the first stage takes it from the batch."""
    if stage == 0:
        return ()
    rank_of = plan.placement.rank_of
    peer = rank_of[stage - 1]
    local = peer == rank_of[stage]
    return (Forward(stage - 1, i) if local else ReceiveActivation(stage, i, peer),)


def _output_gradient_of(stage: int, i: int, plan: Plan) -> tuple[Instruction, ...]:
    """Name what brings a backward the gradient of its output; the last stage has its own loss."""
    rank_of = plan.placement.rank_of
    if stage == len(rank_of) - 1:
        return ()
    peer = rank_of[stage + 1]
    local = peer == rank_of[stage]
    return (gradient_source(stage + 1, i, plan) if local else ReceiveGradient(stage, i, peer),)


def requirements(plan: Plan) -> Mapping[Instruction, tuple[Instruction, ...]]:
    """List every instruction that a plan must hold, with what each of them waits for.

    That is all that follows from the plan's purpose by `dependencies`: a training plan makes all
    updates of every stage, a forward-only plan brings every micro-batch through the last stage.

    Args:
        plan: Gives placement, micro-batches and purpose; its programs are not read.

    Returns:
        The dependencies of each required instruction, read-only.
    """
    return _requirements(replace(plan, programs=()))


@lru_cache(maxsize=8)  # every pass over a plan asks, which was half of the time of make_plan
def _requirements(plan: Plan) -> Mapping[Instruction, tuple[Instruction, ...]]:
    """Collect the requirements of a plan without programs, which is cheap to look up."""
    stages = range(plan.placement.num_stages)
    goals: list[Instruction] = [Update(s, k) for s in stages for k in range(plan.num_updates)]
    if plan.forward_only:
        goals = [Forward(stages[-1], i) for i in range(plan.num_microbatches)]
    required: dict[Instruction, tuple[Instruction, ...]] = {}
    while goals:
        instruction = goals.pop()
        if instruction not in required:
            needed = required[instruction] = dependencies(instruction, plan)
            goals.extend(needed)
    return MappingProxyType(required)
