"""When a rank fails, all end, and the last thing the user reads is that rank's own report.

The rank that fails leaves its report in the store of the process group and then drops its
connections, so that ranks that wait for it wake up at once. They find the report and raise with
it. A rank that was killed leaves none; its neighbours say which connection was lost.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Sequence
from subprocess import Popen
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_KEY = "lightning_pipe/failure"
_REPORT_WAIT_S = 2.0  # for the report of a rank whose connection closed
_CHILDREN_WAIT_S = 6.0  # for the children to say what they have to say


class FailureReports:
    """The one report of a run, in the process group's store.

    Args:
        rank: This process's, in the world.
        place: Where this rank is in the pipeline, for the report.
    """

    def __init__(self, rank: int, place: str) -> None:
        self._rank, self._place = rank, place
        self._store: Any = distributed_c10d._get_default_store()

    def publish(self, error: BaseException) -> None:
        """Leave this rank's report, unless another rank was first."""
        text = "".join(traceback.format_exception(error))
        report = f"rank {self._rank} ({self._place}) failed:\n{text}"
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0
            if not self._store.check([_KEY]):
                self._store.set(_KEY, report)

    def of_another_rank(self, wait: float = _REPORT_WAIT_S) -> str | None:
        """The report that another rank left; waits a moment for one that is being written."""
        until = time.monotonic() + wait
        with contextlib.suppress(RuntimeError):
            while not self._store.check([_KEY]):
                if time.monotonic() > until:
                    return None
                time.sleep(0.05)
            report = str(self._store.get(_KEY).decode())
            return None if report.startswith(f"rank {self._rank} ") else report
        return None


def drop_connections() -> None:
    """Close the connections to all other ranks, so that none waits for this one."""
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def end_children(children: Sequence[Popen[bytes]]) -> None:
    """Let child processes end by themselves for some seconds, then kill them."""
    until = time.monotonic() + _CHILDREN_WAIT_S
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()
