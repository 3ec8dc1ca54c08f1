"""Bytes that a rank holds for each parameter, by the formulas of ZeRO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from trainer.ranks import Ranks

_FILE = Path(__file__).parents[2] / "benchmarks" / "zero_memory.py"
_SPEC = importlib.util.spec_from_file_location("zero_memory", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
zero_memory = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(zero_memory)


def measured(stage: int, num_ranks: int, replicas: int) -> dict[str, float]:
    found: dict[str, float] = zero_memory.measure(stage, num_ranks, replicas)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "replicas", "stages"), [(1, 1, (1,)), (2, 2, (1, 2, 3)), (4, 2, (1, 2, 3))]
)
def test_bytes_of_a_parameter(
    ranks: Ranks, num_ranks: int, replicas: int, stages: tuple[int, ...]
) -> None:
    for stage in stages:
        for found in ranks.run(num_ranks, measured, stage, num_ranks, replicas):
            everything = found.pop("all")
            per_replica = {
                "weights": 2 / (replicas if stage == 3 else 1),
                "gradients": 2 / (replicas if stage >= 2 else 1),
                "states": 12 / replicas,
            }
            # Adam counts its steps for each parameter: a number of 4 bytes.
            assert found == pytest.approx(per_replica, rel=1e-3)
            total = zero_memory.expected(stage, replicas)
            assert sum(found.values()) == pytest.approx(total, rel=1e-3)
            assert everything < total + 0.4, "something is held twice"  # a batch is in it, too
