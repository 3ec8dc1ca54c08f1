"""The checkpoint half of the adapter: what Lightning saves and loads, for a rank with a part of it.

Whatever the layout was, a checkpoint is that of the whole model, so it can be continued with any
other, or without a pipeline.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.checkpoint import (
    CheckpointError,
    by_names,
    consolidate,
    existing,
    is_directory_checkpoint,
    local_path,
    own_state,
    read_directory,
    remove_directory,
    together,
    write_directory,
)


class PipelineCheckpoints:
    """Saves and loads on one rank.

    Args:
        module: The user's.
        optimizers: Gives the optimizers.
        checkpoint_io: Gives what reads and writes ordinary files.
        saves_directories: Whether each rank writes its own part.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Callable[[], Sequence[Optimizer]],
        checkpoint_io: Callable[[], CheckpointIO],
        saves_directories: bool,
    ) -> None:
        self._module, self._optimizers, self._io = module, optimizers, checkpoint_io
        self._saves_directories = saves_directories
        self._is_copied = False  # whether what was loaded is this rank's own, not a mapped file

    def save(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None
    ) -> None:
        """Write a checkpoint. Collective.

        Args:
            checkpoint: This rank's, with meta tensors for what other ranks own.
            filepath: Rank 0's counts.
            storage_options: For the `CheckpointIO`.

        Raises:
            CheckpointError: On all ranks; what was there before is still there.
        """
        checkpoint = {**checkpoint}
        if "optimizer_states" in checkpoint:
            states = zip(checkpoint["optimizer_states"], self._optimizers(), strict=False)
            checkpoint["optimizer_states"] = [own_state(*each) for each in states]
        if not self._saves_directories:
            consolidate(checkpoint)
            together(filepath, lambda: self._write_file(checkpoint, filepath, storage_options))
            return
        paths: list[Any] = [filepath]
        dist.broadcast_object_list(paths)
        directory = local_path(paths[0])
        if directory is None or storage_options is not None:
            raise CheckpointError(
                paths[0],
                0,
                f"save_distributed_checkpoint=True, storage_options={storage_options}: directories "
                "are written to disks of this machine that all ranks see, without options; choose "
                "such a path, or ordinary files",
            )
        if "optimizer_states" in checkpoint:
            states = zip(checkpoint["optimizer_states"], self._optimizers(), strict=False)
            checkpoint["optimizer_states"] = [by_names(*each, self._module) for each in states]
        write_directory(checkpoint, directory)

    def _write_file(self, checkpoint: dict[str, Any], filepath: _PATH, options: Any) -> None:
        if dist.get_rank() == 0:
            self._io().save_checkpoint(checkpoint, filepath, storage_options=options)

    def load(self, path: _PATH, weights_only: bool | None, with_optimizers: bool) -> dict[str, Any]:
        """Read a file or a directory, and of it what this rank needs.

        Args:
            path: Of an ordinary file, or of a directory.
            weights_only: As for `torch.load`.
            with_optimizers: Whether their states are needed.

        Returns:
            A checkpoint; parts of other ranks are on the meta device, or views of the file.
        """
        state = self._module.state_dict()
        absent = {name for name, value in state.items() if _is_meta(value)}
        place = local_path(path)
        self._is_copied = place is not None and existing(place).is_dir()
        if place is not None and self._is_copied:
            if not is_directory_checkpoint(existing(place)):
                raise FileNotFoundError(
                    f"{path} is a directory without a checkpoint in it: the file .metadata, which "
                    "`torch.distributed.checkpoint` writes, is missing. Give the path of a "
                    "checkpoint."
                )
            checkpoint = read_directory(place, absent, weights_only, with_optimizers)
            weights = OrderedDict(checkpoint["state_dict"])
            weights._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
            checkpoint["state_dict"] = weights  # with the versions of the modules
            return checkpoint
        checkpoint = self._io().load_checkpoint(path, weights_only=weights_only)
        kept_for_later = "state_dict", "optimizer_states"  # copied where they are loaded
        return {
            key: value if key in kept_for_later else _copy(value, absent)
            for key, value in checkpoint.items()
        }

    def load_optimizers(self, checkpoint: Mapping[str, Any], device: torch.device) -> None:
        """Load the optimizer states of this rank's parameters.

        Args:
            checkpoint: What `load` gave.
            device: Where they go.
        """
        for optimizer, state in zip(
            self._optimizers(), checkpoint["optimizer_states"], strict=True
        ):
            own = own_state(state, optimizer)
            # A file may be replaced while its views are in use.
            optimizer.load_state_dict(own if self._is_copied else _copy(own, frozenset()))
            _optimizer_to_device(optimizer, device)

    def remove(self, path: _PATH) -> None:
        """Remove a checkpoint, on rank 0."""
        place = local_path(path)
        if place is not None and is_directory_checkpoint(place) and not place.is_symlink():
            remove_directory(place)
        else:
            self._io().remove_checkpoint(path)


def _copy(tree: Any, absent: frozenset[str] | set[str]) -> Any:
    """Copies of all tensors but those under the name of a weight that another rank owns."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if type(tree) in (dict, OrderedDict):
        own = copy.copy(tree)  # with the versions that a state dict may have
        own.update({k: v if k in absent else _copy(v, absent) for k, v in tree.items()})
        return own
    if type(tree) in (list, tuple):
        return type(tree)(_copy(item, absent) for item in tree)
    return tree


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
