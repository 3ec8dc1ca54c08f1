"""What a wheel holds, and that a user's own Hydra app finds the strategies in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest


def build_wheel(source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(Path(__file__).parents[2], tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_package_and_its_strategies_only(wheel: Path, repository: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightning_pipe"}
    configs = {name for name in names if name.endswith(".yaml")}
    strategies = (repository / "conf" / "strategy").glob("*.yaml")
    assert configs == {f"lightning_pipe/conf/strategy/{path.name}" for path in strategies}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_from_a_source_distribution(wheel: Path, repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, cwd=repository, capture_output=True)
    (source,) = tmp_path.glob("*.tar.gz")
    built = build_wheel(source, tmp_path)
    assert sorted(ZipFile(built).namelist()) == sorted(ZipFile(wheel).namelist())


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A Hydra app outside of the repository."""
    folder = Path(__file__).parent / "user_app"
    return Path(shutil.copytree(folder, tmp_path, dirs_exist_ok=True)) / "app.py"


def test_app_with_an_editable_install(app: Path, run_script: Callable[..., str]) -> None:
    output = run_script(app, "strategy.num_microbatches=4")
    assert "Pipeline: 1f1b; stages: 2; micro-batches: 4; batches: 2" in output


def test_app_with_a_wheel(
    app: Path, wheel: Path, run_script: Callable[..., str], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    ZipFile(wheel).extractall(site)  # all that installing pure Python does
    output = run_script(app, "strategy=gpipe", "devices=1", python_path=str(site))
    assert f"package: {site / 'lightning_pipe'}" in output
    assert "Pipeline: gpipe; stages: 1; micro-batches: 4; batches: 2" in output
