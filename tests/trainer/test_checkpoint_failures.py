"""A checkpoint that cannot be written: one error on all ranks, and the one before is intact."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_pipe.checkpoint import (
    CheckpointError,
    PipelineCheckpointIO,
    consolidate,
    remove_checkpoint,
    replace,
)

from .lit import Classifier, Options, loader, trainer
from .ranks import Ranks

FILE: Options = {"num_microbatches": 4}
DIRECTORY: Options = {**FILE, "save_distributed_checkpoint": True}


@contextmanager
def full_disk() -> Iterator[None]:
    """Inside, no file of this process can be longer than some bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Saves(Callback):
    """Saves after each epoch; after the second the disk of one rank is full."""

    def __init__(self, path: Path, failing: int, catches: bool) -> None:
        self._path, self._failing, self._catches = path, failing, catches
        self.caught: list[str] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == self._failing:
            with full_disk():
                self._save(trainer)
        else:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        try:
            trainer.save_checkpoint(self._path)
        except CheckpointError as error:
            if not self._catches:
                raise
            self.caught.append(str(error))


def fit_on_a_full_disk(
    pipeline: Options, path: Path, failing: int, catches: bool
) -> tuple[list[str], int]:
    saves = Saves(path, failing, catches)
    on_exception = OnExceptionCheckpoint(path.parent, "exception")
    run = trainer(
        pipeline, max_epochs=3, callbacks=[saves, on_exception], enable_checkpointing=True
    )
    try:
        run.fit(Classifier(), loader())
    except CheckpointError as error:
        saves.caught.append(str(error))
    return saves.caught, run.global_step


@pytest.mark.parametrize(
    ("pipeline", "failing"), [(FILE, 0), (DIRECTORY, 0), (DIRECTORY, 1)], ids=str
)
def test_a_full_disk_is_one_error_on_all_ranks(
    ranks: Ranks, tmp_path: Path, pipeline: Options, failing: int
) -> None:
    path = tmp_path / "latest.ckpt"

    outcomes = ranks.run(2, fit_on_a_full_disk, pipeline, path, failing, False)

    for (error,), steps in outcomes:
        assert f"{path} was not written. Rank {failing}: OSError: [Errno 27] File too" in error
        assert steps == 6  # it ended with the second epoch
    assert [*tmp_path.iterdir()] == [path]  # nothing is left of the write
    rest = path / "meta.pt" if path.is_dir() else path
    assert torch.load(rest, weights_only=True)["epoch"] == 0
    (step,) = ranks.run(1, go_on_from, path)
    assert step == 9


def go_on_from(path: Path) -> int:
    """One rank continues with what the others left."""
    run = trainer(FILE, max_epochs=3)
    run.fit(Classifier(), loader(), ckpt_path=path)
    return int(run.global_step)


@pytest.mark.parametrize("pipeline", [FILE, DIRECTORY], ids=["file", "directory"])
def test_who_catches_the_error_can_go_on(ranks: Ranks, tmp_path: Path, pipeline: Options) -> None:
    """The ranks agree, so that training continues, and the next checkpoint is written."""
    path = tmp_path / "latest.ckpt"

    outcomes = ranks.run(2, fit_on_a_full_disk, pipeline, path, 0, True)

    for (error,), steps in outcomes:
        assert "File too large" in error
        assert steps == 9
    assert [*tmp_path.iterdir()] == [path]
    rest = path / "meta.pt" if path.is_dir() else path
    assert torch.load(rest, weights_only=True)["epoch"] == 2


def save_to(pipeline: Options, path: Path, module: type[Classifier] = Classifier) -> str:
    run = trainer(pipeline, max_epochs=1)
    run.fit(module(), loader())
    with pytest.raises(CheckpointError) as caught:
        run.save_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("pipeline", [FILE, DIRECTORY], ids=["file", "directory"])
def test_a_place_that_cannot_be_written(ranks: Ranks, tmp_path: Path, pipeline: Options) -> None:
    (tmp_path / "a file").write_text("no directory")
    for error in ranks.run(2, save_to, pipeline, tmp_path / "a file" / "x.ckpt"):
        assert "Rank 0: FileExistsError" in error or "Rank 0: NotADirectoryError" in error

    for error in ranks.run(2, save_to, pipeline, tmp_path):
        assert "is a directory, and not that of a checkpoint" in error
    assert [*tmp_path.iterdir()] == [tmp_path / "a file"]


class Unreadable:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("some reason")


class Keeps(Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = Unreadable()


@pytest.mark.parametrize("pipeline", [FILE, DIRECTORY], ids=["file", "directory"])
def test_what_cannot_be_pickled(ranks: Ranks, tmp_path: Path, pipeline: Options) -> None:
    for error in ranks.run(2, save_to, pipeline, tmp_path / "x.ckpt", Keeps):
        assert "Rank 0: ValueError: some reason." in error
    assert [*tmp_path.iterdir()] == []


# ---------------------------------------------------------------------------- a killed process


def killed(action: Callable[[], None]) -> None:
    """Run it in a copy of this process, which it must kill."""
    child = os.fork()
    if not child:
        try:
            action()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    __reduce__ = die  # in the middle of a write


def test_a_write_that_is_killed_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checkpoints = tmp_path / "last.ckpt", PipelineCheckpointIO()
    checkpoints.save_checkpoint({"value": torch.ones(3)}, path)

    two = torch.full((3,), 2.0)
    killed(lambda: checkpoints.save_checkpoint({"value": two, "x": Deadly()}, path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        killed(lambda: checkpoints.save_checkpoint({"value": two}, path))

    assert torch.equal(checkpoints.load_checkpoint(path)["value"], torch.ones(3))
    # ModelCheckpoint takes what has "last" in its name for a checkpoint.
    assert [p for p in tmp_path.iterdir() if "last" in p.name] == [path]
    checkpoints.save_checkpoint({"value": two}, path)
    assert torch.equal(checkpoints.load_checkpoint(path)["value"], two)
    assert [*tmp_path.iterdir()] == [path]  # and the next write tidies up


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_directory_is_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, call: int
) -> None:
    """Killed at any call that changes the file system, also where it cannot exchange."""
    path = tmp_path / "a.ckpt"
    write_directory(path, "old")
    if not exchanges:
        monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    calls = iter(range(1, 100))

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def patched(*arguments: Any, **options: Any) -> Any:
            return die() if next(calls) == call else function(*arguments, **options)

        return patched

    def write_and_die() -> None:
        for owner, name in [(os, "rename"), (os, "unlink"), (os, "rmdir"), (replace, "_exchange")]:
            setattr(owner, name, dying(getattr(owner, name)))
        write_directory(path, "new")
        die()

    killed(write_and_die)

    found = replace.existing(path)
    one, other = ((found / name).read_text() for name in ("one", "other"))
    assert one == other
    write_directory(path, "newest")
    assert (path / "one").read_text() == "newest"
    assert [*tmp_path.iterdir()] == [path]


def write_directory(path: Path, content: str) -> None:
    beside = replace.unfinished(path)
    replace.remove(beside)
    beside.mkdir()
    for name in ("one", "other"):
        (beside / name).write_text(content)
    replace.put(beside, path)


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_is_left_behind_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """The new one is in its place when the old one cannot be removed; the next write does it."""
    path = tmp_path / "a.ckpt"
    write_directory(path, "old")
    if not exchanges:
        monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        write_directory(path, "new")
    assert (path / "one").read_text() == "new"
    assert len([*tmp_path.iterdir()]) == 2

    write_directory(path, "newest")
    assert (path / "one").read_text() == "newest"
    assert [*tmp_path.iterdir()] == [path]


def busy(*_: Any) -> None:
    raise OSError(errno.EBUSY, "it is in use")


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_is_removed_does_not_come_back(tmp_path: Path, interrupted: bool) -> None:
    """An interrupted replacement has left the one before under a hidden name."""
    path, io = tmp_path / "a.ckpt", PipelineCheckpointIO()
    write_directory(path, "old")
    path.rename(replace._beside(path, "replaced"))
    if not interrupted:
        path.mkdir()
        (path / ".metadata").touch()

    remove_checkpoint(path, io)

    assert [*tmp_path.iterdir()] == []
    assert replace.existing(path) == path


# ------------------------------------------------------------------------- what ranks send


class OnDevice(Tensor):
    """As on a GPU: a process that gets it without a copy would make it on the same one."""

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("sent from the device")


def consolidate_twice() -> dict[str, Any]:
    """Rank 0 has nothing of a live container, in which rank 1 has something new each time."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    absent = torch.empty(2, device="meta")
    live: dict[str, Any] = {"pair": (absent, [torch.ones(2)])}
    for value in (1.0, 2.0):
        own = torch.full((2,), value).as_subclass(OnDevice)
        if rank == 1:
            live["pair"] = own, None
        state = {rank: {"x": own if rank else 3.0}, "text": "some", 7 + rank: own.cpu()}
        whole = consolidate({"live": live, "optimizer_states": [{"state": state}]})
    return whole if rank == 0 else {}


def test_ranks_send_from_the_cpu_what_rank_0_lacks(ranks: Ranks) -> None:
    whole, _ = ranks.run(2, consolidate_twice)

    first, (second,) = whole["live"]["pair"]
    assert first.tolist() == [2.0, 2.0]
    assert second.tolist() == [1.0, 1.0]
    (optimizer,) = whole["optimizer_states"]
    assert [*optimizer["state"]] == [0, 1, 7, 8, "text"]
    assert optimizer["state"][0] == {"x": 3.0}
    assert optimizer["state"][1]["x"].tolist() == [2.0, 2.0]


class AddsOnOne(Classifier):
    """Adds all of its weights to a checkpoint, but on rank 0 only."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["mine"] = {"all": [*self.parameters()]}


def save_what_one_rank_adds(path: Path) -> str:
    save = ModelCheckpoint(path.parent, path.stem)
    run = trainer(FILE, max_epochs=1, callbacks=[save], enable_checkpointing=True)
    with pytest.raises(CheckpointError) as caught:
        run.fit(AddsOnOne(), loader())
    return str(caught.value)


def test_what_a_hook_adds_on_one_rank_is_not_lost_silently(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.run(2, save_what_one_rank_adds, tmp_path / "x.ckpt"):
        assert "Rank 0: RuntimeError: no rank has the values of [('mine', 'all', " in error
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------------- other ways of writing


class Noted(TorchCheckpointIO):
    """A user's own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.calls.append(f"save {options['storage_options']}")
        super().save_checkpoint(arguments[0], arguments[1])

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        self.calls.append("load")
        return super().load_checkpoint(*arguments, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append("remove")
        super().remove_checkpoint(path)


def save_and_load_by_plugins(directory: Path) -> tuple[list[str], list[int]]:
    noted, in_a_thread = Noted(), AsyncCheckpointIO()
    steps = []
    for name, plugin in (("own", noted), ("async", in_a_thread)):
        run = trainer(FILE, max_epochs=1, plugins=[plugin])
        run.fit(Classifier(), loader())
        run.save_checkpoint(directory / name, storage_options="some" if name == "own" else None)
        plugin.teardown()  # the thread has written
        run.strategy.barrier()
        again = trainer(FILE, max_epochs=2, plugins=[plugin])
        again.fit(Classifier(), loader(), ckpt_path=directory / name)
        steps.append(again.global_step)
        again.strategy.barrier()
        again.strategy.remove_checkpoint(directory / name)
    assert isinstance(in_a_thread.checkpoint_io, PipelineCheckpointIO)
    return noted.calls, steps


def test_other_checkpoint_plugins(ranks: Ranks, tmp_path: Path) -> None:
    """They are called as ever; Lightning's asynchronous one wraps what writes safely."""
    first, second = ranks.run(2, save_and_load_by_plugins, tmp_path)

    assert first == (["save some", "load", "remove"], [6, 6])
    assert second == (["load"], [6, 6])
    assert [*tmp_path.iterdir()] == []


def fail_in_the_thread(path: Path) -> list[str]:
    plugin = AsyncCheckpointIO()
    run = trainer(FILE, max_epochs=1, plugins=[plugin])
    run.fit(Classifier(), loader())
    errors = []
    for _ in range(2):
        try:
            run.save_checkpoint(path)
        except CheckpointError as error:
            errors.append(str(error))
        if plugin._executor is not None:
            plugin._executor.submit(int).result()  # until the thread has failed
    plugin._error = None
    return errors


def test_an_asynchronous_write_that_fails_is_told_at_the_next(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = ranks.run(2, fail_in_the_thread, tmp_path / "file" / "x.ckpt")
    assert first == second  # on all ranks, at the latest when the next is written
    assert "Rank 0: FileExistsError" in first[-1] or "Rank 0: NotADirectoryError" in first[-1]
