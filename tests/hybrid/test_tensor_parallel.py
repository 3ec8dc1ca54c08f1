"""Pipelines whose layers are cut train to the weights of one device."""

from __future__ import annotations

from typing import Any

import pytest
from trainer.lit import Options, assert_equal_weights
from trainer.ranks import Ranks

from .sharded import fit, together

TWO = {"tensor_parallel_size": 2, "module": "model"}


@pytest.mark.parametrize(
    ("size", "pipeline", "options"),
    [
        (2, {}, {}),
        (4, {"schedule": "gpipe"}, {"gradient_clip_val": 0.05}),
    ],
)
def test_weights_equal_one_device(
    ranks: Ranks, size: int, pipeline: Options, options: Options
) -> None:
    (expected,) = ranks.run(1, fit, None, options, {})
    found = together(ranks.run(size, fit, {**TWO, **pipeline}, options, {}))
    assert_equal_weights(found, expected)
