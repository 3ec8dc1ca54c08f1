"""Run a script as a user does: Lightning starts the processes of the other ranks itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_MOMENT_S = 5.0


@dataclass
class Ended:
    """A script that has ended.

    Attributes:
        code: its exit code.
        output: of all its processes, both streams, in the order in which a terminal shows it.
        at: the time when it ended.
        gone: the time when all of its processes had.
    """

    code: int
    output: str
    at: float
    gone: float


def run_script(
    *command: str | Path,
    directory: Path,
    num_ranks: int,
    timeout: float = 90.0,
    moment: float = _MOMENT_S,
) -> Ended:
    """Run a Python script; where it does not end in time, or leaves processes behind, fail.

    Args:
        command: path of the script, and its arguments.
        directory: where it runs.
        num_ranks: what `lit.trainer` takes for the number of devices.
        timeout: in seconds.
        moment: seconds that the other processes may take to end after the script.
    """
    log = directory / "output"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=directory,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "NUM_RANKS": str(num_ranks),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(_TESTS),
            },
        )
    try:
        code = process.wait(timeout)
        at = time.time()
        orphans = not _ends(process.pid, moment)
        gone = time.time()
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"hangs after:\n{log.read_text()[-4000:]}") from error
    finally:
        if _group_exists(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not orphans, "processes are left behind"
    return Ended(code, log.read_text(), at, gone)


def _ends(group: int, moment: float) -> bool:
    """Whether all processes end; the other ranks of a script that is done take a moment more."""
    until = time.monotonic() + moment
    while _group_exists(group):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
