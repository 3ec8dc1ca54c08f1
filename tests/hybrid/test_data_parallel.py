"""Replicas of a pipeline train to the weights of one device with the same global batches."""

from __future__ import annotations

from typing import Any

import pytest
from trainer.lit import Options, assert_equal_weights
from trainer.ranks import Ranks

from .models import Dealt, Inside, Tied, TiedLate, Weighted, fit
from .sharded import together

CLIPPED = {"gradient_clip_val": 0.05}
ACCUMULATED = {"accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("kind", "size", "pipeline", "options", "shares"),
    [
        (Dealt, 2, {"schedule": "1f1b", "data_parallel_size": 2}, {}, None),
        (Dealt, 4, {"schedule": "1f1b", "data_parallel_size": 2}, CLIPPED, None),
        (Dealt, 4, {"schedule": "naive", "data_parallel_size": 2}, CLIPPED, (1, 2)),
        (Dealt, 4, {"schedule": "gpipe", "data_parallel_size": 2}, ACCUMULATED, None),
        (Dealt, 4, {"num_microbatches": 2, "data_parallel_size": 2}, CLIPPED, (3, 1)),
        (Dealt, 6, {"data_parallel_size": "auto", "pipeline_parallel_size": 2}, {}, (1, 2, 3)),
        (
            Dealt,
            8,
            {"schedule": "interleaved", "stages_per_rank": 2, "data_parallel_size": 4},
            CLIPPED,
            None,
        ),
        (Dealt, 8, {"schedule": "zero_bubble", "data_parallel_size": 4}, {}, None),
        (Weighted, 4, {"schedule": "1f1b", "data_parallel_size": 2}, CLIPPED, (3, 1)),
        (Tied, 2, {"schedule": "1f1b"}, CLIPPED, None),
        (Tied, 3, {"schedule": "gpipe"}, ACCUMULATED, None),
        (Tied, 2, {"schedule": "interleaved", "stages_per_rank": 2}, CLIPPED, None),
        (Tied, 2, {"schedule": "zero_bubble", "stages_per_rank": 2}, CLIPPED, None),
        (TiedLate, 3, {"schedule": "1f1b"}, CLIPPED, None),
        (TiedLate, 6, {"schedule": "1f1b", "data_parallel_size": 2}, CLIPPED, (3, 1)),
        (Tied, 6, {"schedule": "1f1b", "data_parallel_size": 2}, CLIPPED, (3, 1)),
        (
            Tied,
            4,
            {"schedule": "interleaved", "stages_per_rank": 2, "data_parallel_size": 2},
            ACCUMULATED,
            None,
        ),
    ],
)
def test_weights_equal_one_device(
    ranks: Ranks, kind: Any, size: int, pipeline: Options, options: Options, shares: Any
) -> None:
    (expected,) = ranks.run(1, fit, kind, None, options)
    whole = together(ranks.run(size, fit, kind, pipeline, options, shares))
    assert_equal_weights(whole, expected)


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        ({"schedule": "pipedream"}, CLIPPED),
        ({"schedule": "pipedream", "vertical_sync": True}, {}),
        ({"schedule": "pipedream", "weight_stashing": False}, {}),
        ({"schedule": "pipedream_2bw"}, CLIPPED),
    ],
)
def test_replicas_of_an_asynchronous_pipeline_update_as_one_pipeline_does(
    ranks: Ranks, pipeline: Options, options: Options
) -> None:
    """Whose own update rule other tests compare with an oracle."""
    expected, *_ = ranks.run(2, fit, Inside, pipeline, options)
    whole, *_ = ranks.run(4, fit, Inside, pipeline | {"data_parallel_size": 2}, options)
    assert_equal_weights(whole, expected)
