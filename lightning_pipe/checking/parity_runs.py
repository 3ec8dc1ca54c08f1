"""One batch through a pipeline of processes and through one device: what each comes to.

All of it happens in a process of its own, which starts the ranks: the caller's module, random
states and process groups stay as they are, and whatever hangs can be ended. The optimizer's step
does nothing, so that all micro-batches read the same weights, also those of an asynchronous
schedule, and gradients are those of the weights that the module came with.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, Sampler

from lightning_pipe.checking.parity_records import (
    SEED,
    OneByOne,
    Recorder,
    Run,
    end_after,
    shares_of,
)
from lightning_pipe.runtime.mesh import Grid
from lightning_pipe.runtime.microbatch import find_batch_size, first_samples
from lightning_pipe.schedule import look_up

Phase = Literal["pipeline", "one device"]

_DRIVER = "the process that starts the ranks"
_LOOK_S = 0.1
_GRACE_S = 10.0  # for ranks to say where they hang, and for all to end
_SHOWN = 6000  # characters of what a run that failed has printed
_CLUSTER = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


class ParityError(RuntimeError):
    """A run came to no end; the message is the report of the rank that failed."""


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        module: The user's.
        data: A datamodule, a dataloader, or nothing where the module has its own.
        grid: Of the ranks.
        strategy: Arguments of PipelineStrategy.
        accelerator: Of the Trainer.
        precision: Of the Trainer.
        batch_size: Take so many samples of the first batch; all of them by default.
        time_limit: In seconds, of all runs together.
    """

    module: LightningModule
    data: Any
    grid: Grid
    strategy: Mapping[str, Any]
    accelerator: str = "cpu"
    precision: Any = "64-true"
    batch_size: int | None = None
    time_limit: float = 300.0


@dataclass
class Runs:
    """All runs of a job.

    Attributes:
        ranks: Of the pipeline, by rank.
        whole: One device, the whole batch.
        again: The same with other random numbers; missing where nobody needed to know.
        one_by_one: One device, the micro-batches one after the other, each with the random numbers
            that the pipeline draws for it; missing where nobody needed to know.
    """

    ranks: list[Run]
    whole: Run
    again: Run | None = None
    one_by_one: Run | None = None


def run(
    job: Job,
    is_enough: Callable[[Sequence[Run], Run], bool],
    report: Callable[[Phase], None] = lambda _: None,
) -> Runs:
    """Run a job in processes.

    Args:
        job: What.
        is_enough: Says whether pipeline and whole batch agree: then there are no further runs. It
            is pickled where processes are spawned.
        report: Called again and again while waiting, with what is running.

    Raises:
        ParityError: A run has failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="lightning-pipe-") as name:
        directory = Path(name)
        method = _start_method(job.accelerator)
        context: Any = multiprocessing.get_context(method)
        process = context.Process(
            target=_drive, args=(job, is_enough, method, directory), name="lightning-pipe-parity"
        )
        process.start()
        try:
            _wait(process, job.time_limit + _GRACE_S, directory, report)
        finally:
            _end(process)
        if not (directory / "runs").exists():
            raise ParityError(_why(directory, process, job.time_limit))
        runs = torch.load(directory / "runs", map_location="cpu", weights_only=False)
    assert isinstance(runs, Runs)
    return runs


def first_batch(module: LightningModule, data: Any) -> Any:
    """Load the first training batch, as the dataloader gives it.

    Args:
        module: The user's, which may have a ``train_dataloader`` of its own.
        data: A datamodule, any iterable of batches, or nothing.

    Raises:
        MisconfigurationException: There is none.
    """
    loader = data
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
    elif data is None:
        module.prepare_data()
        loader = module.train_dataloader()
    for batch in loader:
        return batch
    raise MisconfigurationException(
        f"{type(loader).__name__} gives no batch at all: expected at least one to try."
    )


def _start_method(accelerator: str) -> Literal["fork", "spawn"]:
    """Fork where it can be: it takes modules of any class along, and does not import again."""
    forks = sys.platform == "linux" and accelerator == "cpu"
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not forks or has_gpu or dist.is_initialized():
        return "spawn"
    return "fork"


# ----------------------------------------------------------------------- the caller's process


def _wait(
    process: BaseProcess, seconds: float, directory: Path, report: Callable[[Phase], None]
) -> None:
    until = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < until:
        report("one device" if (directory / "pipeline done").exists() else "pipeline")
        process.join(_LOOK_S)


def _end(process: BaseProcess) -> None:
    """Kill what is left of a process and those that it has started."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _why(directory: Path, process: BaseProcess, time_limit: float) -> str:
    """Say why there is no result: an error's report, or where processes hung."""
    error = directory / "error"
    stacks = {file.stem: file.read_text() for file in sorted(directory.glob("*.stack"))}
    of_ranks = {name: text for name, text in stacks.items() if name != _DRIVER}
    if stacks:
        places = [f"{name} was here:\n{text}" for name, text in (of_ranks or stacks).items()]
        return f"Not done within {time_limit:g} s.\n\n" + "\n".join(places)
    if error.exists():
        return error.read_text()
    log = directory / "output"
    printed = log.read_text(errors="replace")[-_SHOWN:] if log.exists() else ""
    return f"The runs ended with exit code {process.exitcode}.\n{printed}"


# -------------------------------------------------------------------- the process of the runs


def _drive(
    job: Job,
    is_enough: Callable[[Sequence[Run], Run], bool],
    start_method: Literal["fork", "spawn"],
    directory: Path,
) -> None:
    """Run all; write the result, or why there is none."""
    os.setsid()
    end_after(directory / f"{_DRIVER}.stack", job.time_limit + _GRACE_S / 2)
    with (directory / "output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in (*_CLUSTER, *_RENDEZVOUS):
        os.environ.pop(name, None)
    if start_method == "fork":  # see ProcessLauncher: OpenMP's threads do not survive it
        torch.set_num_threads(1)
    try:
        runs = _run_all(job, is_enough, start_method, directory)
        torch.save(runs, directory / "unfinished")
        (directory / "unfinished").rename(directory / "runs")
    except BaseException as error:
        is_report = isinstance(error, ProcessRaisedException)
        text = str(error) if is_report else "".join(traceback.format_exception(error))
        (directory / "error").write_text(text.strip() + "\n")


def _run_all(
    job: Job,
    is_enough: Callable[[Sequence[Run], Run], bool],
    start_method: Literal["fork", "spawn"],
    directory: Path,
) -> Runs:
    module = job.module
    L.seed_everything(SEED, verbose=False)
    batch = first_batch(module, job.data)
    if job.batch_size is not None:
        batch = first_samples(batch, job.batch_size)
    replicas = job.grid.data
    if look_up(job.strategy.get("schedule", "1f1b")).continuous:  # all updates weigh alike
        samples = find_batch_size(batch) or 0
        batch = first_samples(batch, samples - samples % replicas) if samples > replicas else batch
    shares = shares_of(module, batch, replicas)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def on_one_device(name: str, *callbacks: OneByOne, seed: int = SEED) -> Run:
        """Begin as the pipeline did: forwards change buffers."""
        for buffer_name, buffer in module.named_buffers():
            if buffer_name in buffers:
                buffer.copy_(buffers[buffer_name])
        recorder = Recorder(name, directory, job.time_limit, seed)
        _fit(job, source, [recorder, *callbacks], None)
        result = _read(directory / f"{name}0")
        for callback in callbacks:
            result.logged = callback.logged
        return result

    # The pipeline comes first: a process that has used a GPU cannot be forked.
    recorder = Recorder("rank", directory, job.time_limit)
    _fit(job, _give(module, job.data, shares, job.grid), [recorder], start_method)
    ranks = [_read(directory / f"rank{rank}") for rank in range(job.grid.size)]
    _put_losses_together(ranks, job.grid)
    source = _give(module, job.data, [batch], Grid(1))
    (directory / "pipeline done").touch()
    whole = on_one_device("whole")
    if is_enough(ranks, whole):
        return Runs(ranks, whole)
    first_layers = [layer for rank in ranks for layer in rank.first_layers]
    layerwise = job.strategy.get("activation_checkpointing") == "layer"
    one_by_one = OneByOne(
        len(ranks[0].sizes),
        None if layerwise else first_layers,
        job.strategy.get("module"),
        replicas,
    )
    return Runs(
        ranks,
        whole,
        on_one_device("again", seed=SEED + 1),
        on_one_device("one by one", one_by_one),
    )


def _put_losses_together(ranks: Sequence[Run], grid: Grid) -> None:
    """Give all ranks the loss of the batch, of which each replica has a share."""
    if grid.data == 1:
        return
    firsts = [ranks[pipeline[0]] for pipeline in grid.pipelines()[:: grid.tensor]]
    samples = [sum(run.sizes) for run in firsts]
    losses = [run.loss for run in firsts]
    mean = None
    if None not in losses:
        weighed = zip(losses, samples, strict=True)
        mean = sum((loss or 0.0) * size for loss, size in weighed) / sum(samples)
    for run in ranks:
        run.loss = mean


def _fit(
    job: Job,
    source: Any,
    callbacks: list[Callback],
    start_method: Literal["fork", "spawn"] | None,
) -> None:
    """Train for one batch; with no start method on one device."""
    from lightning_pipe import PipelineStrategy

    where: dict[str, Any] = {"devices": 1}
    if start_method is not None:
        limit = {"timeout": timedelta(seconds=job.time_limit), "start_method": start_method}
        strategy = PipelineStrategy(**{**job.strategy, **limit})
        where = {"devices": job.grid.size, "strategy": strategy}
    trainer = Trainer(
        accelerator=job.accelerator,
        precision=job.precision,
        plugins=[LightningEnvironment()],  # not that of a cluster, on which this may run
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        logger=DummyLogger(),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **where,
    )
    if isinstance(source, LightningDataModule):
        trainer.fit(job.module, datamodule=source)
    else:
        trainer.fit(job.module, source)


class _OwnShare(Sampler[int]):
    """The number of this rank's replica, once."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __iter__(self) -> Iterator[int]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        yield replace(self._grid, rank=rank).data_rank

    def __len__(self) -> int:
        return 1


def _give(module: LightningModule, data: Any, batches: list[Any], grid: Grid) -> Any:
    """Let a batch for each replica be all the data, with the datamodule's hooks around it."""
    module.configure_callbacks = _none  # type: ignore[method-assign]
    given: Any = batches
    loader: DataLoader[Any] = DataLoader(
        given, batch_size=None, sampler=_OwnShare(grid), collate_fn=_same
    )
    if not isinstance(data, LightningDataModule):
        return loader
    data.train_dataloader = functools.partial(_same, loader)  # type: ignore[method-assign]
    return data


def _none() -> list[Callback]:
    """No callbacks of the module: they would write checkpoints, or wait for validation."""
    return []


def _same(value: Any) -> Any:
    return value


def _read(path: Path) -> Run:
    if not path.exists():
        raise MisconfigurationException(
            "No training step was made, so there are no gradients to compare: do hooks of the "
            "module skip the first batch?"
        )
    run = torch.load(path, map_location="cpu", weights_only=False)
    assert isinstance(run, Run)
    return run
