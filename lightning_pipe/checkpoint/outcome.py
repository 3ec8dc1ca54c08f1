"""All ranks learn whether a checkpoint was written, before any of them goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from lightning_pipe.runtime.errors import PipelineError


class CheckpointError(PipelineError):
    """A checkpoint was not written. All ranks raise it, with what one of them met.

    Args:
        path: Of the checkpoint.
        rank: Which failed.
        reason: What it met, in words.
    """

    def __init__(self, path: object, rank: int, reason: str) -> None:
        super().__init__(
            f"The checkpoint {path} was not written. Rank {rank}: {reason}. A checkpoint that was "
            "there before is unchanged."
        )


def together(path: object, write: Callable[[], None]) -> None:
    """Write, and raise on all ranks if it failed on one. Collective.

    Args:
        path: Of the checkpoint, for the error.
        write: What this rank does.

    Raises:
        CheckpointError: It names the first rank that failed, and why.
    """
    error: Exception | None = None
    try:
        write()
    except Exception as failure:
        error = failure
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if error is None else describe(error))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CheckpointError(path, rank, reason) from error


def describe(error: BaseException) -> str:
    """One line with type and message."""
    return f"{type(error).__name__}: {error}".removesuffix(".")
