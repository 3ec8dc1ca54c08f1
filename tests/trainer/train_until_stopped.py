"""A user's script that is asked to stop: ``train_until_stopped.py SCHEDULE RANK SECONDS [ctrl-c]``.

The process of that rank receives SIGTERM so long after the second batch; or all processes SIGINT,
as a terminal sends it. Every rank writes its
last batch, and when its fit has ended, to files.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from trainer.lit import trainer
from trainer.test_stopping import SCHEDULES, Chain, loader, number_of


class AskedSoon(Callback):
    def __init__(self, rank: int, seconds: float) -> None:
        self._rank, self._seconds = rank, seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(0.005)
        if number_of(trainer) == 2 and trainer.global_rank == self._rank:
            threading.Timer(self._seconds, self.be_asked).start()

    def be_asked(self) -> None:
        Path(f"asked{self._rank}").write_text(str(time.time()))
        if "ctrl-c" in sys.argv:
            os.killpg(0, signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        Path(f"last{trainer.global_rank}").write_text(str(number_of(trainer)))


if __name__ == "__main__":
    schedule, rank, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    asked = AskedSoon(rank, seconds)
    saving = ModelCheckpoint(".", "stopped", save_on_exception=True, save_top_k=0)
    run = trainer(
        SCHEDULES.get(schedule),
        callbacks=[asked, saving],
        enable_checkpointing=True,
        max_epochs=-1,
        val_check_interval=10,
    )
    try:
        run.fit(Chain(), loader(), loader(2))
    finally:
        Path(f"ended{run.global_rank}").write_text(str(time.time()))
