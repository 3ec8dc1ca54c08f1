"""Ordinary checkpoint files: an interrupted write leaves the old one, and loading maps the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.fabric.utilities.types import _PATH

from lightning_pipe.checkpoint.replace import existing, put, unfinished, write_file

_ZIP = b"PK\x03\x04"  # how a file begins that can be mapped


class PipelineCheckpointIO(TorchCheckpointIO):
    """Reads and writes as Lightning's default does, but on local disks safely and sparingly.

    Lightning writes to the directory for temporary files first, and reads all of a file on every
    rank. Remote paths are left to it.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write the file beside its place, then put it there.

        Raises:
            OSError: It cannot be written, and what was there before is still there; also if that
                is a directory other than a checkpoint.
            TypeError: There are storage options, which nothing here understands.
        """
        place = local_path(path)
        if place is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        refuse_other_directory(place)
        place.parent.mkdir(parents=True, exist_ok=True)

        def write(file: BinaryIO) -> None:
            torch.save(checkpoint, file)

        write_file(unfinished(place), write)
        put(unfinished(place), place)

    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Map the file into memory: what is not looked at is not read.

        The tensors are views of the file, and must be copied to outlive it.

        Raises:
            FileNotFoundError: There is no such file.
        """
        place = local_path(path)
        if place is None or not _can_be_mapped(existing(place)):
            return super().load_checkpoint(path, map_location, weights_only)
        loaded: dict[str, Any] = torch.load(
            existing(place), map_location=map_location, weights_only=weights_only, mmap=True
        )
        return loaded


def local_path(path: _PATH) -> Path | None:
    """The path on a disk of this machine, absolute; `None` for one that is elsewhere."""
    if not _is_local_file_protocol(path):
        return None
    return Path(get_filesystem(path)._strip_protocol(str(path)))


def is_directory_checkpoint(path: Path) -> bool:
    """Whether it is a directory into which the ranks have written their parts."""
    return (path / ".metadata").is_file()


def refuse_other_directory(path: Path) -> None:
    """Refuse to replace a directory that is not a checkpoint.

    Raises:
        IsADirectoryError: It is one, and not empty.
    """
    if path.is_dir() and not is_directory_checkpoint(path) and any(path.iterdir()):
        raise IsADirectoryError(
            f"{path} is a directory, and not that of a checkpoint: it is not replaced. Give the "
            "path of the checkpoint itself, e.g. 'checkpoints/epoch=3.ckpt'."
        )


def _can_be_mapped(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP
