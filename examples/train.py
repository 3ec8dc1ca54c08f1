"""Train what ``conf/`` describes.

python examples/train.py
python examples/train.py experiment=digits_1f1b
python examples/train.py strategy=gpipe trainer.devices=4 strategy.num_microbatches=8
"""

from __future__ import annotations

import csv
from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_pipe import PipelineStrategy


@hydra.main(version_base=None, config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    """Build what the configuration names, train it, and say what came out."""
    L.seed_everything(config.seed)
    model, data = instantiate(config.model), instantiate(config.data)
    trainer = instantiate(config.trainer)
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print_summary(trainer)


def print_summary(trainer: L.Trainer) -> None:
    """Print how the losses fell, where the best weights are, and how the pipeline ran."""
    with Path(trainer.logger.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("train_loss", "val_loss"):
        values = [float(row[name]) for row in rows if row[name]]
        print(f"{name}: {values[0]:.3f} -> {values[-1]:.3f}")
    print(f"checkpoint: {trainer.checkpoint_callback.best_model_path}")
    if isinstance(trainer.strategy, PipelineStrategy):
        print(trainer.strategy.report)


if __name__ == "__main__":
    main()
