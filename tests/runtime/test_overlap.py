"""Gradients are summed while the rank still has backwards to do, and waited for only after them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.assembly import Assembly
from lightning_pipe.runtime.groups import Alone, Group, Pending
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.transport import LocalTransport

from .harness import Layout, Module, on_ranks

COUNT, WIDTH = 4, 3
FEW = 2  # numbers that are no gradients: which ones there are, and weights of losses
WAIT_S = 10.0


class Replicas(Alone):
    """Two of a rank: this one, and one with the same gradients. Tells when gradients are summed."""

    size = 2

    def __init__(self, told: list[str], begun: threading.Event) -> None:
        self._told, self._begun = told, begun

    def sum(self, tensor: Tensor) -> Pending:
        told = self._told if tensor.numel() > FEW else []
        told.append("begin")
        if told is self._told:
            self._begun.set()
        return _Sum(tensor, told)


class _Sum:
    def __init__(self, tensor: Tensor, told: list[str]) -> None:
        self._tensor, self._told = tensor, told

    def wait(self) -> None:
        self._told.append("wait")
        self._tensor.mul_(2)


class Groups:
    """All ranks of the pipeline have a second replica."""

    def __init__(self, rank: int, replicas: Group) -> None:
        self.tensor: Group = Alone()
        self._rank, self._replicas = rank, replicas

    def over(self, pipeline_ranks: Sequence[int]) -> Group:
        return self._replicas if list(pipeline_ranks) == [self._rank] else Alone()


def course_of_a_round(layout: Layout, first_waits: bool = False) -> list[list[str]]:
    """By rank, its backwards ("3": of stage 3) and what happens to sums, in order.

    Args:
        layout: Of two ranks.
        first_waits: In its last backward, rank 0 waits for the other one to begin a sum.
    """
    num_stages = layout.num_ranks * layout.stages_per_rank
    models = [Module(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_stages))) for _ in range(2)]
    batch = torch.randn(2, 2 * COUNT, WIDTH).double().unbind()
    begun = [threading.Event(), threading.Event()]

    def work(transport: LocalTransport) -> list[str]:
        told: list[str] = []
        rank, model = transport.rank, models[transport.rank]

        def on_gradient(stage: int) -> None:
            told.append(str(stage))
            if first_waits and stage == 0 and told.count("0") == COUNT:
                assert begun[1].wait(WAIT_S), "the other rank is done, but has begun no sum"

        assembly = Assembly(model, layout.settings, rank, layout.num_ranks)
        shared = assembly.shares(Groups(rank, Replicas(told, begun[rank])))
        pipeline = assembly.connect(transport, RandomStates(0), shared.sharing())
        for stage, held in pipeline.stages.items():
            weight: Any = held.layers[0].weight
            weight.register_post_accumulate_grad_hook(lambda _, s=stage: on_gradient(s))
        pipeline.train(lambda piece, _: model.training_step(piece, 0), batch, 0)
        return told

    return on_ranks(layout.num_ranks, work)


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
def test_a_stage_that_is_done_is_summed_before_its_rank_is(schedule: str) -> None:
    layout = Layout(schedule, num_microbatches=COUNT, stages_per_rank=2)
    for rank, told in enumerate(course_of_a_round(layout)):
        early, late = str(rank + 2), str(rank)  # a pipeline's later stage ends first
        assert told.count(early) == told.count(late) == COUNT
        begun, others = told.index("begin"), [x for x in told if x not in (early, late)]
        assert others == ["begin", "begin", "wait", "wait"]
        assert told[:begun].count(early) == COUNT
        assert late in told[begun:], "the first sum was begun when there was nothing left to do"
        assert told[-3:] == ["begin", "wait", "wait"]


def test_the_last_stage_is_summed_while_the_first_one_has_a_backward_to_do() -> None:
    told = course_of_a_round(Layout("1f1b", num_microbatches=COUNT), first_waits=True)
    assert told == [[*[str(rank)] * COUNT, "begin", "wait"] for rank in range(2)]
