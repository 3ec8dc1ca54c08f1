"""A user's script that fails on one rank: ``train_until_failure.py RANK PLACE [killed]``."""

from __future__ import annotations

import sys

from trainer.lit import loader, trainer
from trainer.test_rank_failure import NUM_MICROBATCHES, Failing, Killed

if __name__ == "__main__":
    run = trainer({"num_microbatches": NUM_MICROBATCHES})
    kind = Killed if "killed" in sys.argv else Failing
    run.fit(kind(int(sys.argv[1]), sys.argv[2]), loader(), loader())
