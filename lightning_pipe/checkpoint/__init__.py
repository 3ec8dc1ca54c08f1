"""Checkpoints of a model whose layers are spread over ranks: ordinary files, and directories."""

from lightning_pipe.checkpoint.consolidate import by_names, consolidate, own_state
from lightning_pipe.checkpoint.directory import write_directory
from lightning_pipe.checkpoint.kinds import read_checkpoint, remove_checkpoint
from lightning_pipe.checkpoint.outcome import CheckpointError, together
from lightning_pipe.checkpoint.single_file import PipelineCheckpointIO
from lightning_pipe.checkpoint.tensors import is_absent, tensors_in, with_tensors

__all__ = [
    "CheckpointError",
    "PipelineCheckpointIO",
    "by_names",
    "consolidate",
    "is_absent",
    "own_state",
    "read_checkpoint",
    "remove_checkpoint",
    "tensors_in",
    "together",
    "with_tensors",
    "write_directory",
]
