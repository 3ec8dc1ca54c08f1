"""Follow torchmetrics objects on the last rank, and bring the others up to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

Metrics = Mapping[str, Metric]
Gather = Callable[..., list[Tensor]]


@dataclass
class MetricState:
    """What the updates of some batches did to a torchmetrics object.

    Attributes:
        tensors: The states that are tensors, whole.
        tails: What was appended to the states that are lists.
        update_count: How often it was updated since its last reset.
        forward_cache: Its value for the last batch.
    """

    tensors: dict[str, Tensor]
    tails: dict[str, list[Tensor]]
    update_count: int
    forward_cache: Any

    def apply_to(self, metric: Metric) -> None:
        """Bring a metric of another rank to the same state."""
        for name, tensor in self.tensors.items():
            setattr(metric, name, tensor.to(metric.device))
        for name, tail in self.tails.items():
            getattr(metric, name).extend(move_data_to_device(tail, metric.device))
        metric._update_count = self.update_count
        metric._forward_cache = move_data_to_device(self.forward_cache, metric.device)
        metric._computed = None


def find_metrics(module: LightningModule) -> Metrics:
    """The torchmetrics objects in a module, by qualified name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, Metric)}


def sync_over_replicas(metrics: Metrics, gather: Gather | None) -> Callable[[], None]:
    """Let metrics compute over the replicas, not over all ranks: those of a replica hold the same.

    Args:
        metrics: By qualified name.
        gather: Gives a tensor of all replicas; ``None``: there is one, and nobody to ask.

    Returns:
        Undoes it.
    """
    before = {name: (m.distributed_available_fn, m.dist_sync_fn) for name, m in metrics.items()}
    for metric in metrics.values():
        metric.distributed_available_fn = _not_distributed if gather is None else _distributed
        metric.dist_sync_fn = metric.dist_sync_fn if gather is None else gather

    def undo() -> None:
        for name, metric in metrics.items():
            metric.distributed_available_fn, metric.dist_sync_fn = before[name]

    return undo


def _not_distributed() -> bool:
    return False


def _distributed() -> bool:
    return True


class MetricWatch:
    """Follows what the steps of one batch do to the torchmetrics objects of the last rank.

    A metric that can be merged is set back at the start, so that its value for the *batch* (which
    one device logs with ``on_step``) is that of all its micro-batches. A metric that cannot be
    merged (``full_state_update``) keeps the value of the last micro-batch.

    Args:
        metrics: By qualified name.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before = {name: _Copy(metric) for name, metric in metrics.items()}
        for name, metric in metrics.items():
            if self._before[name].mergeable:
                metric.reset()

    def finish(self) -> dict[str, MetricState]:
        """Complete the metrics.

        Returns:
            Of those that were updated, what has changed.
        """
        states = {n: self._finish_one(m, self._before[n]) for n, m in self._metrics.items()}
        return {name: state for name, state in states.items() if state is not None}

    @staticmethod
    def _finish_one(metric: Metric, before: _Copy) -> MetricState | None:
        lists = _lists(metric)
        if not before.mergeable:
            tails = {k: v[len(before.lists[k]) :] for k, v in lists.items()}
            return state_of(metric, tails) if metric.update_count > before.update_count else None
        if not metric.update_called:
            before.restore(metric)
            return None
        value = _local_value(metric) if metric._forward_cache is not None else None
        before.merge_into(metric, value)
        return state_of(metric, lists)


def _local_value(metric: Metric) -> Any:
    """Of this rank's samples: what replicas have is put together at the end of an epoch."""
    before, metric._to_sync = metric._to_sync, False
    try:
        return metric.compute()
    finally:
        metric._to_sync = before


def state_of(metric: Metric, tails: dict[str, list[Tensor]] | None = None) -> MetricState:
    """A metric's state, on the CPU.

    Args:
        metric: Any.
        tails: Of its states that are lists, what is new; ``None``: all.
    """
    tensors = {k: v for k, v in metric.metric_state.items() if isinstance(v, Tensor)}
    tails = _lists(metric) if tails is None else tails
    cpu = torch.device("cpu")
    return MetricState(
        move_data_to_device(tensors, cpu),
        move_data_to_device(tails, cpu),
        metric.update_count,
        move_data_to_device(metric._forward_cache, cpu),
    )


class _Copy:
    """A copy of a metric's state."""

    def __init__(self, metric: Metric) -> None:
        self.mergeable = metric.full_state_update is False and not metric.dist_sync_on_step
        self.lists = _lists(metric)
        self.tensors = {k: v for k, v in metric.metric_state.items() if isinstance(v, Tensor)}
        self.update_count = metric.update_count
        self._cached = metric._forward_cache, metric._computed

    def restore(self, metric: Metric) -> None:
        """Put the copy back."""
        for name, value in {**self.tensors, **self.lists}.items():
            setattr(metric, name, value)
        metric._update_count = self.update_count
        metric._forward_cache, metric._computed = self._cached

    def merge_into(self, metric: Metric, value: Any) -> None:
        """Add the copy to what the metric has seen since, as if by one update."""
        metric._update_count = self.update_count + 1
        with torch.no_grad():
            metric.merge_state({**self.tensors, **self.lists})
        metric._forward_cache, metric._computed = value, None


@contextmanager
def undone_by(left: type[BaseException], metrics: Metrics) -> Iterator[None]:
    """Put metrics back as they were if what runs inside is left by an exception of this type."""
    before = [(metric, _Copy(metric)) for metric in metrics.values()]
    for _, copy in before:  # updates may be in place
        copy.tensors = {name: tensor.clone() for name, tensor in copy.tensors.items()}
    try:
        yield
    except left:
        for metric, copy in before:
            copy.restore(metric)
        raise


def _lists(metric: Metric) -> dict[str, list[Tensor]]:
    return {k: list(v) for k, v in metric.metric_state.items() if isinstance(v, list)}
