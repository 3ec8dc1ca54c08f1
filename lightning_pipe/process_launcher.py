"""Run the Trainer's function in processes of its own, and bring back what comes of it.

That is for notebooks, which cannot be run again as a script is. Each process does what a rank that
was started as a script does, its callbacks' handling of exceptions included. All that comes back is
in files, which are read when the processes have ended well: nobody waits for a writer that is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_bad_cuda_fork,
    _check_missing_main_guard,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot,
    _WorkerOutput,
)
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from lightning_pipe import trainer_patches as patches

_CONVERTING = DoublePrecision, HalfPrecision
# For the others to say why they end, once a rank has failed: torch waits so long before it
# terminates them, and so long again before it kills them.
_GRACE_S = 3.0


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts a process for each rank of this machine; this process waits for them.

    Args:
        strategy: Of the Trainer.
        start_method: "fork": they begin with all that this process has. "spawn": with what can be
            pickled.
    """

    def __init__(self, strategy: ParallelStrategy, start_method: Literal["fork", "spawn"]) -> None:
        super().__init__(strategy, start_method)
        self._undo: list[patches.Undo] = []
        self._results = Path()  # of the run under way; rank 0 writes the file
        self._fit_failed = False  # so this process has the weights from before it
        self._lacks = ""  # what this process has not, although a rank has it

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function of the Trainer on all ranks.

        Args:
            function: To run.
            args: Its arguments.
            trainer: Whose function it is.
            kwargs: Its arguments.

        Returns:
            What the function returned on rank 0.

        Raises:
            MisconfigurationException: There is a reason not to start processes.
            torch.multiprocessing.ProcessRaisedException: A rank has failed; the message ends with
                its report.
            torch.multiprocessing.ProcessExitedException: A rank was killed.
        """
        assert trainer is not None
        self._check(trainer)
        strategy = self._strategy
        assert strategy.cluster_environment is not None
        os.environ["MASTER_PORT"] = str(strategy.cluster_environment.main_port)  # one for all ranks
        states = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        fits = trainer.state.fn == TrainerFn.FITTING
        self._fit_failed |= fits
        with tempfile.TemporaryDirectory() as directory:
            self._results = Path(directory, "results")
            processes = start_processes(  # type: ignore[no-untyped-call]
                self._wrapping_function,
                args=(trainer, function, args, kwargs, _NoQueue(), states),
                nprocs=strategy.num_processes,  # type: ignore[attr-defined]
                start_method=self._start_method,
                join=False,
            )
            self.procs = processes.processes
            try:
                output = _wait_for(processes, self._results)
            except BaseException:
                _end(self.procs)
                undo = patches.save_no_checkpoint(trainer)  # the ranks have, if they could
                self._undo.append(undo)
                raise
        if fits:
            self._already_fit, self._fit_failed = True, False
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None
    ) -> None:
        """Write an ordinary file in the calling process, where the weights are after a run.

        On the first node only: the other ones do not have them.

        Args:
            checkpoint: What the calling process has: no state of optimizers, as these are gone.
            filepath: Of the file.
            storage_options: For the `CheckpointIO`.

        Raises:
            MisconfigurationException: The weights are not here.
        """
        if self._strategy.node_rank != 0:
            return
        failed = "the last fit has failed, and its weights are gone" if self._fit_failed else ""
        if reason := failed or self._lacks:
            raise MisconfigurationException(
                f"{filepath} was not written: {reason}. Let a ModelCheckpoint callback save "
                "while the ranks train."
            )
        io = self._strategy.checkpoint_io
        io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def close(self) -> None:
        """Give Lightning its own ways back."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _check(self, trainer: Trainer) -> None:
        given = f"PipelineStrategy(start_method={self._start_method!r})"
        environment = self._strategy.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:
            raise MisconfigurationException(
                f"{given} would start processes, but something else has started this one as one of "
                "several (torchrun, SLURM, or whoever has set LOCAL_RANK). Use the default, "
                "start_method='popen', which then starts none."
            )
        if self._already_fit and trainer.state.fn == TrainerFn.FITTING:
            raise MisconfigurationException(
                f"{given} with a second fit of one Trainer: how far the first came is known in its "
                "processes only, which have ended. Make a new Trainer; fit(ckpt_path=...) goes on."
            )
        if self._start_method == "spawn":
            _check_missing_main_guard()
            return
        _check_bad_cuda_fork()
        if dist.is_initialized():
            raise MisconfigurationException(
                f"{given}: this process has a process group of torch.distributed, which its "
                "children must not inherit. Call torch.distributed.destroy_process_group() before, "
                "or use start_method='spawn'."
            )

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: _GlobalStateSnapshot | None = None,
    ) -> None:
        """What a process does: all that one does whose script was started for a rank."""
        if self._start_method == "fork":
            # The threads of OpenMP do not survive a fork, and the first computation that is spread
            # over several would wait for them for ever.
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        self._strategy._launcher = None  # a rank starts no further ones
        assert trainer is not None
        run = partial(_call_and_handle_interrupt, trainer, function)
        super()._wrapping_function(
            process_idx, trainer, run, args, kwargs, return_queue, global_states
        )

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        """Write a file of what the calling process gets; Lightning's queue has nothing to carry."""
        output = super()._collect_rank_zero_results(trainer, results)
        if output is None:
            return None
        if output.weights_path is not None and not output.extra["whole"]:
            self._strategy.checkpoint_io.remove_checkpoint(output.weights_path)
            output = output._replace(weights_path=None)
        torch.save(output, self._results)
        return None

    def _recover_results_in_main_process(
        self, worker_output: _WorkerOutput, trainer: Trainer
    ) -> None:
        precision = self._strategy.precision_plugin
        if worker_output.weights_path is not None and isinstance(precision, _CONVERTING):
            precision.convert_module(trainer.lightning_module)  # as fit does on one device
        super()._recover_results_in_main_process(worker_output, trainer)

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """What else the calling process gets from rank 0."""
        state = trainer.lightning_module.state_dict()
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        return {
            **super().get_extra_results(trainer),
            "report": self._strategy.report,  # type: ignore[attr-defined]
            "whole": not any(tensor.is_meta for tensor in tensors),
            "num_weights": len(state),
        }

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """Take in the calling process what `get_extra_results` gave."""
        super().update_main_process_results(trainer, extra)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._strategy.report = extra["report"]  # type: ignore[attr-defined]
        if self._strategy.node_rank != 0:
            return  # the whole model is on global rank 0
        module, self._lacks = trainer.lightning_module, ""
        if not extra["whole"] or extra["num_weights"] > len(module.state_dict()):
            self._lacks = (
                f"the layers of {type(module).__name__} are built in `configure_model`, in the "
                "processes of the ranks, and here they are not"
            )
        if fits and self._lacks:
            rank_zero_warn(
                "The weights were not all brought back to the process that called fit: "
                f"{self._lacks}. Save a checkpoint with a ModelCheckpoint callback and load it, "
                "e.g. Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)."
            )


class _NoQueue:
    """Takes the place of the queue that Lightning's launcher has."""

    def put(self, _: None) -> None:
        """Do nothing: all is in a file."""


def _wait_for(processes: ProcessContext, results: Path) -> _WorkerOutput:
    """Wait for all processes, and read what rank 0 has written."""
    try:
        while not processes.join(grace_period=_GRACE_S):
            pass
    except ProcessExitedException as error:
        for report in _reports(processes.error_files):
            error.add_note(f"\nWhat another rank said when this one was gone:\n\n{report}")
            break
        raise
    if not results.exists():  # they have ended without an error, but before they came to the end
        raise SIGTERMException
    # Rank 0's GPU is not for this process, which must be able to fork again.
    output = torch.load(results, map_location="cpu", weights_only=False)
    assert isinstance(output, _WorkerOutput)
    return output


def _reports(files: Sequence[str]) -> list[str]:
    """What failed processes have left to say."""
    reports = []
    for file in files:
        with suppress(OSError), open(file, "rb") as opened:
            reports.append(str(pickle.load(opened)))
    return reports


def _end(processes: Sequence[Any]) -> None:
    """Interrupt the processes that live, and kill those that do not end."""
    living = [process for process in processes if process.is_alive()]
    for process in living:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    until = time.monotonic() + _GRACE_S
    for process in living:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
