"""When user code fails on one rank, all ranks end soon, and its own report is what is read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_pipe import failure, script_launcher
from lightning_pipe.script_launcher import ScriptLauncher

from .lit import Classifier, loader, trainer
from .ranks import Ranks
from .scripts import Ended, run_script

NUM_RANKS, NUM_MICROBATCHES, BATCH_IDX = 3, 4, 1
LIMIT_S = 10.0

PLACES = {
    # Where user code fails, and what the report says of it besides rank and traceback.
    "training_step": "stage {rank}, micro-batch 2, in Forward",
    "layer": "stage {rank}, micro-batch 2, in Forward",
    "validation_step": "",
    "on_train_batch_start": "",
}


class UserError(Exception):
    """What user code raises here."""


class Failing(Classifier):
    """Fails on one rank, in the second batch, after the epoch's start has gone well."""

    def __init__(self, rank: int, place: str) -> None:
        super().__init__()
        self.rank, self.place, self.calls = rank, place, 0
        for layer in self.model:
            layer.register_forward_pre_hook(self.in_layer)

    def fail_in(self, place: str) -> None:
        if place == self.place and self.trainer.global_rank == self.rank:
            print(f"failing at {time.time()}", flush=True)
            raise UserError(f"the user's error in {place}")

    def in_layer(self, *_: Any) -> None:
        if self.calls == NUM_MICROBATCHES * BATCH_IDX + 3:
            self.fail_in("layer")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        if self.calls == NUM_MICROBATCHES * BATCH_IDX + 3:
            self.fail_in("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])
        self.fail_in("validation_step")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH_IDX:
            self.fail_in("on_train_batch_start")


class Killed(Failing):
    """Is killed instead, as by a system that is out of memory."""

    def fail_in(self, place: str) -> None:
        if place == self.place and self.trainer.global_rank == self.rank:
            print(f"failing at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


class FailingWhileLate(Failing):
    """Fails on one rank before another one has heard of the batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCH_IDX and self.trainer.global_rank == self.rank + 1:
            time.sleep(0.5)


def fit(rank: int, place: str, kind: type[Failing] = Failing) -> str:
    """What a rank raises."""
    module = kind(rank, place)
    try:
        trainer({"num_microbatches": NUM_MICROBATCHES}).fit(module, loader(), loader())
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return "nothing failed"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_every_rank_raises_with_the_report(ranks: Ranks, rank: int, place: str) -> None:
    """Although it waits for the one that has failed, and that one lives on."""
    ranks.run(NUM_RANKS, time.time)  # they have to start first
    start = time.monotonic()

    results = ranks.run(NUM_RANKS, fit, rank, place)

    assert time.monotonic() - start < LIMIT_S
    for here, message in enumerate(results):
        assert_report(message, rank, place)
        assert here == rank or f"Rank {rank} of {NUM_RANKS} failed" in message


def test_a_rank_that_hears_of_the_failure_in_between_wakes_the_next(ranks: Ranks) -> None:
    """It has taken the failed rank's last message, and its traceback must not hold on to it."""
    results = ranks.run(NUM_RANKS, fit, 0, "training_step", FailingWhileLate)

    for message in results:
        assert_report(message, 0, "training_step")


@pytest.mark.parametrize(
    ("rank", "place"),
    [(0, "on_train_batch_start"), (2, "validation_step")],
)
def test_the_report_is_what_the_user_reads_last(rank: int, place: str, tmp_path: Path) -> None:
    """A script that Lightning started on all ranks ends as a whole; no other traceback follows."""
    script = Path(__file__).with_name("train_until_failure.py")

    ended = run_script(script, str(rank), place, directory=tmp_path, num_ranks=NUM_RANKS)

    assert ended.code != 0
    assert_soon(ended)
    before, last = ended.output.rsplit("Traceback (most recent call last)", 1)
    named = "[rank0]: " if rank == 0 else f"Rank {rank} of {NUM_RANKS} failed:"
    assert named in before[-60:]
    assert_report(re.sub(r"(?m)^\[rank\d\]: ", "", last), rank, place)


@pytest.mark.parametrize("rank", [0, 1])  # all of them: tests/soak
def test_a_rank_that_is_killed_ends_all(rank: int, tmp_path: Path) -> None:
    """The neighbours say whom they lost, and where; rank 0, if it can, which one was killed."""
    script = Path(__file__).with_name("train_until_failure.py")

    ended = run_script(
        *(script, str(rank), "layer", "killed"),
        directory=tmp_path,
        num_ranks=NUM_RANKS,
        moment=2 * LIMIT_S,
    )

    assert ended.code != 0
    assert_soon(ended)
    neighbour = 1 if rank == 0 else rank - 1
    assert re.search(
        rf"PeerLostError: .*(from|to) rank {rank}\b.*\n.* stage {neighbour}, micro-batch \d",
        ended.output,
    )
    if rank > 0:
        last = ended.output.rstrip().splitlines()[-1]
        assert re.search(rf"Rank {rank} \(process \d+\) was killed by SIGKILL\.", last)


class FromUser(RuntimeError):
    """A user's error that says a word of torch's."""


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (ValueError("no backend but gloo"), False),
        (FromUser("no backend but gloo"), False),
        (RuntimeError("[third_party/gloo/gloo/pair.cc:538] Connection closed by peer"), True),
        (dist.DistBackendError("[third_party/gloo/gloo/pair.cc:538] Timed out"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_torch_says_that_another_rank_is_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_consequence: bool
) -> None:
    store = dist.HashStore()
    store.set(failure._KEY, "Rank 1 of 2 failed: whatever")
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    guard = failure.FailureGuard()
    guard.connect(0, 2, lambda: None)

    guard.fail(error)

    notes = getattr(error, "__notes__", [])
    assert any("Rank 1 of 2 failed" in note for note in notes) == is_consequence


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGRTMIN + 3])
def test_another_node_names_its_own_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sent: int
) -> None:
    """Rank 2 has started rank 3 on the second node, where rank 3 is killed."""
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setattr(script_launcher, "_GRACE_S", 0.1)
    ended = threading.Event()
    system = SimpleNamespace(kill=lambda pid, number: ended.set(), getpid=os.getpid)
    monkeypatch.setattr(script_launcher, "os", system)
    launcher = ScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=2)

    def start() -> None:
        launcher.procs = [subprocess.Popen(["sleep", "60"])]
        launcher.procs[0].send_signal(sent)

    monkeypatch.setattr(launcher, "_call_children_scripts", start)

    assert launcher.launch(ended.wait, 10.0)

    name = "SIGKILL" if sent == signal.SIGKILL else f"signal {sent}"
    (sentence,) = launcher.end()
    assert sentence == f"Rank 3 (process {launcher.procs[0].pid}) was killed by {name}."
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Rank 2 has not ended" in printed


class Sleeping(Failing):
    """Does not come back from a layer for longer than the others wait."""

    def fail_in(self, place: str) -> None:
        if place == self.place and self.trainer.global_rank == self.rank:
            self.place = "nowhere"  # the stage's next layer does not sleep
            time.sleep(3.5)


def stall(rank: int) -> str:
    pipeline = {"num_microbatches": NUM_MICROBATCHES, "timeout": timedelta(seconds=2)}
    try:
        trainer(pipeline).fit(Sleeping(rank, "layer"), loader())
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return "nothing failed"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_stalls_ends_all_by_the_timeout(ranks: Ranks, rank: int) -> None:
    ranks.run(NUM_RANKS, time.time)
    start = time.monotonic()

    results = ranks.run(NUM_RANKS, stall, rank)

    assert time.monotonic() - start < LIMIT_S
    for message in results:
        assert re.search(r"PeerLostError: .* rank \d.*\n.* stage \d, micro-batch \d", message)
    neighbour = 1 if rank == 0 else rank - 1
    assert re.search(rf"PeerLostError: .*(from|to) rank {rank}\b", results[neighbour])
    assert "imed out" in results[neighbour]


def assert_soon(ended: Ended) -> None:
    failed_at = float(re.findall(r"failing at ([\d.]+)", ended.output)[-1])
    assert ended.gone - failed_at < LIMIT_S


def assert_report(message: str, rank: int, place: str) -> None:
    assert f"the user's error in {place}" in message
    assert "in fail_in\n    raise UserError" in message, "the traceback of the user's code"
    assert PLACES[place].format(rank=rank) in message
