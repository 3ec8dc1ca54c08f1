"""What a run of one batch comes to, written down by callbacks.

`Recorder` is in every run. `OneByOne` lets one device run what a pipeline runs.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipe.assembly import cut_batch
from lightning_pipe.partition import find_layers
from lightning_pipe.runtime.microbatch import find_batch_size
from lightning_pipe.runtime.random_state import RandomStates

SEED = 20200604
"""Of all runs, unless they are to differ."""


@dataclass
class Run:
    """What one rank, or one device, came to.

    Attributes:
        gradients: By parameter that has memory and requires a gradient; nothing where backward
            did not reach it. What replicas divide is whole here, or on one of them only.
        loss: Of the batch, or of this replica's share. ``None`` if replicas have no common one that
            could be known: their steps gave weights of their own.
        logged: Values by name.
        stage_of: Stage of each parameter that is in a layer; empty on one device.
        first_layers: First layer of each stage of this rank.
        sizes: Samples of each micro-batch.
    """

    gradients: dict[str, Tensor | None]
    loss: float | None
    logged: dict[str, float]
    stage_of: dict[str, int] = field(default_factory=dict)
    first_layers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def end_after(file: Path, seconds: float) -> None:
    """Let this process write down where it is and end, should it live so long.

    By a thread that sleeps: the timer of `faulthandler` does not survive a fork.

    Args:
        file: To write to.
        seconds: From now.
    """

    def end() -> None:
        time.sleep(seconds)
        with file.open("w") as opened:
            faulthandler.dump_traceback(opened, all_threads=True)
        os._exit(1)

    threading.Thread(target=end, daemon=True, name="lightning-pipe-time-limit").start()


class Recorder(Callback):
    """Keeps the weights as they are, and writes down what a process comes to.

    Args:
        name: Of the file, before the rank.
        directory: Of the file.
        time_limit: In seconds; a process that lives longer writes down where it is, and ends.
        seed: Of all random numbers.
    """

    def __init__(self, name: str, directory: Path, time_limit: float, seed: int = SEED) -> None:
        self._name, self._directory, self._time_limit = name, directory, time_limit
        self._seed = seed
        self._updates: list[dict[str, Tensor | None]] = []
        self._loss: float | None = float("nan")
        self._sizes: list[int] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin as all other runs do."""
        if self._name == "rank":
            end_after(self._directory / f"rank {trainer.global_rank}.stack", self._time_limit)
        L.seed_everything(self._seed, verbose=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let steps of the optimizer do nothing."""
        for optimizer in trainer.optimizers:
            optimizer.step = _no_step  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look how the batch is cut."""
        timing = getattr(trainer.strategy, "timing", None)
        if timing is not None:
            count = timing.count(find_batch_size(batch) or 1)
            self._sizes = cut_batch(pl_module, batch, count)[1]

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Copy the gradients; several times for a batch, if each micro-batch makes an update.

        Collective over replicas that have parts of them.
        """
        division = getattr(trainer.strategy, "_division", None)
        self._updates.append(
            {
                name: _whole(parameter.grad)
                for name, parameter in pl_module.named_parameters()
                if parameter.requires_grad
                and not parameter.is_meta
                and _is_here(parameter, division)
            }
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss."""
        grid = getattr(trainer.strategy, "grid", None)
        has_replicas = grid is not None and grid.data > 1
        self._loss = None if has_replicas and "weight" in outputs else float(outputs["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write all down, if there was a step."""
        if not self._updates:
            return
        pipeline = getattr(trainer.strategy, "pipeline", None)
        stages = pipeline.stages.values() if pipeline is not None else ()
        stage_of_id = {
            id(parameter): stage.index
            for stage in stages
            for layer in stage.layers
            for parameter in layer.parameters()
        }
        named = pl_module.named_parameters()
        stage_of = {name: stage_of_id[id(p)] for name, p in named if id(p) in stage_of_id}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        first_layers = [stage.first_layer for stage in stages]
        gradients = _mean(self._updates, self._sizes)
        run = Run(gradients, self._loss, logged, stage_of, first_layers, self._sizes)
        torch.save(run, self._directory / f"{self._name}{trainer.global_rank}")


class OneByOne(Callback):
    """Runs on one device what a pipeline runs, micro-batch by micro-batch, as a single step.

    Args:
        count: Number of micro-batches, of each replica.
        first_layers: Those before which all random streams begin anew, not only torch's; before
            every layer if there are none.
        path: Names the module that is cut.
        replicas: Each of which has a share of the batch.

    Attributes:
        logged: Means of the values that were logged, by name.
    """

    def __init__(
        self,
        count: int,
        first_layers: Sequence[int] | None,
        path: str | None,
        replicas: int = 1,
    ) -> None:
        self._count, self._first_layers, self._path = count, first_layers, path
        self._replicas = replicas
        self._now = self._layer = self._replica = 0
        self._total: dict[str, tuple[float, float]] = {}
        self._weight = 0.0  # of the micro-batch that is running

    @property
    def logged(self) -> dict[str, float]:
        """See above."""
        return {name: total / weight for name, (total, weight) in self._total.items()}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put other methods in the place of the module's own."""
        seed, device = torch.initial_seed(), trainer.strategy.root_device
        self._states = [RandomStates(seed, n, device) for n in range(self._replicas)]

        def before_layer(*_: Any) -> None:
            states = self._states[self._replica]
            anew = self._first_layers is None or self._layer in self._first_layers
            (states.seed_stage if anew else states.seed_layer)(0, self._now, self._layer)
            self._layer += 1

        found = find_layers(pl_module, self._path)
        for layer in set(found.layers):
            layer.register_forward_pre_hook(before_layer)
        found.module.register_forward_hook(
            lambda *_: self._states[self._replica].seed_step(0, self._now, after_call=True)
        )
        step = pl_module.training_step

        @functools.wraps(step)
        def training_step(batch: Any, *args: Any) -> Any:
            shares = shares_of(pl_module, batch, self._replicas)
            return self._run(
                [cut_batch(pl_module, share, self._count) for share in shares], step, args
            )

        pl_module.training_step = training_step  # type: ignore[method-assign]
        pl_module.log = self._log  # type: ignore[method-assign]

    def _run(
        self,
        shares: Sequence[tuple[list[Any], list[int]]],
        step: Callable[..., Any],
        args: Sequence[Any],
    ) -> Any:
        total, weights = 0.0, 0.0
        for replica, index, piece, size in (
            (replica, index, piece, size)
            for replica, share in enumerate(shares)
            for index, (piece, size) in enumerate(zip(*share, strict=True))
        ):
            self._replica, self._now, self._layer, self._weight = replica, index, 0, float(size)
            self._states[replica].seed_step(0, index)
            result = step(piece, *args)
            loss, weight = result, float(size)
            if isinstance(result, Mapping):
                loss, weight = result["loss"], float(result.get("weight", size))
            if weight:
                total, weights = total + loss * weight, weights + weight
        return total / weights

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Take part in a mean over the samples; other ways to put values together are left out."""
        is_mean = options.get("reduce_fx", "mean") in ("mean", torch.mean)
        if is_mean and isinstance(value, int | float | Tensor):
            weight = float(options.get("batch_size") or self._weight)
            total, weights = self._total.get(name, (0.0, 0.0))
            self._total[name] = total + float(value) * weight, weights + weight


def shares_of(module: LightningModule, batch: Any, replicas: int) -> list[Any]:
    """Cut a batch into the share of each replica.

    Raises:
        MisconfigurationException: It has too few samples.
    """
    if replicas == 1:
        return [batch]
    shares, _ = cut_batch(module, batch, replicas)
    if len(shares) != replicas:
        raise MisconfigurationException(
            f"The batch is cut into {len(shares)} parts, but there are {replicas} replicas: "
            "expected at least one sample for each."
        )
    return shares


def _is_here(parameter: Tensor, division: Any) -> bool:
    """Whether this rank has a parameter's gradient, or a part of it."""
    return division is None or division.copies(parameter) > 1 or division.keeps_state(parameter)


def _whole(gradient: Tensor | None) -> Tensor | None:
    """Copy a gradient, put together if there are parts of it. Collective then."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.cpu().clone()


def _mean(
    updates: Sequence[Mapping[str, Tensor | None]], sizes: Sequence[int]
) -> dict[str, Tensor | None]:
    """Give the gradients of the batch, from those of its updates: one, or one by micro-batch."""
    if len(updates) == 1:
        return dict(updates[0])
    if len(updates) != len(sizes):
        raise MisconfigurationException(
            f"There were {len(updates)} updates from a batch of {len(sizes)} micro-batches: "
            "expected one, or one for each. Does `optimizer_step` of the module skip some?"
        )
    mean: dict[str, Tensor | None] = dict.fromkeys(updates[0])
    for update, size in zip(updates, sizes, strict=True):
        for name, gradient in update.items():
            if gradient is not None:
                part, so_far = gradient * (size / sum(sizes)), mean[name]
                mean[name] = part if so_far is None else so_far + part
    return mean


def _no_step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
    return closure() if closure is not None else None
