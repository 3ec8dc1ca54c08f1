"""A schedule of your own: GPipe in waves of P micro-batches, the most that a rank then keeps.

Prints how it differs from GPipe, and trains the digits with it on two processes.
"""

import lightning as L
from minimal import DigitsClassifier, digits

from lightning_pipe import PipelineStrategy, register_schedule
from lightning_pipe.schedule import Backward, Forward, Placement, make_plan, text_grid


def waves(placement, num_microbatches):
    size = placement.num_ranks
    for rank in range(placement.num_ranks):
        steps = []
        for first in range(0, num_microbatches, size):
            wave = range(first, min(first + size, num_microbatches))
            for stage in placement.stages_of(rank):
                steps += [Forward(stage, i) for i in wave]
            for stage in reversed(placement.stages_of(rank)):
                steps += [Backward(stage, i) for i in wave]
        yield steps


register_schedule("waves", waves)  # before the Trainer starts: each rank runs this script

if __name__ == "__main__":
    for schedule in ("gpipe", "waves"):
        print(schedule, text_grid(make_plan(schedule, Placement.round_robin(2), 6)), sep="\n")
    L.seed_everything(1)
    strategy = PipelineStrategy(schedule="waves", num_microbatches=6)
    trainer = L.Trainer(max_epochs=12, accelerator="cpu", devices=2, strategy=strategy)
    trainer.fit(DigitsClassifier(), digits())
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.1%}")
