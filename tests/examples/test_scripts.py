"""The examples, run as a user runs them: in processes of their own."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

RunScript = Callable[..., str]
SHORT = ["trainer.limit_train_batches=4", "trainer.val_check_interval=2"]
SHORT += ["trainer.limit_val_batches=2", "trainer.enable_progress_bar=false"]


def the_only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def losses(run: Path) -> dict[str, float]:
    """The training losses and the validation losses by step."""
    with (run / "csv" / "metrics.csv").open() as file:
        return {
            f"{name} {row['step']}": float(row[name])
            for row in csv.DictReader(file)
            for name in ("train_loss", "val_loss")
            if row[name]
        }


def test_minimal(run_script: RunScript, examples: Path) -> None:
    output = run_script(examples / "minimal.py")
    accuracy = re.search(r"^validation accuracy: ([\d.]+)%$", output, re.MULTILINE)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 95


def test_train_as_on_one_device(run_script: RunScript, examples: Path, tmp_path: Path) -> None:
    from gpt import LitGPT

    output = run_script(examples / "train.py", *SHORT)
    run = the_only(tmp_path, "outputs/*")
    assert the_only(run, "train_ddp_process_1.log")  # rank 1 has written to the same folder
    assert "Pipeline: 1f1b; stages: 2; micro-batches: 8; batches: 4" in output
    assert re.search(r"^bubble: predicted 11.1%, measured ", output, re.MULTILINE)

    checkpoint = the_only(run, "checkpoints/*.ckpt")
    assert f"checkpoint: {checkpoint}" in output
    assert LitGPT.load_from_checkpoint(checkpoint).hparams.depth == 4

    run_script(examples / "train.py", *SHORT, "strategy=single", "hydra.run.dir=single")
    assert losses(run) == pytest.approx(losses(tmp_path / "single"), abs=1e-4)
    assert len(losses(run)) == 4 + 2


def test_train_with_overrides(run_script: RunScript, examples: Path, tmp_path: Path) -> None:
    output = run_script(
        examples / "train.py",
        "strategy=gpipe",
        "trainer.devices=4",
        "strategy.num_microbatches=8",
        "strategy.activation_checkpointing=stage",
        "model.width=32",
        "model.context=16",
        *SHORT,
    )
    run = the_only(tmp_path, "outputs/*")
    assert len(list(run.glob("train_ddp_process_?.log"))) == 3
    assert the_only(run, "checkpoints/*.ckpt")
    assert "Pipeline: gpipe; stages: 4; micro-batches: 8; batches: 4" in output


def test_train_pipedream(run_script: RunScript, examples: Path, tmp_path: Path) -> None:
    options = ["strategy=pipedream", "strategy.vertical_sync=true", "trainer.devices=3"]
    output = run_script(examples / "train.py", *options, *SHORT)
    assert "Pipeline: pipedream; stages: 3; micro-batches: 1; batches: 4" in output
    logged = [name.split()[0] for name in losses(the_only(tmp_path, "outputs/*"))]
    assert logged.count("train_loss") == 4
    assert logged.count("val_loss") == 2


def test_tensor_parallel(run_script: RunScript, examples: Path, tmp_path: Path) -> None:
    output = run_script(examples / "tensor_parallel.py")
    loss = re.search(r"^validation loss: ([\d.]+) nats per byte$", output, re.MULTILINE)
    assert loss is not None, output
    assert float(loss[1]) < 4.0  # it begins at log(256), about 5.5
    assert "parameters in the file: 134400" in output
    assert (tmp_path / "tensor_parallel.ckpt").is_file()


@pytest.mark.timeout(400)
def test_compare_schedules(run_script: RunScript, examples: Path, tmp_path: Path) -> None:
    from compare_schedules import HEADER, SCHEDULES

    options = ["--quick", "--tasks", "digits"]
    output = run_script(examples / "compare_schedules.py", *options, timeout=380)

    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("task "))
    columns = [lines[start].index(name) for name in HEADER]
    table = {}
    for line in lines[start + 1 : start + 1 + len(SCHEDULES)]:
        cells = [line[i:j].strip() for i, j in zip(columns, [*columns[1:], None], strict=True)]
        assert cells[0] == "digits"
        table[cells[1]] = dict(zip(HEADER[2:], cells[2:], strict=True))
    assert set(table) == set(SCHEDULES)

    def accuracy(schedule: str) -> float:
        return float(table[schedule]["accuracy"].rstrip("%"))

    assert accuracy("1f1b") > 95
    assert accuracy("pipedream, weight stashing") >= accuracy("1f1b") - 1
    staleness = {schedule: table[schedule]["staleness"] for schedule in SCHEDULES}
    assert staleness == {
        "naive": "0 0 0 0",
        "gpipe": "0 0 0 0",
        "1f1b": "0 0 0 0",
        "pipedream, weight stashing": "3 2 1 0",
        "pipedream, vertical sync": "3 3 3 3",
        "pipedream, no stashing": "3 2 1 0",
        "pipedream_2bw": "1 1 1 1",
    }
    assert table["pipedream, weight stashing"]["versions"] == "4 3 2 1"
    assert table["pipedream, no stashing"]["versions"] == "1 1 1 1"
    # The same weights and batches: synchronous schedules give the same.
    assert len({table[name]["val. loss"] for name in ("naive", "gpipe", "1f1b")}) == 1
    assert (tmp_path / "outputs" / "compare_schedules.png").stat().st_size > 10_000
