"""All kinds of parallelism at once: two stages, two replicas, two ranks for each layer."""

from __future__ import annotations

import pytest
from trainer.lit import Options, assert_equal_weights
from trainer.ranks import Ranks

from .sharded import fit, run_after_run, together

CUBE = {
    "module": "model",
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "tensor_parallel_size": 2,
}
CLIPPED = {"gradient_clip_val": 0.05}


PARTITIONED = {"activation_checkpointing": "stage", "partition_activations": True}
INTERLEAVED = {"schedule": "interleaved", "stages_per_rank": 2}


@pytest.mark.parametrize(
    ("pipeline", "model"),
    [
        ({"schedule": "1f1b", "zero_stage": 3}, {"tied": True}),
        ({**INTERLEAVED, **PARTITIONED, "zero_stage": 1}, {}),
        ({**INTERLEAVED, "zero_stage": 2}, {}),
        ({"schedule": "gpipe", "zero_stage": 3, "reshard_after_forward": True}, {}),
        ({"schedule": "zero_bubble", "zero_stage": 1}, {"loss_parallel": True}),
    ],
)
def test_weights_equal_one_device(ranks: Ranks, pipeline: Options, model: Options) -> None:
    (expected,) = ranks.run(1, fit, None, CLIPPED, model)
    found = together(ranks.run(8, fit, {**CUBE, **pipeline}, CLIPPED, model))
    assert_equal_weights(found, expected)


@pytest.mark.parametrize(
    ("pipeline", "zero_stage"),
    [({"schedule": "pipedream"}, 1), ({"schedule": "pipedream_2bw"}, 0)],
)
def test_versions_of_weights_are_those_of_one_pipeline(
    ranks: Ranks, pipeline: Options, zero_stage: int
) -> None:
    expected = together(ranks.run(2, fit, {**pipeline, "module": "model"}, {}, {}, True))
    divided = {**CUBE, **pipeline, "zero_stage": zero_stage}
    found = together(ranks.run(8, fit, divided, {}, {}, True))
    assert_equal_weights(found, expected)


def test_layers_that_are_cut_twice_are_put_together_after_each_run(ranks: Ranks) -> None:
    """Each rank has its part of its layers then, as before the run, and can go on with it."""
    pipelines = [{**CUBE, "zero_stage": 3}, {**CUBE, "zero_stage": 0}, {**CUBE, "zero_stage": 3}]
    (expected,) = ranks.run(1, run_after_run, [None] * len(pipelines))
    results = ranks.run(8, run_after_run, pipelines)
    for index, whole in enumerate(expected["after"]):
        assert_equal_weights(together([result["after"][index] for result in results]), whole)
