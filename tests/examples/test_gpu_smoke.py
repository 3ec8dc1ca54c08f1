"""The script that checks a GPU, tried without one."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

RunScript = Callable[..., str]


def test_without_a_gpu_it_skips_itself(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_smoke.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(repository / "scripts" / "gpu_smoke.py"), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("GPU smoke: skipped, torch finds no CUDA device")


def test_it_runs_on_the_cpu(run_script: RunScript, repository: Path) -> None:
    output = run_script(repository / "scripts" / "gpu_smoke.py", "--device", "cpu", "--short")
    assert output.endswith("GPU smoke: 2 checks passed\n"), output
    assert "| 1f1b | passed | off by " in output
