"""Start the script once for each rank, and end all of them when one dies.

Lightning's launcher does so as well, but kills the process of rank 0 within five seconds after
another rank has died, often before it has said why. Here it gets the time to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_pipe import sweeps
from lightning_pipe.trainer_patches import started_by

_LOOK_S = 0.2
_GRACE_S = 7.0  # for this process to notice that a rank is gone, and to begin to say so
_CHILDREN_WAIT_S = 6.0  # for the children to say what they have to say


_sweep_jobs = sweeps.SweepJobs()  # of this process


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script in a process for each rank of this machine; rank 0 is this process."""

    _watch: _Watch | None = None

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the other ranks, unless something else has, and run a function of the Trainer.

        Args:
            function: To run.
            args: Its arguments.
            trainer: Whose function it is.
            kwargs: Its arguments.

        Returns:
            What the function returned on this rank.
        """
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        in_sweep = _sweep_jobs.begin()
        if not environment.creates_processes_externally:
            with started_by(sweeps.command) if in_sweep else nullcontext():
                self._call_children_scripts()
            self._watch = _Watch(self.procs, self._first_rank)
            self._watch.start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def end(self) -> list[str]:
        """Give the other ranks some seconds to end, then end them.

        Returns:
            Which of them had been killed, by whatever signal; one sentence for each.
        """
        if self._watch is not None:
            self._watch.stopped.set()
        until = time.monotonic() + _CHILDREN_WAIT_S
        while any(child.poll() is None for child in self.procs) and time.monotonic() < until:
            time.sleep(0.05)
        killed = _killed(self.procs, self._first_rank)
        for child in self.procs:
            if child.poll() is None:
                child.kill()
                child.wait()
        return killed

    @property
    def _first_rank(self) -> int:
        """Of this machine: this process, if it has started the others."""
        return int(self.cluster_environment.node_rank()) * self.num_processes


class _Watch(threading.Thread):
    """Kills all ranks, this process included, some time after one of the others has failed.

    Args:
        children: The other ranks of this machine, in order.
        first_rank: Of this process.

    Attributes:
        stopped: Set when this process takes care of it.
    """

    def __init__(self, children: Sequence[subprocess.Popen[Any]], first_rank: int) -> None:
        super().__init__(daemon=True, name="lightning-pipe-ranks")
        self._children, self._first_rank = children, first_rank
        self.stopped = threading.Event()

    def run(self) -> None:
        """Look, until all have ended well."""
        while not self.stopped.wait(_LOOK_S):
            codes = [child.poll() for child in self._children]
            if all(code == 0 for code in codes):
                return
            if any(codes):
                self._give_time()
                return

    def _give_time(self) -> None:
        if self.stopped.wait(_GRACE_S):
            return
        first = self._first_rank
        failed = _killed(self._children, first) or [
            f"Rank {rank} (process {child.pid}) failed with exit code {child.returncode}."
            for rank, child in enumerate(self._children, first + 1)
            if child.returncode
        ]
        print(
            *failed,
            f"Rank {first} has not ended within {_GRACE_S:.0f} s since, so all ranks "
            "of this machine are killed.",
            file=sys.stderr,
            flush=True,
        )
        for child in self._children:
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL)


def _killed(children: Sequence[subprocess.Popen[Any]], first_rank: int) -> list[str]:
    return [
        f"Rank {rank} (process {child.pid}) was killed by {_signal_name(-child.returncode)}."
        for rank, child in enumerate(children, first_rank + 1)
        if child.returncode is not None and child.returncode < 0
    ]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"
