"""Replicas that divide states, gradients or parameters train to the weights of one device."""

from __future__ import annotations

from typing import Any

import pytest
from trainer.lit import Options, assert_equal_weights
from trainer.ranks import Ranks

from .models import Dealt, Inside, Tied, fit

CLIPPED = {"gradient_clip_val": 0.05}
ACCUMULATED = {"accumulate_grad_batches": 2}


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "size", "pipeline", "options", "shares"),
    [
        (Dealt, 2, {"schedule": "1f1b"}, CLIPPED, (3, 1)),
        (Dealt, 4, {"schedule": "gpipe"}, ACCUMULATED, None),
        (Tied, 4, {"schedule": "interleaved", "stages_per_rank": 2}, CLIPPED, None),
    ],
)
def test_weights_equal_one_device(
    ranks: Ranks,
    kind: Any,
    size: int,
    pipeline: Options,
    options: Options,
    shares: Any,
    zero_stage: int,
) -> None:
    (expected,) = ranks.run(1, fit, kind, None, options)
    divided = {"data_parallel_size": 2, "zero_stage": zero_stage}
    whole, *_ = ranks.run(size, fit, kind, pipeline | divided, options, shares)
    assert_equal_weights(whole, expected)


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        ({"schedule": "pipedream"}, CLIPPED),
        ({"schedule": "pipedream_2bw"}, {}),
        ({"schedule": "zero_bubble"}, CLIPPED),
    ],
)
def test_states_are_divided_under_schedules_that_keep_whole_weights(
    ranks: Ranks, pipeline: Options, options: Options
) -> None:
    expected, *_ = ranks.run(2, fit, Inside, pipeline, options)
    divided = pipeline | {"data_parallel_size": 2, "zero_stage": 1}
    whole, *_ = ranks.run(4, fit, Inside, divided, options)
    assert_equal_weights(whole, expected)


@pytest.mark.parametrize("checkpointing", ["none", "stage", "layer"])
@pytest.mark.parametrize("reshards", [False, True])
def test_parameters_gathered_for_each_micro_batch(
    ranks: Ranks, checkpointing: str, reshards: bool
) -> None:
    (expected,) = ranks.run(1, fit, Dealt, None, CLIPPED)
    pipeline = {
        "data_parallel_size": 2,
        "zero_stage": 3,
        "reshard_after_forward": reshards,
        "activation_checkpointing": checkpointing,
    }
    whole, *_ = ranks.run(4, fit, Dealt, pipeline, CLIPPED)
    assert_equal_weights(whole, expected)
