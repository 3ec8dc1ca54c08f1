"""What each instruction takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
)

Cost: TypeAlias = float | Sequence[float]
"""One for all stages, or one by stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times, all in one unit of your choice.

    Attributes:
        forward: Of a forward.
        backward: Of a whole backward; about twice a forward.
        backward_weight: Of its part for the weights, where it is split. Default: half of it.
        communication: From a send until its message can be received: one for all boundaries
            between stages, or one by boundary (one less than stages). Stages on one rank hand
            over at no cost.
        reduce: Of the reduction of a stage's gradients over replicas.
        update: Of an update.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    backward_weight: Cost | None = None
    communication: Cost = 0.0
    reduce: Cost = 0.0
    update: Cost = 0.0

    def by_stage(self, num_stages: int) -> StageCosts:
        """Spread the costs over the stages.

        Raises:
            ValueError: If there is not one cost per stage, one is negative, or a part of a backward
                is larger than the whole.
        """

        def spread(name: str, length: int = num_stages) -> tuple[float, ...]:
            cost = getattr(self, name)
            costs = tuple(cost) if isinstance(cost, Sequence) else (cost,) * length
            if len(costs) != length or min(costs, default=0) < 0:
                raise ValueError(f"{name}={cost} must be one cost, or {length}, none below 0")
            return costs

        forward, backward = spread("forward"), spread("backward")
        if self.backward_weight is None:
            weight = tuple(cost / 2 for cost in backward)
        else:
            weight = spread("backward_weight")
        inputs = tuple(whole - part for whole, part in zip(backward, weight, strict=True))
        if min(inputs) < 0:
            raise ValueError(
                f"backward_weight={self.backward_weight} is a part of backward={self.backward}: "
                "it must not be larger"
            )
        return StageCosts(
            forward,
            inputs,
            weight,
            spread("communication", num_stages - 1),
            spread("reduce"),
            spread("update"),
        )


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs by stage; communication by boundary.

    Attributes:
        forward: Of a forward.
        backward_input: Of the part of a backward for the input.
        backward_weight: Of its part for the weights.
        communication: From a send until its message can be received.
        reduce: Of a reduction over replicas.
        update: Of an update.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    communication: tuple[float, ...]
    reduce: tuple[float, ...]
    update: tuple[float, ...]

    def of(self, instruction: Instruction) -> float:
        """Give the time for which an instruction keeps its rank busy; nothing for messages."""
        match instruction:
            case Forward(stage):
                return self.forward[stage]
            case Backward(stage):
                return self.backward_input[stage] + self.backward_weight[stage]
            case BackwardInput(stage):
                return self.backward_input[stage]
            case BackwardWeight(stage):
                return self.backward_weight[stage]
            case Reduce(stage):
                return self.reduce[stage]
            case Update(stage):
                return self.update[stage]
            case _:
                return 0.0

    def latency(self, instruction: Instruction) -> float:
        """Give the time from a send until its message can be received; nothing for others."""
        match instruction:
            case SendActivation(stage):
                return self.communication[stage]
            case SendGradient(stage):
                return self.communication[stage - 1]
            case _:
                return 0.0
