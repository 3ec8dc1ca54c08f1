"""Processes that wait for work, one per rank, since each needs seconds to import Lightning.

A function of a test module runs on several of them at once, as ranks of one world:
``ranks.run(2, function, *arguments)`` gives what it returned, by rank. No rank inherits anything
from an earlier run that a process of its own would not have: the process group, the environment
and the working directory are new, and the random states differ by rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

_START_S = 90.0  # for the processes to import Lightning, on a busy machine
_OTHERS_WAIT_S = 5.0  # once a rank has failed, for the others to say what they have to say
_OUTPUT_SHOWN = 4000  # characters of a rank's output, where a run fails


class Ranks:
    """Runs functions on processes that it starts when they are needed first."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._workers: list[_Worker] = []
        self._store: TCPStore | None = None  # of the latest run

    def run(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Run a function on ``size`` ranks and return what it returned, by rank.

        The test fails where the function raises, or does not end in time; it shows then what every
        rank raised or was doing.
        """
        for rank in range(len(self._workers), size):
            self._workers.append(_Worker(rank, Path(self._directory.name, f"rank{rank}")))
        workers = self._workers[:size]
        self._finish(workers, _START_S, "start")
        # Ranks that look for rank 0's store before it is there wait half a second.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for worker in workers:
            worker.run(size, self._store.port, function, arguments)
        return self._finish(workers, timeout, f"{function.__name__} on {size} ranks")

    def _finish(self, workers: Sequence[_Worker], timeout: float, what: str) -> list[Any]:
        until = time.monotonic() + timeout
        while waiting := [w.connection for w in workers if w.outcome is None]:
            if not wait(waiting, max(0.0, until - time.monotonic())):
                break
            for worker in workers:
                worker.look()
            if any(not worker.succeeded for worker in workers if worker.outcome is not None):
                until = min(until, time.monotonic() + _OTHERS_WAIT_S)
        if all(worker.succeeded for worker in workers):
            return [worker.outcome[1] for worker in workers if worker.outcome is not None]
        reports = "\n".join(worker.report() for worker in workers)
        self.close()
        pytest.fail(f"{what}, {timeout} s allowed:\n{reports}")

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []


class _Worker:
    """One process, seen from the test's."""

    def __init__(self, rank: int, output: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank, self._output = rank, output
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(rank, theirs, output))
        self.process.start()
        theirs.close()
        self.outcome: tuple[bool, Any] | None = None

    @property
    def succeeded(self) -> bool:
        return self.outcome is not None and self.outcome[0]

    def run(
        self, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self.outcome = None
        work = pickle.dumps((function, arguments))
        self.connection.send_bytes(pickle.dumps((size, port, work)))

    def look(self) -> None:
        """Take the outcome if it is there."""
        try:
            if self.outcome is None and self.connection.poll():
                self.outcome = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.outcome = False, f"the process ended, exit code {self.process.exitcode}"

    def end(self) -> None:
        """Kill the process, with those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # where it has no group of its own yet
        self.process.join()

    def report(self) -> str:
        """Say how the run ended on this rank, or where it hangs."""
        if self.succeeded:
            return f"-- rank {self.rank}: fine"
        if self.outcome is not None:
            return f"-- rank {self.rank} failed:\n{self.outcome[1]}"
        os.kill(self.process.pid or 0, signal.SIGUSR1)  # see `_serve`
        time.sleep(0.2)
        return f"-- rank {self.rank} hangs:\n{self._output.read_text()[-_OUTPUT_SHOWN:]}"


def _serve(rank: int, connection: Connection, output: Path) -> None:
    """What a process does: one run after the other."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # for dataloaders, as in any process
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {
        "LOCAL_RANK": str(rank),  # Lightning starts no processes where this is set
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in the test's process
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    # Without the seed that a test in the first process may have left, before some ranks started.
    environment = {key: v for key, v in os.environ.items() if key != "PL_GLOBAL_SEED"}
    import lightning_pipe.strategy  # noqa: F401

    connection.send_bytes(pickle.dumps((True, "started")))
    while True:
        try:
            size, port, work = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.clear()
        os.environ |= {**environment, "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
        os.environ["NUM_RANKS"] = str(size)  # Lightning drops WORLD_SIZE after a run
        try:
            _forget_last_run(rank)
            function, arguments = pickle.loads(work)
            message = pickle.dumps((True, function(*arguments)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(message)


def _forget_last_run(rank: int) -> None:
    import numpy as np
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + rank)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
