"""The few private parts of Lightning that a pipeline must change, each with its reason.

Every patch checks that what it changes is there. They are made on instances, but for two that have
none: `started_by` changes a module while ranks are being started, and `tell_parameters_apart` the
class BaseFinetuning for as long as a fit lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ThroughputMonitor
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch.optim import Optimizer

Undo = Callable[[], None]


def before_dataloader_results(trainer: Trainer, flush: Callable[[], None]) -> Undo:
    """Call ``flush`` before the running evaluation loop reads the results of a dataloader.

    Reason: with ``evaluation_outputs="last"`` the logged values of all batches reach the other
    ranks at the end of each dataloader; no hook is called there. The hook name under which the
    values were logged is set again while they are played.

    Returns:
        Undoes the patch.
    """
    loop: Any = trainer._active_loop
    method = _existing(loop, "_store_dataloader_outputs")
    module: LightningModule = trainer.lightning_module
    _existing(module, "_current_fx_name")
    hook = "test_step" if trainer.testing else "validation_step"

    def patched() -> None:
        before, module._current_fx_name = module._current_fx_name, hook
        try:
            flush()
        finally:
            module._current_fx_name = before
        method()

    return _replace((loop, "_store_dataloader_outputs", patched))


def training_data(trainer: Trainer) -> Any:
    """The loader or loaders of the training, made anew.

    Reason: a partition by time needs a batch before the fit loop sets up its data.
    """
    loop: Any = trainer.fit_loop
    source = _existing(loop, "_data_source")
    data = _existing(source, "dataloader")()
    return CombinedLoader(data, "max_size_cycle") if isinstance(data, (dict, list, tuple)) else data


def save_no_checkpoint(trainer: Trainer) -> Undo:
    """Let the Trainer write no checkpoint.

    Reason: Lightning tells callbacks of an exception also in the process that has only waited for
    the ranks. They would save a model there that was never trained.
    """
    return _replace((trainer, "save_checkpoint", _nothing))


@contextmanager
def started_by(command: Callable[[int], tuple[Sequence[str], str]]) -> Iterator[None]:
    """Inside, Lightning starts ranks in a Hydra job by this command, for a rank of this machine.

    Reason: its own command repeats a whole sweep in every rank, in another folder.
    """
    name = "_hydra_subprocess_cmd"
    before = _existing(subprocess_script, name)
    setattr(subprocess_script, name, command)
    try:
        yield
    finally:
        setattr(subprocess_script, name, before)


def take_sigterm(trainer: Trainer, on_signal: Callable[[], None]) -> Undo:
    """Let SIGTERM only call ``on_signal``, and no batch begin with a broadcast of who got one.

    Reason: Lightning's handler broadcasts, and a rank that waits for another in gloo never runs
    it: the signal hangs. Its broadcast before every batch lets the ranks wait for each other.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    return _replace(
        (connector, "_sigterm_notifier_fn", lambda signum, frame: on_signal()),
        (loop, "_broadcast_sigterm_tensor", _nothing),
    )


def take_requeue_signal(trainer: Trainer, on_signal: Callable[[], None]) -> Undo:
    """Let the signal of a SLURM job that is about to end only call ``on_signal``.

    Reason: Lightning's handler saves a checkpoint wherever the rank happens to be, and all ranks
    must save it together.
    """
    connector = trainer._signal_connector
    return _replace((connector, "_slurm_sigusr_handler_fn", lambda signum, frame: on_signal()))


def requeues(trainer: Trainer) -> bool:
    """Whether Lightning puts this job back into SLURM's queue when SLURM's signal comes."""
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def save_and_requeue(trainer: Trainer, agree: Callable[[Any], Any]) -> None:
    """Do what Lightning does on SLURM's signal: save a checkpoint, requeue the job. Collective.

    Args:
        trainer: Of this rank.
        agree: Gives rank 0's object to all. Rank 0 says where to save: the next free name, which
            another rank may see taken already.
    """
    environment: Any = trainer._accelerator_connector.cluster_environment
    connector: Any = trainer._checkpoint_connector
    free_path = _existing(connector, "hpc_save_path")
    undo = _replace((connector, "hpc_save_path", lambda folder: agree(free_path(folder))))
    try:
        handler = _existing(type(trainer._signal_connector), "_slurm_sigusr_handler_fn")
        handler(trainer._signal_connector, environment.requeue_signal, None)
    finally:
        undo()


def after_batch_hooks(trainer: Trainer, function: Callable[[], None]) -> Undo:
    """Call a function at the end of each batch, when all hooks of the batch have run.

    Reason: strategies have no hook there, where Lightning knows how to resume from a checkpoint;
    a little later it would repeat an epoch.
    """
    connector: Any = trainer._logger_connector
    original = _existing(connector, "on_batch_end")

    def patched() -> None:
        function()
        original()

    return _replace((connector, "on_batch_end", patched))


def stop_as_after_sigterm(trainer: Trainer) -> None:
    """Let the training loop end after this batch, as if this process had received SIGTERM."""
    _existing(trainer._signal_connector, "received_sigterm")
    trainer._signal_connector.received_sigterm = True


def answer_broadcast(
    strategy: Strategy, callback: Callback, method: str, answer: Callable[[], Any]
) -> Undo:
    """Answer the first broadcast that a callback's method makes, unless the answer is ``None``.

    Reason: `Timer` and time-based `ModelCheckpoint` ask rank 0's clock by a broadcast after every
    batch, for which all ranks would wait; rank 0's decision is known already.
    """
    original = _existing(callback, method)

    def patched(*args: Any, **kwargs: Any) -> Any:
        value = answer()
        if value is None:
            return original(*args, **kwargs)

        def answering(obj: Any, src: int = 0) -> Any:
            del strategy.__dict__["broadcast"]
            return value

        strategy.__dict__["broadcast"] = answering
        try:
            return original(*args, **kwargs)
        finally:
            strategy.__dict__.pop("broadcast", None)

    return _replace((callback, method, patched))


def decide_when_to_validate(trainer: Trainer, decide: Callable[[], bool | None]) -> Undo:
    """Let ``decide`` say whether the time between validations has passed; ``None``: the clock.

    Reason: with a `val_check_interval` in time every rank looks at a clock of its own, and one
    would validate while another trains.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    original = _existing(loop, "_should_check_val_fx")
    clock: Any = trainer

    def patched(data_fetcher: Any) -> bool:
        decision, before = decide(), clock._last_val_time
        if decision is not None:
            clock._last_val_time = float("-inf") if decision else float("inf")
        try:
            return bool(original(data_fetcher))
        finally:
            clock._last_val_time = before

    return _replace((loop, "_should_check_val_fx", patched))


def pauses_after_batch(trainer: Trainer) -> bool:
    """Whether the running batch is the last before validation, or before training ends."""
    loop: Any = trainer.fit_loop.epoch_loop
    last_step = trainer.max_steps != -1 and trainer.global_step + 1 >= trainer.max_steps
    return bool(
        last_step
        or _existing(loop, "_num_ready_batches_reached")()
        or _existing(loop, "_should_check_val_fx")(trainer.fit_loop._data_fetcher)
    )


def before_pauses(trainer: Trainer, drain: Callable[[], None]) -> Undo:
    """Call ``drain`` before a validation in training, and before the end of an epoch.

    Reason: a pause that a hook of the batch asks for (`trainer.should_stop = True`) was not known
    when its training step ran, and no strategy hook is called before the hooks of an epoch's end.
    """
    fit_loop: Any = trainer.fit_loop
    validation = fit_loop.epoch_loop.val_loop

    def first(method: Callable[[], Any]) -> Callable[[], Any]:
        def patched() -> Any:
            drain()
            return method()

        return patched

    return _replace(
        (validation, "run", first(_existing(validation, "run"))),
        (fit_loop, "on_advance_end", first(_existing(fit_loop, "on_advance_end"))),
    )


@contextmanager
def as_in_training_step(trainer: Trainer) -> Iterator[None]:
    """Inside, ``log`` logs as it does in `training_step`.

    Reason: what a drain between steps completes was logged in training steps.
    """
    module: Any = trainer.lightning_module
    hook, stage = _existing(module, "_current_fx_name"), trainer.state.stage
    module._current_fx_name, trainer.state.stage = "training_step", RunningStage.TRAINING
    try:
        yield
    finally:
        module._current_fx_name, trainer.state.stage = hook, stage


def batches_logged(trainer: Trainer) -> int:
    """The step under which loggers put what the running batch logs."""
    return int(_existing(trainer.fit_loop.epoch_loop, "_batches_that_stepped"))


def log_step(trainer: Trainer, step: int, names: Collection[str]) -> None:
    """Give loggers what was logged under some names, as at the end of the batch of that step.

    Reason: a drain completes several batches in one training step, and Lightning would log only
    the last of them.
    """
    connector: Any = trainer._logger_connector
    every = _existing(trainer, "log_every_n_steps")
    if every and (step + 1) % every == 0:
        loop, now = trainer.fit_loop.epoch_loop, batches_logged(trainer)
        logged = _existing(connector, "metrics")["log"]
        loop._batches_that_stepped = step
        try:
            log_metrics = _existing(connector, "log_metrics")
            log_metrics({name: value for name, value in logged.items() if _named(name, names)})
        finally:
            loop._batches_that_stepped = now


def hide_stale_values(trainer: Trainer, hidden: Callable[[], Collection[str]]) -> Undo:
    """At the end of a batch, give loggers nothing that was logged under the ``hidden`` names.

    Reason: Lightning logs the latest value at every step, and while the pipeline fills no batch
    has come to its end, or `log_step` has logged all of them.
    """
    connector: Any = trainer._logger_connector
    update = _existing(connector, "update_train_step_metrics")
    log_metrics = _existing(connector, "log_metrics")

    def patched() -> None:
        names = hidden()

        def log_the_rest(metrics: dict[str, Any], step: int | None = None) -> None:
            rest = {name: v for name, v in metrics.items() if not _named(name, names)}
            log_metrics(rest, step)

        undo = _replace((connector, "log_metrics", log_the_rest))
        try:
            update()
        finally:
            undo()

    return _replace((connector, "update_train_step_metrics", patched))


def skips_backward(trainer: Trainer) -> bool:
    """Whether training steps run without backward, as `StochasticWeightAveraging` lets them."""
    return bool(_existing(trainer.fit_loop.epoch_loop.automatic_optimization, "_skip_backward"))


def tell_parameters_apart() -> Undo:
    """Let finetuning callbacks compare parameters as objects, not by value.

    Reason: `BaseFinetuning.unfreeze_and_add_param_group` looks for each parameter in the optimizer
    with `torch.equal`, and those of other ranks' layers have no values. It is a static method,
    called by the name of its class: there is no instance to change.
    """
    original = _existing(BaseFinetuning, "filter_on_optimizer")

    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [parameter for parameter in params if id(parameter) not in known]

    changed: Any = BaseFinetuning
    changed.filter_on_optimizer = staticmethod(filter_on_optimizer)

    def undo() -> None:
        changed.filter_on_optimizer = staticmethod(original)

    return undo


def count_throughput_by_replica(trainer: Trainer, replicas: int) -> None:
    """Let `ThroughputMonitor` count a batch once for each replica, not for each rank.

    Reason: it takes every process for a replica with data of its own.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in _existing(callback, "_throughputs").values():
                _existing(throughput, "world_size")
                throughput.world_size = replicas


def data_ends(trainer: Trainer) -> bool:
    """Whether the running batch is the last one of its epoch on this rank."""
    return bool(_existing(trainer.fit_loop.epoch_loop, "_num_ready_batches_reached")())


def end_epoch(trainer: Trainer) -> None:
    """Let the running batch be the last one of its epoch.

    Reason: the data of another replica has come to its end.
    """
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def _named(name: str, names: Collection[str]) -> bool:
    return name in names or name.removesuffix("_step") in names


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of a method that must do nothing."""


def _replace(*patches: tuple[Any, str, Any]) -> Undo:
    """Set attributes of instances, and give what takes them away again."""
    for owner, name, value in patches:
        _existing(owner, name)
        owner.__dict__[name] = value

    def undo() -> None:
        for owner, name, _ in patches:
            owner.__dict__.pop(name, None)

    return undo


def _existing(owner: Any, name: str) -> Any:
    value = getattr(owner, name, _MISSING)
    if value is _MISSING:
        raise RuntimeError(
            f"lightning {lightning.__version__} has no {type(owner).__name__}.{name}, which "
            "lightning_pipe relies on. Use a version that it was tried with: lightning>=2.6,<2.7."
        )
    return value


_MISSING = object()
