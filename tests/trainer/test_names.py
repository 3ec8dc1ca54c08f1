"""The strategy's short names, and LightningCLI."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipe import PipelineStrategy

from .lit import Classifier, loader, trainer
from .ranks import Ranks
from .scripts import run_script


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("pipe_naive", "naive"), ("pipe_gpipe", "gpipe"), ("pipe_1f1b", "1f1b"),
     ("pipe_interleaved", "interleaved")],
)  # fmt: skip
def test_short_names(ranks: Ranks, name: str, schedule: str) -> None:
    assert ranks.run(2, train_by_name, name) == [schedule, schedule]


def train_by_name(name: str) -> str:
    run = trainer({}, strategy=name, max_epochs=1)
    run.fit(Classifier(), loader())
    assert isinstance(run.strategy, PipelineStrategy)
    assert run.strategy.report is not None
    return run.strategy.report.schedule


CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  strategy:
    class_path: lightning_pipe.strategy.PipelineStrategy
    init_args:
      schedule: interleaved
      num_microbatches: 4
      stages_per_rank: 2
      partition: [2, 2, 2, 2]
      timeout: 0:05:00
model:
  class_path: trainer.lit.Classifier
  init_args: {dropout: 0.1}
data:
  class_path: trainer.lit.Samples
"""

SCRIPT = """
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    cli = LightningCLI()
    report = cli.trainer.strategy.report
    print("ran", report.schedule, len(report.stages), report.num_microbatches)
"""


def test_lightning_cli(tmp_path: Path) -> None:
    """The strategy's arguments come from YAML and from the command line, by its dotted name."""
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    override = "--trainer.strategy.init_args.num_microbatches=8"

    command = ["script.py", "fit", "--config", "pipeline.yaml", override]
    ended = run_script(*command, directory=tmp_path, num_ranks=2)

    assert ended.code == 0, ended.output
    assert "ran interleaved 4 8" in ended.output
