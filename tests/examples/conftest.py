from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the examples, importable as it is for its scripts."""
    folder = REPOSITORY / "examples"
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., str]:
    """Run a script outside of the repository; give what it and the ranks it starts print."""

    def run(
        script: Path,
        *arguments: str,
        python_path: str = "",
        timeout: float = 100.0,
        succeeds: bool = True,
    ) -> str:
        # A session of its own, so that the ranks can be ended together with the script.
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": python_path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{script.name} was still running after {timeout} s:\n{output}")
        assert (process.returncode == 0) == succeeds, output
        return output

    return run
