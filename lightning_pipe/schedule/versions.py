"""Pass: annotate every Forward and Backward with the version of the weights that it must read.

A synchronous schedule updates only when the pipeline is empty, so one version serves the whole
batch. Asynchronous schedules (PipeDream) differ from synchronous ones here and in their `Update`
instructions, and nowhere else.
"""

from __future__ import annotations

from lightning_pipe.schedule.instructions import Backward, Forward
from lightning_pipe.schedule.programs import ComputeOrder


def annotate_versions(order: ComputeOrder) -> ComputeOrder:
    """Give each forward and backward of a synchronous schedule version 0, its batch's only one.

    Args:
        order: Compute order of all ranks.

    Returns:
        The same order, annotated.
    """
    return [
        [
            Forward(step.stage, step.microbatch, version=0)
            if isinstance(step, Forward)
            else Backward(step.stage, step.microbatch, version=0)
            for step in steps
        ]
        for steps in order
    ]
