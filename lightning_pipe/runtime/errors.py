"""What can go wrong while a pipeline runs."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """The pipeline cannot go on; the message names rank, stage and micro-batch where known."""


class PeerLostError(PipelineError):
    """Another rank of the pipeline is gone, or did not answer in time.

    It is a consequence, never the cause: the strategy adds the report of the rank that failed.
    """
