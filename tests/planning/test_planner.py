"""What the planner chooses, against all configurations, and that the strategy takes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import ceil, inf
from typing import Any

import numpy as np
import pytest

import lightning_pipe
from lightning_pipe import PipelineStrategy
from lightning_pipe.checks import check_schedule
from lightning_pipe.partition.profile import LayerProfile, Profile
from lightning_pipe.planning import Candidate, InfeasibleError, plan
from lightning_pipe.planning.even import even_ranks
from lightning_pipe.planning.memory import StageMemory
from lightning_pipe.planning.orders import read_order
from lightning_pipe.planning.settings import microbatch_counts
from lightning_pipe.schedule import SCHEDULES, Costs, Placement, accepts, make_plan, simulate

GIB = 2**30


def a_profile(num_layers: int, seed: int = 0, overhead: float = 0.1) -> Profile:
    """Layers that differ by half, with 200 MiB of state and 30 MiB of activations each."""
    rng = random.Random(seed)

    def layer(index: int) -> LayerProfile:
        forward = rng.uniform(1e-3, 2e-3)
        state = (50 << 20, 50 << 20, 100 << 20)
        activations = rng.randint(20 << 20, 40 << 20)
        more = (overhead * forward, 2 * overhead * forward)
        return LayerProfile(str(index), forward, 2 * forward, activations, 4 << 20, *state, *more)

    return Profile(tuple(layer(i) for i in range(num_layers)), 8, 1 << 20)


def by_simulation(profile: Profile, candidate: Candidate, batch_size: int, hop: Any) -> float:
    """Seconds of a step by the exact simulation, with costs added up layer by layer."""
    m = candidate.num_microbatches
    share = batch_size / m / profile.batch_size
    forward, backward, messages, start = [], [], [], 0
    for size in candidate.partition:
        layers = profile.layers[start : start + size]
        one = sum(f.forward_overhead * (1 - share) + f.forward_seconds * share for f in layers)
        two = sum(b.backward_overhead * (1 - share) + b.backward_seconds * share for b in layers)
        forward.append(one)
        backward.append(two + (one if candidate.activation_checkpointing != "none" else 0))
        start += size
        messages.append(hop(layers[-1].output_bytes * share))
    placement = SCHEDULES[candidate.schedule].place(
        candidate.pipeline_parallel_size, candidate.stages_per_rank
    )
    costs = Costs(tuple(forward), tuple(backward), communication=tuple(messages[:-1]))
    return simulate(make_plan(candidate.schedule, placement, m), costs).makespan


def test_predictions_are_those_of_the_exact_simulation() -> None:
    profile, bandwidth, latency = a_profile(24), 10e9, 1e-4
    found = plan(profile, 4, 6 * GIB, bandwidth, latency, batch_size=32, replicas=1)
    assert {c.schedule for c in found} >= {"gpipe", "1f1b", "interleaved", "zero_bubble"}
    for candidate in found:
        seconds = by_simulation(profile, candidate, 32, lambda b: latency + b / bandwidth)
        assert candidate.step_seconds == pytest.approx(seconds, rel=1e-9)
        assert candidate.samples_per_second == pytest.approx(32 / seconds)
        order = read_order(
            candidate.schedule,
            SCHEDULES[candidate.schedule].place(
                candidate.pipeline_parallel_size, candidate.stages_per_rank
            ),
            candidate.num_microbatches,
        )
        memory = StageMemory(
            profile,
            ceil(32 / candidate.num_microbatches),
            candidate.activation_checkpointing,
        )
        peaks = memory.of_ranks(candidate.partition, order)
        assert candidate.peak_bytes == tuple(map(ceil, peaks))
        assert max(candidate.peak_bytes) <= 6 * GIB
    assert [c.step_seconds for c in found] == sorted(c.step_seconds for c in found)


def configurations(profile: Profile, devices: int, batch_size: int) -> Iterator[Candidate]:
    """All there are of gpipe and 1f1b, with every cut and number of micro-batches."""
    n = len(profile.layers)
    for ranks in range(1, min(devices, n) + 1):
        for inner in combinations(range(1, n), ranks - 1):
            sizes = tuple(b - a for a, b in pairwise((0, *inner, n)))
            choices = product(("gpipe", "1f1b"), (1, 2, 4), ("none", "stage", "layer"))
            for schedule, m, kind in choices:
                yield Candidate(schedule, ranks, 1, sizes, m, kind, 1, 1, 0, False, 0, 0, (), ())


@pytest.mark.parametrize(("seed", "gib"), [(0, None), (1, 0.8), (2, 0.55), (3, 0.7), (6, None)])
def test_as_good_as_the_best_of_all_configurations(seed: int, gib: float | None) -> None:
    """Within 2% (the last one): the cut for the slowest stage alone is 5% from it for seed 3."""
    profile, batch_size = a_profile(6, seed), 4
    (found, *_) = plan(
        profile,
        3,
        None if gib is None else gib * GIB,
        batch_size=batch_size,
        schedules=("gpipe", "1f1b"),
        replicas=1,
    )
    best = inf
    for one in configurations(profile, 3, batch_size):
        order = read_order(
            one.schedule, Placement.round_robin(one.pipeline_parallel_size), one.num_microbatches
        )
        memory = StageMemory(
            profile, ceil(batch_size / one.num_microbatches), one.activation_checkpointing
        )
        if gib is None or max(memory.of_ranks(one.partition, order)) <= gib * GIB:
            best = min(best, by_simulation(profile, one, batch_size, lambda b: 0.0))
    assert best * (1 - 1e-9) <= found.step_seconds <= 1.02 * best


def test_the_strategy_takes_every_candidate() -> None:
    names = [*(n for n in SCHEDULES if n != "forward")]
    found = plan(a_profile(12), 4, batch_size=24, schedules=names, count=100)
    assert {c.schedule for c in found} == set(names)
    for candidate in found:
        config = candidate.strategy_config()
        settings = PipelineStrategy(**config)._settings
        check_schedule(
            settings.schedule,
            settings.num_microbatches,
            settings.stages_per_rank,
            config["pipeline_parallel_size"],
            settings.activation_checkpointing,
        )
        assert sum(config["partition"]) == 12
        stages = config["pipeline_parallel_size"] * config["stages_per_rank"]
        assert len(config["partition"]) == stages
        assert candidate.num_microbatches <= 24


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_depth_follows_the_devices(devices: int) -> None:
    (best, *_) = plan(a_profile(24), devices, 6 * GIB, batch_size=32, replicas=1)
    assert best.pipeline_parallel_size == devices
    assert len(best.peak_bytes) == len(best.bubble) == devices


def test_fewer_devices_where_messages_are_slow() -> None:
    (best, *_) = plan(a_profile(24), 8, latency=0.1, batch_size=32)
    assert best.pipeline_parallel_size == 1


def test_a_slow_link_sets_the_pace() -> None:
    """The simulation lets messages overlap without limit; a link does not."""
    profile, bandwidth = a_profile(8), 1e8
    options: Any = {"batch_size": 8, "schedules": ("gpipe",), "replicas": 1}
    (best,) = plan(profile, 2, 1.3 * GIB, bandwidth, **options)  # one device has no room for it
    assert best.pipeline_parallel_size == 2
    sent = profile.layers[0].output_bytes  # of the batch, there and back again
    assert best.step_seconds >= 2 * sent / bandwidth
    messages = by_simulation(profile, best, 8, lambda b: b / bandwidth)
    assert best.step_seconds > 1.2 * messages
    (alone,) = plan(profile, 2, None, bandwidth, **options)
    assert alone.pipeline_parallel_size == 1


def test_memory_makes_it_recompute() -> None:
    """With less memory: more micro-batches or recomputation, and never a faster step."""
    profile, before = a_profile(16), 0.0
    kinds = []
    for gib in (8, 3, 1.2, 0.8):
        (best, *_) = plan(profile, 4, gib * GIB, batch_size=16, schedules=("gpipe", "1f1b"))
        assert max(best.peak_bytes) <= gib * GIB
        assert best.step_seconds >= before
        before = best.step_seconds
        kinds.append(best.activation_checkpointing)
    assert kinds[0] == "none"
    assert kinds[-1] != "none"


def test_infeasible_says_what_is_missing_and_what_helps() -> None:
    profile = a_profile(16)
    with pytest.raises(InfeasibleError) as refused:
        plan(profile, 4, 0.7 * GIB, batch_size=16)
    error = refused.value
    enough = ceil(0.7 * GIB) + error.missing_bytes
    (best, *_) = plan(profile, 4, enough, batch_size=16)
    assert max(best.peak_bytes) <= enough
    with pytest.raises(InfeasibleError):
        plan(profile, 4, enough - 2, batch_size=16)
    words = next(one for one in error.remedies if "devices" in one)
    more = int(words.split()[0])
    assert plan(profile, more, 0.7 * GIB, batch_size=16)
    with pytest.raises(InfeasibleError):
        plan(profile, more - 1, 0.7 * GIB, batch_size=16)


def test_infeasible_for_what_was_left_out() -> None:
    """Each remedy alone is enough."""
    profile, capacity = a_profile(16), 1.1 * GIB

    def run(**changes: Any) -> tuple[Candidate, ...]:
        given = {"batch_size": 64, "schedules": ("gpipe",), "activation_checkpointing": ("none",)}
        return plan(profile, 4, capacity, **{**given, **changes})

    with pytest.raises(InfeasibleError) as refused:
        run()
    remedies = refused.value.remedies
    kind = next(one for one in remedies if "checkpointing" in one).split("'")[1]
    assert run(activation_checkpointing=(kind,))
    assert "schedule='1f1b'" in remedies
    assert run(schedules=("1f1b",))
    samples = int(next(one for one in remedies if "batch_size" in one).split()[0].split("=")[1])
    assert run(batch_size=samples)
    with pytest.raises(InfeasibleError):
        run(batch_size=samples + 1)


def test_replicas_pay_for_averaging() -> None:
    profile = a_profile(8, overhead=0.0)
    (fast, *_) = plan(profile, 4, batch_size=8, replicas="auto", schedules=("1f1b",))
    assert (fast.data_parallel_size, fast.pipeline_parallel_size) == (4, 1)  # nothing to pay
    assert fast.strategy_config()["data_parallel_size"] == 4
    total = sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers)
    assert fast.step_seconds == pytest.approx(total / 4)
    bandwidth = 1e9
    (slow,) = plan(profile, 4, bandwidth=bandwidth, batch_size=8, replicas=4, schedules=("1f1b",))
    gradients = sum(layer.gradient_bytes for layer in profile.layers)
    expected = total / 4 + 2 * 3 / 4 * gradients / bandwidth
    assert slow.step_seconds == pytest.approx(expected)


def test_asynchronous_schedules_only_if_named_and_in_their_steady_state() -> None:
    profile = a_profile(8, overhead=0.0)
    assert not any("pipedream" in c.schedule for c in plan(profile, 4, batch_size=8))
    for name, m in (("pipedream", 1), ("pipedream_2bw", 4)):
        (best,) = plan(profile, 4, batch_size=8, schedules=(name,))
        start, slowest = 0, 0.0
        for size in best.partition:
            layers = profile.layers[start : start + size]
            slowest = max(slowest, sum(x.forward_seconds + x.backward_seconds for x in layers))
            start += size
        assert best.step_seconds == pytest.approx(slowest, rel=1e-9)
        assert min(best.bubble) == pytest.approx(0, abs=1e-9)
        assert accepts(name, Placement.round_robin(4), (m, m))


def test_a_thousand_layers_on_64_devices() -> None:
    """In 5 seconds on two cores with nothing else to do (`timeout` in the configuration: 120)."""
    found = plan(a_profile(1000), 64, bandwidth=10e9, latency=1e-4, batch_size=128, replicas=1)
    assert found[0].pipeline_parallel_size > 56
    assert found[0].schedule == "zero_bubble"


def test_estimated_costs() -> None:
    (best, *_) = plan(Profile.estimated([1.0] * 8), 4, batch_size=16, schedules=("gpipe",))
    assert best.step_seconds == pytest.approx((16 + 3) * 6)
    assert best.mean_bubble == pytest.approx(3 / 19)
    assert best.partition == (2, 2, 2, 2)


def test_ranks_are_evened() -> None:
    """Two large stages on one rank become a large and a small one."""
    ends = [float(i) for i in range(13)]
    sizes = even_ranks((4, 2, 4, 2), np.array(ends), (0, 1, 0, 1))
    assert (sizes[0] + sizes[2], sizes[1] + sizes[3]) == (6, 6)
    assert sum(sizes) == 12


@pytest.mark.parametrize("samples", [1, 7, 100, 512])
def test_numbers_of_micro_batches(samples: int) -> None:
    counts = microbatch_counts("1f1b", 4, samples)
    assert counts[0] == 1
    assert counts[-1] == samples
    assert all(b <= 2 * a for a, b in pairwise(counts))
    assert all(c % 4 == 0 for c in microbatch_counts("interleaved", 4, samples))
    if samples == 100:
        assert counts == (1, 2, 4, 5, 10, 20, 25, 50, 100)
    if samples == 512:
        assert counts == tuple(2**k for k in range(10))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"devices": 0}, "devices=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"bandwidth": 0.0}, "bandwidth=0.0"),
        ({"latency": -1.0}, "latency=-1.0"),
        ({"memory_per_device": 0.0}, "memory_per_device=0.0"),
        ({"activation_checkpointing": ("some",)}, "must be some of"),
        ({"schedules": ()}, "at least one"),
        ({"schedules": ("gpip",)}, "Did you mean 'gpipe'"),
        ({"schedules": ("forward",)}, "does not train"),
        ({"schedules": ("interleaved",), "devices": 1}, "choose '1f1b'"),
        ({"replicas": 5}, "replicas=5 must be 1 to 4"),
    ],
)
def test_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan(**{"profile": a_profile(4), "devices": 4, "batch_size": 8, **options})


def test_profiles_without_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="has no bytes"):
        plan(Profile.estimated([1, 2]), 2, memory_per_device=1e9, batch_size=4)
    with pytest.raises(ValueError, match="takes any time"):
        plan(Profile.estimated([0, 0]), 2, batch_size=4)


def test_it_is_a_public_name() -> None:
    assert lightning_pipe.plan is plan
