"""The evaluation half of the adapter: validation, test and prediction steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from lightning_pipe.relay import StepLogs
from lightning_pipe.runtime.pipeline import Pipeline


class PipelineEvaluation:
    """The user's steps outside of training, on one rank.

    Args:
        pipeline: This rank's.
        logs: Of the steps.
        outputs: Who gets the output of a pipelined call.
    """

    def __init__(self, pipeline: Pipeline, logs: StepLogs, outputs: Literal["all", "last"]) -> None:
        self._pipeline, self._logs, self._outputs = pipeline, logs, outputs

    def step(
        self,
        activity: str,
        prefix: str,
        context: Callable[[], AbstractContextManager[None]],
        step: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:
        """Run the user's step; its pipelined calls go through the stages.

        Args:
            activity: "validation", "test" or "prediction".
            prefix: Of the name of its dataloader.
            context: Of the precision plugin.
            step: The user's.
            args: Of the step.

        Returns:
            What the step returned; ``None`` where this rank's stage has left it.
        """
        number = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        with (
            context(),
            self._logs.evaluation_step(self._outputs),
            self._pipeline.evaluating(activity, f"{prefix}_dataloader", number),
        ):
            return step(*args)
        return None

    def begin(self) -> None:
        """Prepare to share logged values where only the last rank has outputs."""
        if self._outputs == "last":
            self._logs.begin_evaluation()

    def end(self) -> None:
        """Undo :meth:`begin`."""
        self._logs.end_evaluation()
