"""Peak bytes of ranks against a walk through the plan, instruction by instruction."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest

from lightning_pipe.partition.profile import LayerProfile, Profile
from lightning_pipe.planning.memory import Checkpointing, StageMemory, live_versions
from lightning_pipe.planning.orders import read_order
from lightning_pipe.schedule import (
    SCHEDULES,
    Backward,
    Forward,
    Plan,
    Update,
    VersionPolicy,
    make_plan,
)
from lightning_pipe.schedule import live_versions as versions_of
from lightning_pipe.schedule.instructions import BackwardWeight, LastBackward


def a_profile(seed: int, num_layers: int) -> Profile:
    rng = random.Random(seed)
    layers = tuple(
        LayerProfile(str(i), 1, 2, *(rng.randint(1, 99) for _ in range(5)))
        for i in range(num_layers)
    )
    return Profile(layers, 4, 40, loss_activation_bytes=17)


def walked(profile: Profile, plan: Plan, sizes: list[int], kind: str, share: float) -> list[float]:
    """The most that each rank holds at any point of its program."""
    bounds = list(pairwise([0, *accumulate(sizes)]))
    enters = [profile.input_bytes, *(layer.output_bytes for layer in profile.layers)]
    versions = versions_of(plan)
    peaks = []
    for rank, program in enumerate(plan.programs):
        held = 0.0
        for stage in plan.placement.stages_of(rank):
            for layer in profile.layers[slice(*bounds[stage])]:
                gradients = 2 if plan.policy is VersionPolicy.DOUBLE_BUFFERED else 1
                held += layer.parameter_bytes * versions[stage]
                held += layer.gradient_bytes * gradients + layer.optimizer_bytes
        in_flight: Counter[int] = Counter()
        peak = held
        for step in program:
            if isinstance(step, Forward):
                in_flight[step.stage] += 1
            again = 0.0
            kept = 0.0
            for stage, count in in_flight.items():
                start, stop = bounds[stage]
                activations = [layer.activation_bytes for layer in profile.layers[start:stop]]
                each = {
                    "none": sum(activations),
                    "stage": enters[start],
                    "layer": sum(enters[start:stop]),
                }[kind]
                each += profile.loss_activation_bytes if stop == len(profile.layers) else 0
                kept += count * each * share
                if isinstance(step, Backward) and step.stage == stage and kind != "none":
                    of_all = max(activations) if kind == "layer" else sum(activations)
                    again = of_all * share
            peak = max(peak, held + kept + again)
            if isinstance(step, LastBackward):
                in_flight[step.stage] -= 1
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("checkpointing", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "pipedream", "pipedream_2bw"])
def test_one_stage_per_rank(schedule: str, checkpointing: Checkpointing) -> None:
    """Exact: a rank recomputes when it has the most in flight."""
    profile, sizes = a_profile(1, 9), [2, 1, 3, 3]
    recipe = SCHEDULES[schedule]
    placement, count = recipe.place(4, 1), {"naive": 1}.get(schedule, 6)
    batches = (count,) * 4 if recipe.continuous else count
    plan, order = make_plan(schedule, placement, batches), read_order(schedule, placement, batches)
    memory = StageMemory(profile, 2, checkpointing, recipe.policies[0])
    expected = walked(profile, plan, sizes, checkpointing, share=0.5)
    assert memory.of_ranks(sizes, order).tolist() == pytest.approx(expected, rel=1e-12)
    stop = np.cumsum(sizes)
    alone = memory.of_stages(
        stop - sizes, stop, np.arange(4)[::-1], np.array(order.peak_in_flight())
    )
    assert alone.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_several_stages_per_rank(schedule: str) -> None:
    """The stages of a rank are not at their peaks at the same time."""
    profile, sizes = a_profile(2, 12), [2, 1, 3, 1, 2, 3]
    placement = SCHEDULES[schedule].place(3, 2)
    plan, order = make_plan(schedule, placement, 6), read_order(schedule, placement, 6)
    expected = walked(profile, plan, sizes, "none", share=1.0)
    assert StageMemory(profile, 4).of_ranks(sizes, order).tolist() == pytest.approx(expected)
    if schedule == "interleaved":
        found = StageMemory(profile, 4, "layer").of_ranks(sizes, order)
        for upper, exact in zip(found, walked(profile, plan, sizes, "layer", 1.0), strict=True):
            assert exact <= upper < 1.3 * exact


def test_a_split_backward_keeps_activations_until_its_second_part() -> None:
    profile, sizes = a_profile(3, 4), [1, 1, 1, 1]
    placement = SCHEDULES["zero_bubble"].place(4, 1)
    plan, order = make_plan("zero_bubble", placement, 8), read_order("zero_bubble", placement, 8)
    assert any(isinstance(step, BackwardWeight) for step in plan.programs[3])
    found = StageMemory(profile, 4).of_ranks(sizes, order)
    held = StageMemory(profile, 4).held(np.arange(4), np.arange(1, 5), 0)
    loss = profile.loss_activation_bytes
    last = held[3] + 4 * (profile.layers[3].activation_bytes + loss)  # with 1F1B it has one
    assert found[3] == last


@pytest.mark.parametrize(
    "policy",
    [VersionPolicy.STASHING, VersionPolicy.NO_STASHING, VersionPolicy.DOUBLE_BUFFERED],
)
def test_versions_are_those_of_a_long_plan(policy: VersionPolicy) -> None:
    schedule = "pipedream_2bw" if policy is VersionPolicy.DOUBLE_BUFFERED else "pipedream"
    plan = make_plan(schedule, SCHEDULES[schedule].place(4, 1), (4,) * 5, policy=policy)
    assert any(isinstance(step, Update) for step in plan.programs[0])
    expected = versions_of(plan)
    assert tuple(live_versions(policy, 3 - stage) for stage in range(4)) == expected


def test_vertical_sync_is_refused() -> None:
    with pytest.raises(ValueError, match="as many versions as there are stages"):
        live_versions(VersionPolicy.VERTICAL_SYNC, 1)
