"""What cannot work is refused at setup: what was given, what is expected, what to change."""

from lightning_pipe.checks.model import (
    check_batch_size,
    check_batchnorm,
    check_delay,
    check_module,
    check_outside,
    check_tied,
    check_unchanged,
    problems_of_module,
)
from lightning_pipe.checks.options import (
    check_arguments,
    check_schedule,
    check_world,
    check_zero,
)
from lightning_pipe.checks.run import (
    check_accumulation,
    check_checkpoint_io,
    check_optimizers,
    check_precision,
    check_replicas,
    check_trainer,
    expecting_one_optimizer,
    problems_of_trainer,
    warn_of_clipping,
)

__all__ = [
    "check_accumulation",
    "check_arguments",
    "check_batch_size",
    "check_batchnorm",
    "check_checkpoint_io",
    "check_delay",
    "check_module",
    "check_optimizers",
    "check_outside",
    "check_precision",
    "check_replicas",
    "check_schedule",
    "check_tied",
    "check_trainer",
    "check_unchanged",
    "check_world",
    "check_zero",
    "expecting_one_optimizer",
    "problems_of_module",
    "problems_of_trainer",
    "warn_of_clipping",
]
