"""Checkpoints of a model whose layers are spread over ranks: ordinary files, and directories."""

from lightning_pipe.checkpoint.consolidate import by_names, consolidate, own_state
from lightning_pipe.checkpoint.directory import read_directory, write_directory
from lightning_pipe.checkpoint.outcome import CheckpointError, together
from lightning_pipe.checkpoint.replace import existing, remove_directory
from lightning_pipe.checkpoint.single_file import (
    PipelineCheckpointIO,
    is_directory_checkpoint,
    local_path,
)

__all__ = [
    "CheckpointError",
    "PipelineCheckpointIO",
    "by_names",
    "consolidate",
    "existing",
    "is_directory_checkpoint",
    "local_path",
    "own_state",
    "read_directory",
    "remove_directory",
    "together",
    "write_directory",
]
