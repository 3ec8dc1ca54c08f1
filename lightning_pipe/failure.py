"""When a rank fails, all end, and the last thing the user reads is that rank's own report.

The rank that fails leaves its report in the store of the process group and then drops its
connections, so that ranks that wait for it wake up at once. They find the report and raise with
it. A rank that was killed leaves none; its neighbours say which connection was lost.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_pipe.process_launcher import ProcessLauncher
from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.script_launcher import ScriptLauncher

_KEY = "lightning_pipe/failure"
_DONE = "lightning_pipe/failure/done"  # counts the ranks that need the store no more
_REPORT_WAIT_S = 2.0  # for the report of a rank whose connection closed
_STORE_WAIT_S = 2.0  # for the other ranks to read the report from rank 0's store, or to fail too


class FailureGuard:
    """Watches over one rank of a run.

    Attributes:
        failed: Whether this rank or another one has failed: nothing collective works any more.
    """

    def __init__(self) -> None:
        self.failed = False
        self._rank = self._num_ranks = 0
        self._store: Any = None
        self._drop_connections: Callable[[], None] = _nothing

    def connect(self, rank: int, num_ranks: int, drop_connections: Callable[[], None]) -> None:
        """Use the store of the process group, once there is one."""
        self._rank, self._num_ranks = rank, num_ranks
        self._drop_connections = drop_connections
        self._store = distributed_c10d._get_default_store()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let no rank wait for this one if it fails inside, and let all say why."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """This rank is about to end with an error."""
        if self.failed:
            return
        self.failed = True
        if self._store is None:
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            traceback.clear_frames(error.__traceback__)  # messages under way keep connections open
        else:
            self._report(error)
        if self._rank != 0:
            with contextlib.suppress(RuntimeError):
                self._store.add(_DONE, 1)
        self._drop_connections()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    def end(self, launcher: object, error: BaseException) -> None:
        """Let the other ranks end first: what this one says is read last.

        Args:
            launcher: Of this process. It ends the ranks that it has started, after some seconds.
            error: With which this process ends; which of these ranks were killed is added to it.
        """
        if isinstance(launcher, ProcessLauncher):
            launcher.close()
        elif self.failed and isinstance(launcher, ScriptLauncher) and launcher.procs:
            for sentence in launcher.end():
                error.add_note(f"\n{sentence}")
        elif self.failed and self._rank == 0 and self._store is not None:
            self._keep_store()

    def _keep_store(self) -> None:
        """Wait, for the store ends with this process, until the others need it no more."""
        until = time.monotonic() + _STORE_WAIT_S
        with contextlib.suppress(RuntimeError):
            while self._store.add(_DONE, 0) < self._num_ranks - 1 and time.monotonic() < until:
                time.sleep(0.05)

    def _report(self, error: BaseException) -> None:
        """Publish this error, or complete it if it is only a consequence of another rank's."""
        report = self._report_of_another_rank() if _is_consequence(error) else None
        if report is None:
            self._publish(error)
        else:
            error.add_note(f"\nThe cause is on another rank. {report}")

    def _publish(self, error: BaseException) -> None:
        """Leave this rank's report, unless another rank was first."""
        text = "".join(traceback.format_exception(error))
        report = f"Rank {self._rank} of {self._num_ranks} failed:\n{text}"
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0
            if not self._store.check([_KEY]):
                self._store.set(_KEY, report)

    def _report_of_another_rank(self) -> str | None:
        """The report that another rank left; waits a moment for one that is being written."""
        until = time.monotonic() + _REPORT_WAIT_S
        with contextlib.suppress(RuntimeError):
            while not self._store.check([_KEY]):
                if time.monotonic() > until:
                    return None
                time.sleep(0.05)
            report = str(self._store.get(_KEY).decode())
            return None if report.startswith(f"Rank {self._rank} ") else report
        return None


def _is_consequence(error: BaseException) -> bool:
    """Whether this is how torch says that a connection to another rank is gone."""
    of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return isinstance(error, PeerLostError) or (of_torch and "gloo" in str(error))


def _nothing() -> None:
    """Stand for what there is to do before the ranks are connected."""
