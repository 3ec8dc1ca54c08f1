"""Train from the last checkpoint on, if there is one: ``train.py [RANK STEP MICROBATCH HOW]``.

With arguments, that rank ends in that micro-batch of that step: HOW is ``kill`` or ``raise``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from trainer.lit import Classifier, loader, samples, trainer, weights

STEPS, EVERY_N_STEPS, BATCH, MICROBATCHES = 30, 4, 8, 4


class Faulty(Classifier):
    """Takes the batch of a step by the step's number, also after a restart, and may fail."""

    def __init__(self, rank: int = -1, step: int = 0, microbatch: int = 0, how: str = "") -> None:
        super().__init__()
        self.fault, self.how, self.calls = (rank, step, microbatch), how, 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = samples(BATCH, seed=self.trainer.global_step).tensors
        return x.double(), y

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fault == (self.trainer.global_rank, self.trainer.global_step, self.calls):
            Path("failed_at").write_text(str(time.time()))
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a fault")
        self.calls += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def last_checkpoint() -> Path | None:
    """Of the working directory."""
    files = {int(path.stem.removeprefix("step=")): path for path in Path().glob("step=*.ckpt")}
    return files[max(files)] if files else None


def fit(module: Faulty, pipeline: dict[str, Any] | None, **options: Any) -> None:
    torch.manual_seed(0)
    module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    run = trainer(pipeline, max_epochs=1, max_steps=STEPS, enable_checkpointing=True, **options)
    resumed = last_checkpoint()
    run.fit(module, loader(STEPS * BATCH, BATCH), ckpt_path=resumed)
    if run.is_global_zero and pipeline is not None:
        torch.save((weights(module), resumed and resumed.name), "final.pt")


if __name__ == "__main__":
    given = [*map(int, sys.argv[1:4]), *sys.argv[4:]]
    saving = ModelCheckpoint(".", "{step}", every_n_train_steps=EVERY_N_STEPS, save_top_k=-1)
    fit(Faulty(*given), {"num_microbatches": MICROBATCHES}, callbacks=[saving])  # type: ignore[arg-type]
