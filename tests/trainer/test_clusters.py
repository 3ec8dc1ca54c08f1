"""Ranks that something else starts: torchrun on two nodes, and SLURM with its signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_pipe import PipelineStrategy

from .lit import Classifier, Options, assert_equal_weights, loader, trainer, weights
from .ranks import Ranks

SCRIPT = Path(__file__).with_name("train_on_cluster.py")
LIMIT_S = 100.0
ENDS_S = 10.0


def torchrun(directory: Path, failing: int) -> tuple[list[int], str]:
    """Two agents with two processes each, as on two nodes; their exit codes and what all print."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    output = directory / "output"
    with output.open("w") as file:
        agents = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                    *(f"--node-rank={node}", "--nproc-per-node=2", "--master-addr=127.0.0.1"),
                    *(f"--master-port={port}", str(SCRIPT), str(failing)),
                ],
                env=environment,
                cwd=directory,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for node in range(2)
        ]
    until = time.monotonic() + LIMIT_S
    try:
        codes = [agent.wait(max(0.1, until - time.monotonic())) for agent in agents]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(output.read_text()[-6000:]) from error
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(
                    signal.SIGTERM
                )  # ends the ranks, which have sessions of their own
                agent.wait(20)
    return codes, output.read_text()


def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    L.seed_everything(4, verbose=False)
    module = Classifier()
    trainer(None, max_epochs=1).fit(module, loader())

    codes, output = torchrun(tmp_path, failing=-1)

    assert codes == [0, 0], output
    assert output.count("world: 4") == 4
    assert_equal_weights(torch.load(tmp_path / "weights.pt"), weights(module))


def test_a_rank_that_fails_ends_both_nodes(tmp_path: Path) -> None:
    codes, output = torchrun(tmp_path, failing=2)

    assert 0 not in codes
    assert "ValueError: the user's error" in output
    assert output.count("The cause is on another rank. Rank 2 of 4 failed:") == 3
    assert re.search("pipeline rank 2, stage 2, micro-batch 0, in Forward", output)


@pytest.mark.parametrize("started", ["torchrun", "SLURM"])
def test_a_wrong_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, started: str
) -> None:
    if started == "torchrun":
        variables = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}
    else:
        variables = slurm_variables(0, size=3)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = L.Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(), logger=False)
    with pytest.raises(ValueError, match="You set `devices=2`.* does not match"):
        run.fit(Classifier(), loader())


# -------------------------------------------------------------------------------------------- SLURM


def slurm_variables(rank: int, size: int) -> dict[str, str]:
    return {
        "SLURM_NTASKS": str(size),
        "SLURM_NTASKS_PER_NODE": str(size),
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NODELIST": "127.0.0.1",
    }


def as_slurm_task() -> None:
    """Let this process look as if srun had started it."""
    rank = int(os.environ.pop("LOCAL_RANK"))
    os.environ |= slurm_variables(rank, int(os.environ["NUM_RANKS"]))


def train_in_a_job() -> tuple[str, int, dict[str, Any]]:
    as_slurm_task()
    L.seed_everything(4, verbose=False)
    module = Classifier()
    run = trainer({})
    run.fit(module, loader())
    environment = type(run.strategy.cluster_environment).__name__
    return environment, run.global_rank, weights(module)


def test_slurm_variables(ranks: Ranks) -> None:
    L.seed_everything(4, verbose=False)
    module = Classifier()
    trainer(None).fit(module, loader())

    results = ranks.run(2, train_in_a_job)

    assert [r[:2] for r in results] == [("SLURMEnvironment", 0), ("SLURMEnvironment", 1)]
    assert_equal_weights(results[0][2], weights(module))


class Signalled(Callback):
    """Sends SLURM's signal to this process while it is busy with a batch, maybe waiting."""

    def __init__(self, batch: int, ranks: list[int], validates: bool) -> None:
        self._batch, self._ranks, self._validates = batch, ranks, validates

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        """The validation after the batch before, if that is the place."""
        if self._validates and trainer.fit_loop.total_batch_idx == self._batch - 1:
            os.kill(os.getpid(), signal.SIGUSR2)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if self._validates or trainer.fit_loop.epoch_loop.total_batch_idx != self._batch:
            return
        if trainer.global_rank in self._ranks:
            delay = 0.02 * trainer.global_rank
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        time.sleep(0.1 if trainer.global_rank == 0 else 0.0)  # the others wait for it


class Inside(Classifier):
    """Has no parameters outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        del self.log_temperature
        self.register_buffer("log_temperature", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def train_until_requeued(
    pipeline: Options, batch: int, signalled: list[int], validates: bool, directory: Path
) -> dict[str, Any]:
    as_slurm_task()
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"  # where a scontrol is
    L.seed_everything(4, verbose=False)
    module = Inside().double()
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)  # SIGUSR1 is the test's own
    run = trainer(
        pipeline,
        plugins=[environment],
        callbacks=[Signalled(batch, signalled, validates)],
        default_root_dir=directory,
        val_check_interval=3,
    )
    run.fit(module, loader(64), loader(8))
    return weights(module)


@pytest.mark.parametrize(
    ("schedule", "batch", "signalled", "validates"),
    [
        ("1f1b", 2, [0, 1, 2], False),
        ("1f1b", 3, [0, 1, 2], True),
        ("1f1b", 7, [0], False),
        ("pipedream", 3, [0, 1, 2], False),
    ],
    ids=["before a validation", "in a validation", "in the last batch", "asynchronous"],
)
def test_slurm_requeues_with_a_checkpoint_of_all_ranks(
    ranks: Ranks,
    tmp_path: Path,
    schedule: str,
    batch: int,
    signalled: list[int],
    validates: bool,
) -> None:
    """The signal meets ranks at different moments, some waiting for others; they save together."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)

    where = batch, signalled, validates
    ranks.run(3, train_until_requeued, {"schedule": schedule}, *where, tmp_path)

    (file,) = tmp_path.glob("*.ckpt")
    assert (tmp_path / "requeued").read_text() == "requeue 123456\n"
    saved = torch.load(file, weights_only=False)
    assert saved["global_step"] == batch + 1
    if schedule == "1f1b":
        plain = save_without_pipeline(batch, tmp_path)
        expected = torch.load(plain, weights_only=False)
        for part in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(saved[part], expected[part], rtol=0, atol=1e-10)
        assert_equal_weights(resume(file), resume(plain))


def save_without_pipeline(batch: int, directory: Path) -> Path:
    saving = ModelCheckpoint(
        directory,
        "plain",
        every_n_train_steps=batch + 1,
        save_top_k=-1,
        enable_version_counter=False,
    )
    L.seed_everything(4, verbose=False)
    run = trainer(
        None,
        callbacks=[saving],
        enable_checkpointing=True,
        val_check_interval=3,
        max_steps=batch + 1,
    )
    run.fit(Inside().double(), loader(64), loader(8))
    return directory / "plain.ckpt"


def resume(file: Path) -> dict[str, torch.Tensor]:
    module = Inside().double()
    trainer(None, val_check_interval=3, max_epochs=3).fit(
        module, loader(64), loader(8), ckpt_path=file
    )
    return weights(module)


def signal_in_a_test_run() -> tuple[list[Any], int]:
    """The results, and how often this rank says that nothing is saved."""
    as_slurm_task()
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    run = trainer({}, plugins=[environment], callbacks=[SignalledInTest()])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results = list(run.test(Inside(), loader(), verbose=False))
    return results, sum("neither saved nor requeued" in str(w.message) for w in warned)


class SignalledInTest(Callback):
    def on_test_batch_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)


def test_no_checkpoint_of_a_test_run(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ranks.run(2, signal_in_a_test_run)

    assert all(result[0]["test_loss"] > 0 for result, _ in results)
    assert [warned for _, warned in results] == [1, 0]
