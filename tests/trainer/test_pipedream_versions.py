"""LIGHTNING_PIPE_DEBUG=1 sends the version that an activation was computed with, and compares."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lightning_pipe.programs import RankPrograms
from lightning_pipe.runtime.errors import PeerLostError, PipelineError
from lightning_pipe.schedule.instructions import Forward, ReceiveActivation

from .lit import assert_equal_weights, weights
from .pipedream import POLICIES, fit, make_batches, replay
from .ranks import Ranks

EPOCH = make_batches()


def train() -> dict[str, dict[str, Tensor]]:
    os.environ["LIGHTNING_PIPE_DEBUG"] = "1"
    return {policy: weights(fit(policy, 4, EPOCH)[1]) for policy in POLICIES}


def test_the_same_weights(ranks: Ranks) -> None:
    found = ranks.run(3, train)[0]

    for policy in POLICIES:
        expected = replay(policy, 4, EPOCH * 2, 3, {len(EPOCH) - 1})
        assert_equal_weights(found[policy], expected.weights)


def train_with_a_wrong_plan(kind: Any, debug: str) -> str:
    """On the last rank one instruction of a kind has another version; what happens on this rank."""
    os.environ["LIGHTNING_PIPE_DEBUG"] = debug
    right = RankPrograms.round

    def wrong(self: RankPrograms, index: int, *rest: Any) -> Any:
        program = list(right(self, index, *rest))
        for place, step in enumerate(program):
            if index == 2 and isinstance(step, kind) and self._rank == 1:
                program[place] = replace(step, version=step.version + 7)
        return program

    RankPrograms.round = wrong  # type: ignore[method-assign]
    try:
        fit("stashing", 1, EPOCH, max_epochs=1)
    except PeerLostError:
        return "lost a peer"
    except (PipelineError, RuntimeError) as error:
        return str(error)
    finally:
        RankPrograms.round = right  # type: ignore[method-assign]
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "debug", "expected"),
    [
        (ReceiveActivation, "1", r"version 1 of the weights of stage 0, but the plan says 8"),
        (ReceiveActivation, "0", "nothing"),
        (Forward, "0", r"Version 9 .* only versions \[2\]"),
    ],
)
def test_a_wrong_version(ranks: Ranks, kind: Any, debug: str, expected: str) -> None:
    first, last = ranks.run(2, train_with_a_wrong_plan, kind, debug)

    assert re.search(expected, last), last
    assert first == ("nothing" if expected == "nothing" else "lost a peer")
