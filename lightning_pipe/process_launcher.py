"""Run the Trainer's function in processes of its own, and bring back what comes of it.

That is for notebooks, which cannot be run again as a script is. Each process does what a rank that
was started as a script does, its callbacks' handling of exceptions included. The weights come back
in a file, all else through a pipe.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_bad_cuda_fork,
    _check_missing_main_guard,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
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
_LOOK_S = 0.1
_GRACE_S = 3.0  # for the others to say why they end, once a rank has failed; twice


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
        queue = mp.get_context(self._start_method).SimpleQueue()
        states = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        processes = start_processes(  # type: ignore[no-untyped-call]
            self._wrapping_function,
            args=(trainer, function, args, kwargs, queue, states),
            nprocs=strategy.num_processes,  # type: ignore[attr-defined]
            start_method=self._start_method,
            join=False,
        )
        self.procs = processes.processes
        try:
            output = _wait_for(processes, queue)
        except BaseException:
            _end(self.procs)
            self._undo.append(patches.save_no_checkpoint(trainer))  # the ranks have, if they could
            raise
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return _from_bytes(output.trainer_results)

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
        output = super()._collect_rank_zero_results(trainer, _as_bytes(results))
        if output is None or output.weights_path is None or output.extra["whole"]:
            return output
        self._strategy.checkpoint_io.remove_checkpoint(output.weights_path)
        return output._replace(weights_path=None)

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
            "report": _as_bytes(self._strategy.report),  # type: ignore[attr-defined]
            "whole": not any(tensor.is_meta for tensor in tensors),
            "num_weights": len(state),
        }

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """Take in the calling process what `get_extra_results` gave."""
        super().update_main_process_results(trainer, extra)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._strategy.report = _from_bytes(extra["report"])  # type: ignore[attr-defined]
        module = trainer.lightning_module
        if not extra["whole"] or extra["num_weights"] > len(module.state_dict()):
            rank_zero_warn(
                f"The weights of {type(module).__name__} were not all brought back to the process "
                "that called fit: its layers are built in `configure_model`, in the processes of "
                "the ranks, and here they are not. Save a checkpoint and load it, e.g. "
                "Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)."
            )


def _wait_for(processes: ProcessContext, queue: Any) -> _WorkerOutput:
    """Wait for all processes, and take rank 0's output while it lives: a pipe holds 64 KiB."""
    output = None
    try:
        while not processes.join(timeout=_LOOK_S, grace_period=_GRACE_S):
            if output is None and not queue.empty():
                output = queue.get()
    except ProcessExitedException as error:
        for report in _reports(processes.error_files):
            error.add_note(f"\nWhat another rank said when this one was gone:\n\n{report}")
            break
        raise
    if output is None and not queue.empty():
        output = queue.get()
    if output is None:  # they have ended without an error, but before they came to the end
        raise SIGTERMException
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


def _as_bytes(results: Any) -> bytes:
    """Tensors as bytes: through a queue they would be shared with a process that ends."""
    buffer = io.BytesIO()
    torch.save(results, buffer)
    return buffer.getvalue()


def _from_bytes(results: bytes) -> Any:
    return torch.load(io.BytesIO(results), weights_only=False)
