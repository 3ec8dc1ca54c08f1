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
