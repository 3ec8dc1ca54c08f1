"""The few private parts of Lightning that a pipeline must change, each with its reason.

Every patch checks that what it changes is there, and is made on an instance, never on a class.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch import LightningModule, Trainer


def before_dataloader_results(trainer: Trainer, flush: Callable[[], None]) -> Callable[[], None]:
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

    loop._store_dataloader_outputs = patched
    return lambda: loop.__dict__.pop("_store_dataloader_outputs", None)


def stop_child_observer() -> None:
    """Keep Lightning's observer from killing this process as soon as one of its children ended.

    Reason: when a rank fails, its children end by themselves within seconds, and this process is
    about to say why. The observer would kill it before it has.
    """
    for thread in threading.enumerate():
        if thread.name == "child-process-observer" and hasattr(thread, "_run"):
            thread._run = lambda: True


def _existing(owner: Any, name: str) -> Any:
    value = getattr(owner, name, _MISSING)
    if value is _MISSING:
        raise RuntimeError(
            f"lightning {lightning.__version__} has no {type(owner).__name__}.{name}, which "
            "lightning_pipe relies on. Use a version that it was tried with: lightning>=2.6,<2.7."
        )
    return value


_MISSING = object()
