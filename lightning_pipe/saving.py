"""The checkpoint half of the adapter: what Lightning saves and loads, for a rank with a part of it.

Whatever the layout was, a checkpoint is that of the whole model, so it can be continued with any
other, or without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_pipe.checkpoint import (
    by_names,
    consolidate,
    distributed_like,
    gathered,
    is_absent,
    own_state,
    parameters_of,
    read_checkpoint,
    remove_checkpoint,
    states_like,
    tensors_in,
    together,
    with_tensors,
    write_directory,
)


class Division(Protocol):
    """What the replicas of this rank's stages divide among them."""

    def keeps_state(self, parameter: Any) -> bool:
        """Whether this rank has the optimizer's state of a parameter."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """Inside, states are loaded as they are."""
        ...


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
            MisconfigurationException: On all ranks; a directory cannot be written there.
        """
        if "optimizer_states" in checkpoint:
            states = zip(checkpoint["optimizer_states"], self._optimizers(), strict=False)
            checkpoint = {**checkpoint, "optimizer_states": [self._own(*each) for each in states]}
        checkpoint = gathered(checkpoint)
        if self._saves_directories:
            write_directory(checkpoint, filepath, storage_options)
            return
        whole = consolidate(checkpoint)
        together(filepath, lambda: self._write_file(whole, filepath, storage_options))

    def _own(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        own = own_state(state, optimizer)
        return by_names(own, optimizer, self._module) if self._saves_directories else own

    def _write_file(self, checkpoint: dict[str, Any], filepath: _PATH, options: Any) -> None:
        if dist.get_rank() == 0:
            lost = [path for path, tensor in tensors_in(checkpoint) if tensor.is_meta]
            if lost:  # added by a hook, on this rank only
                raise RuntimeError(f"no rank has the values of {lost}; let all ranks add them")
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
        weights = self._module.state_dict()
        checkpoint, self._is_copied = read_checkpoint(
            path, self._io(), weights, weights_only, with_optimizers
        )
        return checkpoint

    def weights_of(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint with weights as this rank's module has them: DTensors, where it does."""
        weights = checkpoint["state_dict"]
        return {**checkpoint, "state_dict": distributed_like(weights, self._module.state_dict())}

    def forget_absent_states(self) -> None:
        """Let the optimizers have states of this rank's parameters only.

        Adagrad, for one, begins with a state for all of them.
        """
        for optimizer in self._optimizers():
            for key in [key for key in optimizer.state if is_absent(key)]:
                del optimizer.state[key]

    def load_optimizers(
        self, checkpoint: Mapping[str, Any], device: torch.device, division: Division
    ) -> None:
        """Load the optimizer states of this rank's parameters.

        Args:
            checkpoint: What `load` gave.
            device: Where they go.
            division: Says of which parameters a replica has no states.
        """
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self._optimizers(), states, strict=True):
            own = own_state(state, optimizer, division.keeps_state)
            if not self._is_copied:  # a file may be replaced while its views are in use
                own = with_tensors(own, lambda _, tensor: tensor.clone())
            own = states_like(own, parameters_of(own, optimizer))
            with division.loading():
                optimizer.load_state_dict(own)
            _optimizer_to_device(optimizer, device)

    def remove(self, path: _PATH) -> None:
        """Remove a checkpoint, on rank 0."""
        remove_checkpoint(path, self._io())
