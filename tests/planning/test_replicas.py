"""Replicas, ZeRO, tensor ranks and nodes in a plan, against sums written out by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from math import ceil, inf
from typing import Any

import numpy as np
import pytest

from lightning_pipe import PipelineStrategy
from lightning_pipe.checks import check_schedule
from lightning_pipe.partition.profile import LayerProfile, Profile
from lightning_pipe.planning import Candidate, InfeasibleError, plan
from lightning_pipe.planning.links import Links
from lightning_pipe.planning.memory import StageMemory
from lightning_pipe.planning.zero import Zero
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.schedule import (
    SCHEDULES,
    Costs,
    Forward,
    Placement,
    Plan,
    accepts,
    make_plan,
    simulate,
)
from lightning_pipe.schedule.instructions import LastBackward

MIB = 2**20
ZEROS = [Zero(0), Zero(1), Zero(2), Zero(3), Zero(3, reshards=True)]


def a_profile(num_layers: int, seed: int = 0) -> Profile:
    rng = random.Random(seed)

    def layer(index: int) -> LayerProfile:
        forward = rng.uniform(1e-3, 2e-3)
        weights = rng.randint(20, 60) * MIB
        state = (weights, weights, 2 * weights)
        activations = rng.randint(20, 40) * MIB
        return LayerProfile(str(index), forward, 2 * forward, activations, 4 * MIB, *state)

    return Profile(tuple(layer(i) for i in range(num_layers)), 8, MIB)


# --------------------------------------------------------------------------------- bytes of ZeRO


@pytest.mark.parametrize("replicas", [2, 4])
def test_bytes_of_each_stage(replicas: int) -> None:
    profile, n = a_profile(6), replicas
    start, stop = np.array([1]), np.array([4])
    layers = profile.layers[1:4]
    weights = sum(layer.parameter_bytes for layer in layers)  # and as many gradients, twice states
    largest = max(layer.parameter_bytes + layer.gradient_bytes for layer in layers)
    expected = {
        Zero(0): 4 * weights,
        Zero(1): 2 * weights + 2 * weights / n,
        Zero(2): weights + 3 * weights / n,
        Zero(3): (1 + 1 / n) * weights + weights + 2 * weights / n,
        Zero(3, reshards=True): 4 * weights / n + largest,
    }
    for zero, number in expected.items():
        memory = StageMemory(profile, 8, zero=zero, replicas=n)
        assert memory.held(start, stop, 0) == pytest.approx(number)
    assert expected[Zero(3)] > expected[Zero(2)]  # while a batch runs


# -------------------------------------------------------------------- brute force over everything


class Machine:
    """A configuration, timed by the exact simulation, with each transfer written out."""

    def __init__(self, profile: Profile, batch_size: int, links: Links, tensor: int = 1) -> None:
        self.profile, self.batch_size, self.links, self.tensor = profile, batch_size, links, tensor

    def bandwidth(self, ranks: list[int]) -> float:
        """Of the slowest link in a chain of ranks."""
        size = self.links.devices_per_node
        nodes = {rank // size for rank in ranks} if size is not None else {0}
        node_bandwidth = self.links.node_bandwidth or self.links.bandwidth
        return node_bandwidth if len(nodes) > 1 else self.links.bandwidth

    def once(self, sent: float, replicas: int, bandwidth: float) -> float:
        """A gather, a reduce-scatter or a broadcast over a ring."""
        return (replicas - 1) * (self.links.latency + sent / replicas / bandwidth) if sent else 0.0

    def seconds(self, one: Candidate) -> float:
        m, n, t = one.num_microbatches, one.data_parallel_size, self.tensor
        share = ceil(self.batch_size / n) / m / self.profile.batch_size
        zero = Zero(one.zero_stage, one.reshard_after_forward)  # type: ignore[arg-type]
        width = n * t
        placement = SCHEDULES[one.schedule].place(one.pipeline_parallel_size, one.stages_per_rank)
        forward, backward, reduce, update, messages = [], [], [], [], []
        begin = 0.0
        bounds = list(pairwise([0, *accumulate(one.partition)]))
        for stage, (start, stop) in enumerate(bounds):
            layers, rank = self.profile.layers[start:stop], placement.rank_of[stage]
            ring = self.bandwidth([rank * width + at for at in range(width)])
            assert t == 1 or self.links.devices_per_node is None
            f = sum(layer.forward_seconds for layer in layers) * share / t
            b = sum(layer.backward_seconds for layer in layers) * share / t
            b += f if one.activation_checkpointing != "none" else 0.0
            weights = [ceil(layer.parameter_bytes / t) for layer in layers]
            if zero.reshards:
                f += sum(self.once(w, n, ring) for w in weights)
                b += 2 * sum(self.once(w, n, ring) for w in weights)
            if zero.stage == 2:
                b += sum(self.once(w, n, ring) for w in weights)
            forward.append(f)
            backward.append(b)
            whole = self.once(sum(weights), n, ring)
            begin += whole if zero == Zero(3) else 0.0
            reduce.append({0: 2, 1: 2, 3: 1}.get(zero.stage, 0) * whole * (not zero.reshards))
            update.append(whole if zero.stage in (1, 2) else 0.0)
            if stage + 1 < len(bounds):
                slowest = min(
                    self.bandwidth([rank * width + at, placement.rank_of[stage + 1] * width + at])
                    for at in range(width)
                )
                messages.append(self.links.latency + layers[-1].output_bytes * share / slowest)
        plan = make_plan(one.schedule, placement, m)
        timeline = simulate(plan, Costs(forward, backward, communication=messages))
        ended = self.ended(plan, {e.instruction: e.end for e in timeline.events}, reduce, update)
        return begin + max(timeline.makespan, *ended)

    @staticmethod
    def ended(plan: Plan, ends: Any, reduce: list[float], update: list[float]) -> list[float]:
        """When each rank has its sums, which follow each other, and its updates."""
        ended = []
        for rank, program in enumerate(plan.programs):
            last = {step.stage: ends[step] for step in program if isinstance(step, LastBackward)}
            time = 0.0
            for stage in sorted(last, key=lambda s: last[s]):
                time = max(time, last[stage]) + reduce[stage]
            ended.append(time + sum(update[s] for s in plan.placement.stages_of(rank)))
        return ended

    def peak(self, one: Candidate) -> float:
        """The fullest rank, by a walk through the plan, if each holds one stage."""
        m, n, t = one.num_microbatches, one.data_parallel_size, self.tensor
        samples = ceil(ceil(self.batch_size / n) / m)
        plan = make_plan(one.schedule, Placement.round_robin(one.pipeline_parallel_size), m)
        part = tuple(
            replace(
                layer,
                parameter_bytes=ceil(layer.parameter_bytes / t),
                gradient_bytes=ceil(layer.gradient_bytes / t),
                optimizer_bytes=ceil(layer.optimizer_bytes / t),
            )
            for layer in self.profile.layers
        )
        zero = Zero(one.zero_stage, one.reshard_after_forward)  # type: ignore[arg-type]
        memory = StageMemory(
            replace(self.profile, layers=part),
            samples,
            one.activation_checkpointing,
            zero=zero,
            replicas=n,
        )
        peak, start = 0.0, 0
        for place, (size, program) in enumerate(zip(one.partition, plan.programs, strict=True)):
            in_flight = most = 0
            for step in program:
                in_flight += isinstance(step, Forward)
                most = max(most, in_flight)
                in_flight -= isinstance(step, LastBackward)
            where = np.array([start]), np.array([start + size])
            peak = max(peak, memory.of_stages(*where, len(plan.programs) - place - 1, most).item())
            start += size
        return peak


def configurations(
    machine: Machine, devices: int, zeros: list[Zero], checkpointing: tuple[Any, ...]
) -> Iterator[Candidate]:
    """All there are of 1F1B and GPipe."""
    layers, places = len(machine.profile.layers), devices // machine.tensor
    for n in (n for n in range(1, places + 1) if places % n == 0 and machine.batch_size % n == 0):
        for ranks in range(1, min(places // n, layers) + 1):
            if not machine.links.hold(ranks * n * machine.tensor):
                continue
            counts = [m for m in (1, 2, 4, 8) if m <= machine.batch_size // n]
            for inner in combinations(range(1, layers), ranks - 1):
                sizes = tuple(b - a for a, b in pairwise((0, *inner, layers)))
                for schedule, m, kind, zero in product(
                    ("1f1b", "gpipe"), counts, checkpointing, zeros if n > 1 else [Zero()]
                ):
                    whole = schedule, ranks, 1, sizes, m, kind, n, machine.tensor
                    yield Candidate(*whole, zero.stage, zero.reshards, 0, 0, (), ())


CASES: dict[str, dict[str, Any]] = {
    "slow links": {"devices": 4, "links": Links(4e9, 1e-4)},
    "fast links": {"devices": 4, "links": Links(100e9, 1e-5)},
    "memory": {"devices": 4, "links": Links(20e9, 1e-5), "memory": 520 * MIB},
    "zero": {
        "devices": 4,
        "links": Links(40e9, 1e-5),
        "memory": 330 * MIB,
        "zero": [0, 1, 2, 3],
        "checkpointing": ("none",),
    },
    "nodes": {"devices": 4, "links": Links(50e9, 1e-5, 2, 2e9)},
    "tensor": {"devices": 8, "links": Links(10e9, 1e-5), "tensor": 2, "memory": 300 * MIB},
}


@pytest.mark.parametrize("case", CASES)
def test_as_good_as_the_best_of_all_configurations(case: str) -> None:
    given: dict[str, Any] = {"memory": None, "zero": [0], "tensor": 1} | CASES[case]
    links, checkpointing = given["links"], given.get("checkpointing", ("none", "layer"))
    profile = a_profile(5, seed=3)
    machine = Machine(profile, 8, links, given["tensor"])
    found = plan(
        profile,
        given["devices"],
        given["memory"],
        links.bandwidth,
        links.latency,
        8,
        ("gpipe", "1f1b"),
        checkpointing,
        count=100,
        zero_stage=given["zero"],
        tensor_parallel_size=given["tensor"],
        devices_per_node=links.devices_per_node,
        node_bandwidth=links.node_bandwidth,
    )
    for candidate in found:  # and not only the best is predicted exactly
        assert candidate.step_seconds == pytest.approx(machine.seconds(candidate), rel=1e-9)
        assert max(candidate.peak_bytes) == ceil(machine.peak(candidate))
    zeros = [zero for zero in ZEROS if zero.stage in given["zero"]]
    best, which = inf, None
    for one in configurations(machine, given["devices"], zeros, checkpointing):
        if given["memory"] is None or machine.peak(one) <= given["memory"]:
            seconds = machine.seconds(one)
            best, which = (seconds, one) if seconds < best else (best, which)
    assert best * (1 - 1e-9) <= found[0].step_seconds <= 1.01 * best, (found[0], which)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_sums_of_several_stages_on_a_rank_follow_each_other(zero: int) -> None:
    profile, links = a_profile(8, seed=1), Links(8e9, 1e-4)
    machine = Machine(profile, 16, links)
    found = plan(
        profile,
        4,
        None,
        links.bandwidth,
        links.latency,
        16,
        ("interleaved", "zero_bubble"),
        replicas=2,
        zero_stage=zero,
    )
    assert {c.stages_per_rank for c in found} >= {2, 4}
    for candidate in found:
        assert candidate.step_seconds == pytest.approx(machine.seconds(candidate), rel=1e-9)


def test_a_sum_overlaps_the_cool_down() -> None:
    """The last stage has all the gradients, and rank 0 computes a little longer than it."""
    layers = [LayerProfile(str(i), 1.0, 2.0, 0, 0, *[(i > 0) * MIB] * 3) for i in range(2)]
    profile = Profile(tuple(layers), 8, 0)

    def seconds(bandwidth: float) -> float:
        (one,) = plan(
            profile, 4, None, bandwidth, 0.0, 16, ("gpipe",), ("none",), replicas=2, count=1
        )
        assert (one.pipeline_parallel_size, one.num_microbatches) == (2, 8)
        return one.step_seconds

    backward = 2 / 8
    assert seconds(inf) == pytest.approx(9 * 3 / 8)
    assert seconds(MIB / (0.99 * backward)) == seconds(inf)  # 2 (N-1)/N bytes are a MiB
    longer = seconds(MIB / (3 * backward)) - seconds(inf)
    assert longer == pytest.approx(2 * backward)


# -------------------------------------------------------------------------------- what is proposed


def test_every_schedule_and_zero_stage_that_the_strategy_takes() -> None:
    """And none that it refuses; three dozen kinds in all."""
    names = [name for name in SCHEDULES if name != "forward"]
    found = plan(
        a_profile(8), 4, 4096 * MIB, 50e9, 1e-5, 16, names, count=1000, zero_stage=(0, 1, 2, 3)
    )
    kinds = {(c.schedule, c.zero_stage) for c in found if c.data_parallel_size > 1}
    split = {
        (name, stage) for name in ("zero_bubble", "pipedream", "pipedream_2bw") for stage in (0, 1)
    }
    assert kinds >= split | {("1f1b", s) for s in range(4)} | {("interleaved", s) for s in range(4)}
    assert not kinds & {(name, stage) for name, _ in split for stage in (2, 3)}
    assert any(c.reshard_after_forward for c in found)
    for candidate in found:
        config = candidate.strategy_config()
        settings = PipelineStrategy(**config)._settings
        check_schedule(
            settings.schedule,
            settings.num_microbatches,
            settings.stages_per_rank,
            config["pipeline_parallel_size"],
            settings.activation_checkpointing,
            config.get("zero_stage", 0),
        )
        assert candidate.zero_stage == 0 or candidate.data_parallel_size > 1
        assert candidate.devices <= 4


def test_auto_takes_the_lowest_stage_that_fits() -> None:
    profile = a_profile(6)
    options: Any = {"replicas": 4, "batch_size": 16, "activation_checkpointing": ("none",)}
    machine = Machine(profile, 16, Links(50e9))
    stages = []
    for memory in (1200, 800, 600, 480):
        found = plan(profile, 4, memory * MIB, 50e9, zero_stage="auto", **options)
        for one in found:
            for lower in range(one.zero_stage):
                other = replace(one, zero_stage=lower, reshard_after_forward=False)
                assert machine.peak(other) > memory * MIB
        stages.append((found[0].zero_stage, found[0].reshard_after_forward))
    assert stages == [(0, False), (1, False), (2, False), (3, True)]
    with pytest.raises(InfeasibleError) as refused:
        plan(profile, 4, 600 * MIB, 50e9, zero_stage=0, **options)
    assert any("zero_stage=" in remedy for remedy in refused.value.remedies)
    assert "data_parallel_size=4" in refused.value.closest


def test_replicas_are_searched_where_they_have_a_price() -> None:
    profile = a_profile(8)
    few: Any = {"batch_size": 16, "schedules": ("1f1b",)}
    sizes = {c.data_parallel_size for c in plan(profile, 6, bandwidth=10e9, **few)}
    assert sizes == {1, 2}  # of 1, 2, 3, 6 these divide the batch, too
    assert {c.data_parallel_size for c in plan(profile, 6, **few)} == {1}
    costs = Profile.estimated([1.0] * 8)
    assert {c.data_parallel_size for c in plan(costs, 4, bandwidth=1.0, **few)} == {1}
    assert plan(costs, 4, replicas="auto", **few)[0].data_parallel_size == 4


def test_pipedream_waits_for_every_sum_and_2bw_for_none() -> None:
    """In the steady state, with the sum of a batch shorter than the batch."""
    profile, bandwidth = a_profile(6), 40e9
    seconds = {}
    for name in ("pipedream", "pipedream_2bw"):
        for n, width in ((2, bandwidth), (2, inf)):
            (best, *_) = plan(
                profile, 4, None, width, batch_size=16, schedules=(name,), replicas=n, count=1
            )
            seconds[name, width] = best.step_seconds, best
    for name in ("pipedream", "pipedream_2bw"):
        (slow, one), (fast, other) = seconds[name, bandwidth], seconds[name, inf]
        assert one.pipeline_parallel_size == other.pipeline_parallel_size == 2
        if name == "pipedream_2bw":
            messages = 4 * MIB / bandwidth * 8
            assert fast <= slow <= fast + messages
        else:
            gradients = min(
                sum(layer.gradient_bytes for layer in profile.layers[:3]),
                sum(layer.gradient_bytes for layer in profile.layers[3:]),
            )
            assert slow >= fast + 0.8 * one.num_microbatches * gradients / bandwidth


def test_2bw_is_as_slow_as_its_sums() -> None:
    profile, bandwidth = a_profile(6), 1e8
    (best, *_) = plan(
        profile, 4, None, bandwidth, batch_size=16, schedules=("pipedream_2bw",), replicas=2
    )
    assert best.pipeline_parallel_size == 2
    bounds = pairwise([0, *accumulate(best.partition)])
    gradients = [sum(x.gradient_bytes for x in profile.layers[a:b]) for a, b in bounds]
    assert best.step_seconds == pytest.approx(max(gradients) / bandwidth)


# ------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("grid", "slow_links", "slow_rings"),
    [
        (Grid(4), [1], []),  # nodes of two: 0 1 | 2 3
        (Grid(2, 2), [0], []),  # replicas stay inside, as Grid numbers them
        (Grid(1, 4), [], [0]),
        (Grid(4, 1, 2), [0, 1, 2], []),
        (Grid(2, 4), [0], [0, 1]),
        (Grid(3, 2), [0, 1], []),
    ],
    ids=str,
)
def test_which_links_are_between_nodes(
    grid: Grid, slow_links: list[int], slow_rings: list[int]
) -> None:
    links = Links(10.0, 0.0, devices_per_node=2, node_bandwidth=1.0)
    between = [links.between(grid, place, place + 1) for place in range(grid.pipeline - 1)]
    assert [place for place, speed in enumerate(between) if speed == 1.0] == slow_links
    rings = [links.of_replicas(grid, place) for place in range(grid.pipeline)]
    assert [place for place, speed in enumerate(rings) if speed == 1.0] == slow_rings


def test_whole_nodes_or_a_part_of_one() -> None:
    found = plan(
        a_profile(12),
        8,
        None,
        50e9,
        batch_size=24,
        devices_per_node=4,
        node_bandwidth=5e9,
        count=1000,
    )
    assert {c.devices for c in found} <= {1, 2, 3, 4, 8}
    assert accepts("1f1b", Placement.round_robin(8), 8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"replicas": 5}, "replicas=5 must be 1 to 4"),
        ({"replicas": 3, "tensor_parallel_size": 2}, "replicas=3 must be 1 to 2"),
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"zero_stage": ()}, "zero_stage="),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5 must be 1 to 4"),
        ({"devices_per_node": 3, "tensor_parallel_size": 2}, "a multiple of tensor_parallel_size"),
        ({"devices_per_node": 2, "node_bandwidth": 0.0}, "node_bandwidth=0.0"),
        ({"node_bandwidth": 1.0}, "needs devices_per_node"),
        ({"zero_stage": 2, "schedules": ("zero_bubble",), "replicas": 2}, "zero_stage=2"),
    ],
)
def test_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan(**{"profile": a_profile(4), "devices": 4, "batch_size": 8, **options})
