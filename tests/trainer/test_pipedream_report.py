"""What the report says of an asynchronous run: updates, versions, bytes, what was in flight."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from runtime import oracle

from lightning_pipe.report import PipelineReport

from .pipedream import WIDTH, Regression, fit, make_batches
from .ranks import Ranks

EPOCH = make_batches((8, 8, 8, 8))
EPOCHS = 2
NUM_STAGES = 3
LINEAR = 8 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer


class CountSteps(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1


class PartlyFrozen(Regression):
    """Of each stage the first layer is frozen, if it has another."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (0, 2):
            self.net[layer].requires_grad_(False)


def train(policy: oracle.Policy, count: int, frozen: bool) -> tuple[PipelineReport, int]:
    steps = CountSteps()
    module = PartlyFrozen() if frozen else Regression()
    run, _ = fit(policy, count, EPOCH, module, callbacks=[steps], max_epochs=EPOCHS)
    return run.strategy.report, steps.steps


@pytest.mark.parametrize(
    ("policy", "count", "versions", "in_flight"),
    [
        ("stashing", 1, [3, 2, 1], [3, 2, 1]),
        ("stashing", 4, [3, 2, 1], [3, 2, 1]),
        ("vertical_sync", 1, [3, 3, 3], [3, 2, 1]),
        ("no_stashing", 1, [1, 1, 1], [3, 2, 1]),
        ("2bw", 4, [2, 2, 1], [3, 2, 1]),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_report(
    ranks: Ranks,
    policy: oracle.Policy,
    count: int,
    versions: list[int],
    in_flight: list[int],
    frozen: bool,
) -> None:
    results = ranks.run(NUM_STAGES, train, policy, count, frozen)

    stages = results[0][0].stages
    assert [stage.live_versions for stage in stages] == versions
    assert [stage.peak_in_flight for stage in stages] == in_flight
    sizes, kept_once = [2, 3, 1], [1, 1, 0] if frozen else [0, 0, 0]
    assert [stage.weight_bytes for stage in stages] == [
        LINEAR * (once + (size - once) * number)
        for size, once, number in zip(sizes, kept_once, versions, strict=True)
    ]
    updates = EPOCHS * len(EPOCH) * (1 if policy == "2bw" else count)
    assert [stage.updates for stage in stages] == [updates] * NUM_STAGES
    assert [steps for _, steps in results] == [updates] * NUM_STAGES
    assert results[0][0].batches == EPOCHS * len(EPOCH)
    lines = str(results[0][0]).splitlines()
    assert lines[1].split()[-4:] == ["updates", "versions", "weight", "bytes"]
    for stage, line in zip(stages, lines[2:], strict=False):
        last = [str(updates), str(stage.live_versions), str(stage.weight_bytes)]
        assert line.replace(",", "").split()[-3:] == last
