"""Pipelines whose layers are cut train to the weights of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer.lit import Options, assert_equal_weights
from trainer.ranks import Ranks

from .sharded import (
    VOCABULARY,
    WIDTH,
    fit,
    fit_and_save,
    parts_in_memory,
    resume,
    run_after_run,
    together,
)

TWO = {"tensor_parallel_size": 2, "module": "model"}
CLIPPED = {"gradient_clip_val": 0.05}


@pytest.mark.parametrize(
    ("size", "pipeline", "options", "model"),
    [
        (2, {}, {}, {"early": True}),
        (4, {"schedule": "gpipe"}, CLIPPED, {}),
        (4, {"activation_checkpointing": "stage"}, {"accumulate_grad_batches": 2}, {"early": True}),
        (4, {"schedule": "zero_bubble"}, {}, {"loss_parallel": True}),
        (8, {"schedule": "1f1b", "data_parallel_size": 2}, CLIPPED, {"loss_parallel": True}),
        (4, {"schedule": "interleaved", "stages_per_rank": 2}, {}, {}),
        (4, {"data_parallel_size": 2}, CLIPPED, {"starts_late": True}),
        (4, {"schedule": "1f1b"}, CLIPPED, {"tied": True}),
    ],
)
def test_weights_equal_one_device(
    ranks: Ranks, size: int, pipeline: Options, options: Options, model: Options
) -> None:
    (expected,) = ranks.run(1, fit, None, options, model)
    found = together(ranks.run(size, fit, {**TWO, **pipeline}, options, model))
    assert_equal_weights(found, expected)


@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "pipedream", "vertical_sync": True},
        {"schedule": "pipedream", "weight_stashing": False},
        {"schedule": "pipedream_2bw"},
    ],
)
def test_versions_of_weights_are_those_of_whole_layers(ranks: Ranks, pipeline: Options) -> None:
    """An asynchronous pipeline's own update rule is compared with an oracle elsewhere."""
    expected = together(ranks.run(2, fit, {**pipeline, "module": "model"}, {}, {}, True))
    found = together(ranks.run(4, fit, {**TWO, **pipeline}, {}, {}, True))
    assert_equal_weights(found, expected)


ONE_DEVICE = (1, None)
CUT = (4, TWO)
WHOLE = (2, {"module": "model"})
DIRECTORIES = (4, {**TWO, "save_distributed_checkpoint": True})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CUT, ONE_DEVICE),
        (ONE_DEVICE, CUT),
        (DIRECTORIES, WHOLE),
    ],
)
def test_a_checkpoint_does_not_say_how_layers_were_cut(
    ranks: Ranks, tmp_path: Path, first: Any, second: Any
) -> None:
    """Weights and optimizer states are whole in it."""
    (whole,) = ranks.run(1, fit_and_save, None, tmp_path / "whole.ckpt")
    (expected,) = ranks.run(1, resume, None, tmp_path / "whole.ckpt")

    saved = tmp_path / "saved.ckpt"
    assert_equal_weights(together(ranks.run(first[0], fit_and_save, first[1], saved)), whole)
    assert_equal_weights(together(ranks.run(second[0], resume, second[1], saved)), expected)


def test_dropout_is_alike_on_the_ranks_that_share_a_layer(ranks: Ranks) -> None:
    """What they drop of activations that all of them have must be the same."""
    pipeline = {"module": "model", "activation_checkpointing": "layer"}
    expected = together(ranks.run(2, fit, pipeline, {}, {"dropout": 0.3}))
    found = together(ranks.run(4, fit, {**TWO, **pipeline}, {}, {"dropout": 0.3}))
    assert_equal_weights(found, expected)


def test_a_rank_makes_its_part_of_its_own_layers(ranks: Ranks) -> None:
    by_rank = ranks.run(4, parts_in_memory, {**TWO, "partition": [2, 2]})
    for rank, shapes in enumerate(by_rank):
        first, last = shapes["0.weight"], shapes["3.weight"]
        cut = VOCABULARY // 2, WIDTH
        assert (first, last) == ((cut, None) if rank < 2 else (None, cut))
        ups = [shapes[f"{layer}.up.weight"] for layer in (1, 2)]
        assert ups == [(3 * WIDTH // 2, WIDTH), None][:: 1 if rank < 2 else -1]


def test_later_runs_find_the_parts_of_layers_where_they_are(ranks: Ranks) -> None:
    partitions = [[1, 3], [3, 1], [2, 2]]
    expected = run_after_run([None] * len(partitions))
    results = ranks.run(4, run_after_run, [{**TWO, "partition": each} for each in partitions])
    for index, whole in enumerate(expected["after"]):
        assert_equal_weights(together([result["after"][index] for result in results]), whole)
    for result in results:
        assert result["validated"] == pytest.approx(expected["validated"], abs=1e-10)
