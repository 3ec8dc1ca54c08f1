"""Two nodes, each a network namespace with addresses and a loopback interface of its own.

Nothing leaves this machine: the namespaces are joined by a pair of virtual interfaces, and have
no other.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from trainer.lit import assert_equal_weights, weights

from .models import BATCH
from .train_on_nodes import LAYOUTS, LINK, MEASURED, POSITIONS, WIDTH, Wide, fit

SCRIPT = Path(__file__).with_name("train_on_nodes.py")
ADDRESSES = "10.254.254.1", "10.254.254.2"
LIMIT_S = 90.0
ENDS_S = 10.0
ACTIVATIONS = BATCH * POSITIONS * WIDTH * 8  # bytes of a batch, between two stages
STAGE = 2 * (WIDTH + 1) * WIDTH * 8  # bytes of the gradients of half of the layers


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def join(names: list[str]) -> None:
    """Make two namespaces, with one interface each that leads to the other."""
    for name in names:
        ip("netns", "add", name)
    here, there = names
    ends = ["name", LINK, "netns", here, "type", "veth", "peer", "name", LINK, "netns", there]
    ip("link", "add", *ends)
    for name, address in zip(names, ADDRESSES, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
        for interface in ("lo", LINK):
            ip("-n", name, "link", "set", interface, "up")


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Two namespaces, by name."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (package iproute2) to make network namespaces")
    names = [f"lightning-pipe-{os.getpid()}-{node}" for node in range(2)]
    try:
        try:
            join(names)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                for process in ip("netns", "pids", name).split():  # if they have not ended yet
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                ip("netns", "delete", name)  # and with it its interfaces


@dataclass
class Outcome:
    codes: list[int]
    outputs: list[str]  # by node
    trained: dict[str, Any]  # by layout
    seconds_to_end: float  # from the failure of a rank to the end of those on the other node


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What torchrun makes of the script on both nodes."""
    directory = tmp_path_factory.mktemp("nodes")
    unwanted = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    files = [directory / f"node{node}" for node in range(2)]
    with two_nodes() as names:
        agents = []
        for node, name in enumerate(names):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            torchrun += [f"--node-rank={node}", "--nproc-per-node=2"]
            torchrun += [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", str(SCRIPT)]
            with files[node].open("w") as file:
                agents.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *torchrun],
                        env=environment,
                        cwd=directory,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        until = time.monotonic() + LIMIT_S
        try:
            codes = [agent.wait(max(0.1, until - time.monotonic())) for agent in agents]
        except subprocess.TimeoutExpired as error:
            text = "\n".join(file.read_text()[-4000:] for file in files)
            raise AssertionError(f"does not end:\n{text}") from error
    outputs = [file.read_text() for file in files]
    missing = [name for name in LAYOUTS if not (directory / f"{name}.pt").exists()]
    assert not missing, "\n".join(output[-6000:] for output in outputs)
    trained = {name: torch.load(directory / f"{name}.pt") for name in LAYOUTS}
    ends = [float((directory / f"ended {rank}").read_text()) for rank in (0, 1)]
    seconds = max(ends) - float((directory / "failed at").read_text())
    return Outcome(codes, outputs, trained, seconds)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_equal_one_device(outcome: Outcome, layout: str) -> None:
    L.seed_everything(3, verbose=False)
    module = Wide()
    fit(module, None)
    assert_equal_weights(outcome.trained[layout]["weights"], weights(module))


def test_of_a_pipeline_one_link_is_between_nodes(outcome: Outcome) -> None:
    between, _ = sent_per_batch(outcome, "pipeline of 4")
    assert 1.0 < between / ACTIVATIONS < 1.5  # as well control messages, and the words of TCP


def test_gradients_of_replicas_stay_inside_a_node(outcome: Outcome) -> None:
    between, inside = sent_per_batch(outcome, "pipeline of 2, 2 replicas")
    assert 1.0 < between / ACTIVATIONS < 1.5  # of both replicas, each with half of the samples
    assert inside > STAGE > 2 * between


def sent_per_batch(outcome: Outcome, layout: str) -> tuple[float, float]:
    """Bytes from the first node to the second, and from one of its ranks to the other."""
    sent = outcome.trained[layout]["sent"]
    first, last = MEASURED
    return sent[LINK] / (last - first), sent["lo"] / (last - first)


def test_a_rank_that_fails_ends_both_nodes(outcome: Outcome) -> None:
    assert 0 not in outcome.codes
    there = outcome.outputs[0]
    assert there.count("The cause is on another rank. Rank 3 of 4 failed:") == 2, there
    assert "pipeline rank 3, stage 3, micro-batch 0, in Forward" in there
    assert "ValueError: the user's error" in outcome.outputs[1]
    assert outcome.seconds_to_end < ENDS_S
