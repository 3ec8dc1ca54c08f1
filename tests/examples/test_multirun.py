"""A sweep: each of its jobs trains in its own folder, with ranks of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

APP = Path(__file__).parent / "user_app"


def test_each_job_has_its_own_ranks_and_folder(
    run_script: Callable[..., str], tmp_path: Path
) -> None:
    """Also after a job that fails. Children write their logs where the job does, and no sweep."""
    app = Path(shutil.copytree(APP, tmp_path / "app")) / "app.py"
    overrides = ["--multirun", "strategy=gpipe", "strategy.num_microbatches=2,100,4"]
    overrides += ["hydra.sweep.dir=sweep"]

    output = run_script(app, *overrides, succeeds=False)

    sweep = tmp_path / "sweep"
    for job in range(3):
        assert (sweep / str(job) / ".hydra" / "overrides.yaml").exists()
        assert (sweep / str(job) / "train_ddp_process_1.log").exists()
    for count in (2, 4):
        assert f"Pipeline: gpipe; stages: 2; micro-batches: {count}; batches: 2" in output
    assert output.count("num_microbatches=100) with a batch of 8") >= 1
    assert {path.name for path in tmp_path.iterdir()} == {"app", "sweep"}
    assert {path.name for path in sweep.iterdir()} == {"0", "1", "2", "multirun.yaml"}
