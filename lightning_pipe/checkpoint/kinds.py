"""What is at a path may be a file or a directory: read it, or remove it, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch import Tensor

from lightning_pipe.checkpoint.directory import read_directory
from lightning_pipe.checkpoint.replace import existing, remove_directory, remove_replaced
from lightning_pipe.checkpoint.single_file import is_directory_checkpoint, local_path
from lightning_pipe.checkpoint.tensors import KeyPath, is_absent, with_tensors

_COPIED_LATER = "state_dict", "optimizer_states"  # where they are loaded


def read_checkpoint(
    path: _PATH,
    io: CheckpointIO,
    weights: Mapping[str, Any],
    weights_only: bool | None,
    with_optimizers: bool,
) -> tuple[dict[str, Any], bool]:
    """Read a checkpoint, and of it what this rank needs. Not collective.

    Args:
        path: Of an ordinary file, or of a directory.
        io: Reads files.
        weights: The module's, as `read_directory` takes them.
        weights_only: As for `torch.load`.
        with_optimizers: Whether their states are needed.

    Returns:
        The checkpoint, and whether weights and optimizer states are this rank's own. If not, they
        may be views of a file, and must be copied to outlive it.

    Raises:
        FileNotFoundError: There is none.
    """
    place = local_path(path)
    if place is not None and existing(place).is_dir():
        return read_directory(place, weights, weights_only, with_optimizers), True
    absent = {name for name, value in weights.items() if is_absent(value)}

    def copied(path: KeyPath, tensor: Tensor) -> Tensor:
        return tensor if absent.intersection(path) else tensor.clone()

    loaded = io.load_checkpoint(path, weights_only=weights_only)
    rest = {key: value for key, value in loaded.items() if key not in _COPIED_LATER}
    return {**loaded, **with_tensors(rest, copied)}, False


def remove_checkpoint(path: _PATH, io: CheckpointIO) -> None:
    """Remove a checkpoint, by ``io`` if it is a file. Not collective."""
    place = local_path(path)
    if place is not None:
        remove_replaced(place)  # first: without the real one it would be found in its place
    if place is not None and is_directory_checkpoint(place) and not place.is_symlink():
        remove_directory(place)
    else:
        io.remove_checkpoint(path)
