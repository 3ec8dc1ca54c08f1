"""Checkpoints as directories, into which each rank writes what it owns.

The files are those of `torch.distributed.checkpoint`, with the names that Lightning's strategies
give them: the weights are under ``model``, the state of an optimizer is under ``optimizer_0``, by
the names of the parameters, and what is alike on all ranks is in ``meta.pt``. So ``python -m
lightning.pytorch.utilities.consolidate_checkpoint`` makes an ordinary file of it. A tensor is
written whole by one rank, whatever the stages were, and a rank reads those that it owns now.
"""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _PATH
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_pipe.checkpoint.outcome import CheckpointError, describe, together
from lightning_pipe.checkpoint.replace import (
    existing,
    put,
    remove,
    remove_if_possible,
    showing_system_errors,
    unfinished,
    write_file,
)
from lightning_pipe.checkpoint.single_file import (
    is_directory_checkpoint,
    local_path,
    refuse_other_directory,
)
from lightning_pipe.checkpoint.tensors import KeyPath, is_absent, tensors_in

_REST = "meta.pt"
_WEIGHTS = "model"
_OPTIMIZER = re.compile(r"optimizer_(\d+)")


def write_directory(
    checkpoint: Mapping[str, Any], filepath: _PATH, storage_options: Any = None
) -> None:
    """Write a checkpoint, each rank its part. Collective.

    Args:
        checkpoint: This rank's, with meta tensors for what others own, and with optimizer states
            by the names of the parameters. What more than one rank has is written by the lowest.
        filepath: Rank 0's counts. What is there is replaced when all is written.
        storage_options: There can be none.

    Raises:
        CheckpointError: On all ranks; what was there before is still there.
        MisconfigurationException: On all ranks, if it is not for a disk that they see.
    """
    first = dist.get_rank() == 0
    path = _shared_place(filepath, storage_options)
    beside = unfinished(path)
    split, with_state = _agree(checkpoint)
    leaves: dict[KeyPath, Any] = {}

    def prepare() -> None:
        leaves.update(_leaves_of(checkpoint, split, with_state))
        if first:
            refuse_other_directory(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            remove(beside)
            beside.mkdir()

    def finish() -> None:
        if first:
            rest = {key: value for key, value in checkpoint.items() if key not in split}
            write_file(beside / _REST, lambda file: torch.save(rest, file))
            put(beside, path)

    try:
        together(path, prepare)
        _write_parts(leaves, beside, path)
        together(path, finish)
    except BaseException:
        if first:
            remove_if_possible(beside)
        raise


def _shared_place(filepath: _PATH, storage_options: Any) -> Path:
    """Rank 0's path, if a directory can be written there. Collective."""
    options = None if storage_options is None else repr(storage_options)
    asked: list[Any] = [filepath, options]
    dist.broadcast_object_list(asked)
    path = local_path(asked[0])
    if path is None or asked[1] is not None:
        raise MisconfigurationException(
            f"PipelineStrategy(save_distributed_checkpoint=True), checkpoint {asked[0]}, "
            f"storage_options={asked[1]}: directories are written to disks of this machine that "
            "all ranks see, without options. Choose such a path, or ordinary files."
        )
    return path


def read_directory(
    path: Path, weights: Mapping[str, Any], weights_only: bool | None, with_optimizers: bool
) -> dict[str, Any]:
    """Read this rank's part of a checkpoint. Not collective.

    Args:
        path: Of the directory.
        weights: The module's, as its state dict, which says how its modules are versioned. Of
            those on the meta device, which other ranks own, no optimizer state is read.
        weights_only: As for `torch.load`.
        with_optimizers: Whether to read their states at all.

    Returns:
        A checkpoint as Lightning has it, with meta tensors for what other ranks own.

    Raises:
        FileNotFoundError: It is another directory.
    """
    path = existing(path)
    if not is_directory_checkpoint(path):
        raise FileNotFoundError(
            f"{path} is a directory without a checkpoint in it: the file .metadata, which "
            "`torch.distributed.checkpoint` writes, is missing. Give the path of a checkpoint."
        )
    absent = {name for name, value in weights.items() if is_absent(value)}
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    read: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        key_path = metadata.planner_data[name]
        elsewhere = any(key in absent for key in key_path)
        if _OPTIMIZER.fullmatch(str(key_path[0])) and (elsewhere or not with_optimizers):
            continue
        if not isinstance(stored, TensorStorageMetadata):
            read[name] = None
        elif elsewhere:
            twin = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            set_element(tree, key_path, twin)
        else:
            read[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    # The public `load` can do without the other ranks from torch 2.7 only.
    _load_state_dict(read, reader, no_dist=True, planner=_LoadPlanner(weights_only))
    for name, value in read.items():
        set_element(tree, metadata.planner_data[name], value)
    rest = torch.load(path / _REST, map_location="cpu", weights_only=weights_only)
    return {**rest, **_as_lightning_has_it(tree, getattr(weights, "_metadata", None))}


def _as_lightning_has_it(tree: dict[str, Any], versions: Any) -> dict[str, Any]:
    if _WEIGHTS in tree:
        state_dict = tree["state_dict"] = OrderedDict(tree.pop(_WEIGHTS))
        state_dict._metadata = versions  # type: ignore[attr-defined]
    numbers = sorted(int(match[1]) for key in tree if (match := _OPTIMIZER.fullmatch(key)))
    if numbers:
        tree["optimizer_states"] = [tree.pop(f"optimizer_{number}") for number in numbers]
        for state in tree["optimizer_states"]:
            state.setdefault("state", {})  # this rank may have no trained parameter
    return tree


def _agree(checkpoint: Mapping[str, Any]) -> tuple[set[str], set[int]]:
    """What all ranks must know of each other. Collective.

    Returns:
        The keys of the checkpoint that hold parts of several ranks, and the numbers of the
        optimizers of which any rank has a state.
    """
    split = {key for key, value in checkpoint.items() if is_absent(value)}
    states = checkpoint.get("optimizer_states", [])
    mine = split, {number for number, state in enumerate(states) if state["state"]}
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    keys, numbers = zip(*all_of_them, strict=True)
    always = {"state_dict", "optimizer_states"} & checkpoint.keys()
    return always.union(*keys), set().union(*numbers)


def _leaves_of(
    checkpoint: Mapping[str, Any], split: Collection[str], with_state: Collection[int]
) -> Iterator[tuple[KeyPath, Any]]:
    """Take the part of a checkpoint apart that is not alike on all ranks."""
    taken = [key for key in checkpoint if key == _WEIGHTS or _OPTIMIZER.fullmatch(key)]
    if taken:
        raise KeyError(f"{taken[0]!r} is a name of the directory itself: call your entry otherwise")
    for key in split:
        if key == "state_dict":
            yield from _leaves(checkpoint[key], (_WEIGHTS,))
        elif key != "optimizer_states":
            yield from _leaves(checkpoint[key], (key,))
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        yield from _leaves_of_optimizer(optimizer, f"optimizer_{number}")
        if number not in with_state:
            yield (f"optimizer_{number}", "state"), {}


def _leaves_of_optimizer(optimizer: Mapping[str, Any], root: str) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in optimizer.items():
        if key != "state":
            yield from _leaves(value, (root, key))
    for parameter, state in optimizer["state"].items():
        yield from _leaves(state, (root, "state", parameter))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The tensors in nested dicts and lists, and what holds none as a whole."""
    holds_weights = any(True for _ in tensors_in(value))
    if isinstance(value, dict) and holds_weights:
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of {_name(path)} is no string, but holds weights")
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and holds_weights:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif isinstance(value, tuple) and is_absent(value):
        raise TypeError(f"{_name(path)} is a tuple with weights of several ranks; make it a list")
    else:
        yield path, value


def _name(path: KeyPath) -> str:
    """As torch forms it, for which it must be so to find the entries again."""
    return ".".join(map(str, path))


def _write_parts(leaves: Mapping[KeyPath, Any], beside: Path, path: Path) -> None:
    """Let each rank write its part. Collective.

    Args:
        leaves: Of this rank's checkpoint.
        beside: Directory into which all write.
        path: Of the checkpoint, for the error.
    """
    mine = {key_path: leaf for key_path, leaf in leaves.items() if _is_mine(key_path, leaf)}
    planner = _SavePlanner(
        {_name(key_path): key_path for key_path in mine},
        {_name(key_path) for key_path, leaf in leaves.items() if is_absent(leaf)},
    )
    try:
        save(
            {_name(key_path): leaf for key_path, leaf in mine.items()},
            storage_writer=_Writer(beside),
            planner=planner,
        )
    except CheckpointException as error:  # the same one on all ranks
        rank = min(error.failures)
        raise CheckpointError(path, rank, describe(error.failures[rank][0])) from None


def _is_mine(path: KeyPath, leaf: Any) -> bool:
    """Whether this rank has it; of what is no tensor, each has a copy, so that rank 0 writes it."""
    if isinstance(leaf, Tensor):
        return not leaf.is_meta
    of_a_parameter = _OPTIMIZER.fullmatch(str(path[0])) and path[1] == "state" and len(path) > 2
    return dist.get_rank() == 0 or bool(of_a_parameter)


class _SavePlanner(DefaultSavePlanner):
    """Plans for a flat dict, and knows where its entries belong.

    Args:
        paths: Of the entries.
        absent: Names of what another rank must have.
    """

    def __init__(self, paths: dict[str, KeyPath], absent: Collection[str]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._paths, self._absent = paths, absent

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the entries as they are: torch would drop empty dicts."""
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self.mappings = self._paths

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan for all ranks, on rank 0."""
        plans, metadata = super().create_global_plan(all_plans)
        lost = [name for name in self._absent if name not in metadata.state_dict_metadata]
        if lost:
            raise RuntimeError(f"no rank has {lost}")
        return plans, metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Plans for a flat dict, and reads what is no tensor as carefully as `torch.load` would.

    Args:
        weights_only: As for `torch.load`.
    """

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the entries as they are."""
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take what is no tensor."""
        loaded = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = loaded


class _Writer(FileSystemWriter):
    """Says what the system said where a file cannot be written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        with showing_system_errors():
            return super().write_data(plan, planner)
