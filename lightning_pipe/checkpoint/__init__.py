"""Checkpoints of a model whose layers are spread over ranks: ordinary files, and directories."""

from lightning_pipe.checkpoint.consolidate import (
    by_names,
    consolidate,
    own_state,
    parameters_of,
)
from lightning_pipe.checkpoint.directory import write_directory
from lightning_pipe.checkpoint.distributed_tensors import distributed_like, gathered, states_like
from lightning_pipe.checkpoint.kinds import read_checkpoint, remove_checkpoint
from lightning_pipe.checkpoint.outcome import CheckpointError, together
from lightning_pipe.checkpoint.single_file import PipelineCheckpointIO
from lightning_pipe.checkpoint.tensors import is_absent, tensors_in, with_tensors

__all__ = [
    "CheckpointError",
    "PipelineCheckpointIO",
    "by_names",
    "consolidate",
    "distributed_like",
    "gathered",
    "is_absent",
    "own_state",
    "parameters_of",
    "read_checkpoint",
    "remove_checkpoint",
    "states_like",
    "tensors_in",
    "together",
    "with_tensors",
    "write_directory",
]
