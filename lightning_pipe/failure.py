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
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.distributed import distributed_c10d

from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.trainer_patches import stop_child_observer

_KEY = "lightning_pipe/failure"
_REPORT_WAIT_S = 2.0  # for the report of a rank whose connection closed
_CHILDREN_WAIT_S = 6.0  # for the children to say what they have to say


class FailureGuard:
    """Watches over one rank of a run.

    Attributes:
        failed: Whether this rank or another one has failed: nothing collective works any more.
    """

    def __init__(self) -> None:
        self.failed = False
        self._rank = self._num_ranks = 0
        self._store: Any = None
        self._drop_connections: Callable[[], None] = lambda: None

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
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            self._report(error)
        self._drop_connections()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    def end_children(self, launcher: object) -> None:
        """Give the ranks that this process launched some seconds to end, then end them."""
        if not self.failed or not isinstance(launcher, _SubprocessScriptLauncher):
            return
        stop_child_observer()
        until = time.monotonic() + _CHILDREN_WAIT_S
        while any(child.poll() is None for child in launcher.procs) and time.monotonic() < until:
            time.sleep(0.05)
        for child in launcher.procs:
            if child.poll() is None:
                child.kill()
                child.wait()

    def _report(self, error: BaseException) -> None:
        """Publish this error, or complete it if it is only a consequence of another rank's."""
        consequence = isinstance(error, PeerLostError) or "gloo" in str(error)
        report = self._report_of_another_rank() if consequence else None
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
