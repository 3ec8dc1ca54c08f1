"""Bring what the last stage logs to all ranks.

Behind the pipelined call the user's step runs on the last stage alone, so only there ``self.log``
is called and only there metrics are updated. Without help loggers on rank 0 stay empty,
``ModelCheckpoint(monitor=...)`` fails there, and a logged torchmetrics object waits for ever. So
the calls are recorded on the last rank, put together over the micro-batches to what one device
would have logged for the batch, sent to all ranks and played there through the public ``log``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_pipe.metric_state import (
    Gather,
    Metrics,
    MetricState,
    MetricWatch,
    find_metrics,
    state_of,
    sync_over_replicas,
    undone_by,
)
from lightning_pipe.runtime.call import StageOutput
from lightning_pipe.runtime.distributed_tensors import whole
from lightning_pipe.runtime.microbatch import find_batch_size
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.trainer_patches import before_dataloader_results

# After self, name and value.
_LOG_ARGUMENTS = list(inspect.signature(LightningModule.log).parameters)[3:]


@dataclass
class LogCall:
    """One call of ``self.log``.

    Attributes:
        name: What is logged.
        value: Its value; ``None`` for a torchmetrics object.
        options: The other arguments.
        metric: Qualified name of the torchmetrics object in the LightningModule.
    """

    name: str
    value: Any
    options: dict[str, Any]
    metric: str | None = None


@dataclass
class _Recorded:
    """One call, and how much it counts among those of the other micro-batches.

    Attributes:
        call: The call.
        size: Samples, or the ``batch_size`` that was given.
        weight: The same; or what the step returned as its weight.
    """

    call: LogCall
    size: float
    weight: float


@dataclass
class Relayed:
    """What travels from the last rank to all."""

    calls: list[LogCall] = field(default_factory=list)
    metrics: dict[str, MetricState] = field(default_factory=dict)


class StepLogs:
    """The logs of one rank's steps, from setup to teardown.

    Args:
        module: The user's.
        pipeline: This rank's.
        context: In which a step runs; values are computed in its default dtype.
        gather: Gives a tensor of all replicas, if there are several.
    """

    def __init__(
        self,
        module: LightningModule,
        pipeline: Pipeline,
        context: Callable[[], AbstractContextManager[None]],
        gather: Gather | None = None,
    ) -> None:
        self._module, self._pipeline, self._context = module, pipeline, context
        self._metrics = find_metrics(module)
        self._undo_sync = sync_over_replicas(self._metrics, gather)
        self._recorder = _Recorder(self._metrics)
        self._watch: MetricWatch | None = None
        self._undo_evaluation: Callable[[], None] | None = None

    def close(self) -> None:
        """Leave the module as it was."""
        self._undo_sync()
        self.end_evaluation()

    # ------------------------------------------------------------------------------- training

    def begin_batch(self) -> None:
        """Before the first micro-batch."""
        self._recorder = _Recorder(self._metrics)
        follow = self._pipeline.is_last and self._metrics
        self._watch = MetricWatch(self._metrics) if follow else None

    @contextmanager
    def microbatch(self, microbatch: Any) -> Iterator[None]:
        """Inside runs the user's step for one micro-batch on one stage; the last one counts."""
        log = self._recorder if self._pipeline.is_last else _drop
        several = self._pipeline.is_last and len(self._pipeline.stages) > 1
        self._recorder.begin(find_batch_size(microbatch) or 1)
        try:
            with (
                _log_replaced(self._module, log),
                undone_by(StageOutput, self._metrics if several else {}),
            ):
                yield
        except StageOutput:
            self._recorder.forget()
            raise

    def weigh(self, result: Any) -> None:
        """Let what a step has logged count as much as the weight that it returned, if any."""
        if isinstance(result, Mapping) and result.get("weight") is not None:
            self._recorder.weigh(float(result["weight"]))

    def collect(self) -> Relayed:
        """On the last rank: what one device would have logged for the batch."""
        with self._context():
            calls = [_put_together(calls) for calls in self._recorder.calls.values()]
            return Relayed(calls, self._watch.finish() if self._watch is not None else {})

    def play(self, relayed: Relayed) -> None:
        """Log here what the last rank has logged, inside the hook that it belongs to.

        The last rank's own metrics have seen it all, and maybe later batches, too: there only the
        value for the batch is set while it is logged.
        """
        latest = {name: self._metrics[name]._forward_cache for name in relayed.metrics}
        for name, state in relayed.metrics.items():
            metric = self._metrics[name]
            if self._pipeline.is_last:
                metric._forward_cache = state.forward_cache
            else:
                state.apply_to(metric)
        with self._context():
            for call in relayed.calls:
                value = self._metrics[call.metric] if call.metric is not None else call.value
                self._module.log(call.name, _moved(value, self._module.device), **call.options)
        if self._pipeline.is_last:
            for name, value in latest.items():
                self._metrics[name]._forward_cache = value

    # ----------------------------------------------------------------------------- evaluation

    @contextmanager
    def evaluation_step(self, outputs: Literal["all", "last"]) -> Iterator[None]:
        """Inside runs the user's step for one batch.

        With outputs on all ranks each logs by itself. With outputs on the last one alone that
        logs and keeps a record, which reaches the others at the end of the dataloader.
        """
        if outputs == "all":
            yield
            return
        self._recorder.begin(1)
        with _log_replaced(self._module, self._log_and_record if self._pipeline.is_last else _drop):
            yield

    def begin_evaluation(self) -> None:
        """Before the first batch of a loop whose outputs are on the last rank alone."""
        self._recorder = _Recorder(self._metrics)
        trainer = self._module.trainer
        self._undo_evaluation = before_dataloader_results(trainer, self._flush)

    def end_evaluation(self) -> None:
        """After the loop."""
        if self._undo_evaluation is not None:
            self._undo_evaluation()
            self._undo_evaluation = None

    def _log_and_record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options |= dict(zip(_LOG_ARGUMENTS, args, strict=False))
        LightningModule.log(self._module, name, value, **options)
        batch = self._module.trainer._results.batch  # type: ignore[union-attr]
        if options.get("batch_size") is None:  # which log_dict passes on
            options["batch_size"] = find_batch_size(batch) or 1
        self._recorder(name, value, **options)

    def _flush(self) -> None:
        """At the end of a dataloader, give the other ranks what the last one has logged."""
        mine = None
        if self._pipeline.is_last:
            calls = [one.call for calls in self._recorder.calls.values() for one in calls]
            states = {n: state_of(m) for n, m in self._metrics.items() if m.update_called}
            mine = Relayed([_travelling(call) for call in calls], states)
        relayed = self._pipeline.from_last(mine)
        if not self._pipeline.is_last:
            for name in relayed.metrics:
                self._metrics[name].reset()
            self.play(relayed)
        self._recorder = _Recorder(self._metrics)


class _Recorder:
    """Takes the place of ``module.log`` on the last rank."""

    def __init__(self, metrics: Metrics) -> None:
        self._names = {id(metric): name for name, metric in metrics.items()}
        self._times_logged: dict[str, int] = {}
        self._size = 1
        self._of_step: list[_Recorded] = []
        self.calls: dict[tuple[str, int], list[_Recorded]] = {}

    def begin(self, size: int) -> None:
        """What follows is logged for so many samples."""
        self._times_logged, self._size, self._of_step = {}, size, []

    def forget(self) -> None:
        """What was logged since counts for nothing."""
        for name, times in self._times_logged.items():
            for nth in range(1, times + 1):
                self.calls[name, nth].pop()
        self.calls = {key: calls for key, calls in self.calls.items() if calls}

    def weigh(self, weight: float) -> None:
        """What was logged since counts so much, where it was logged without a ``batch_size``."""
        for one in self._of_step:
            if one.call.options.get("batch_size") is None:
                one.weight = weight

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options |= dict(zip(_LOG_ARGUMENTS, args, strict=False))
        nth = self._times_logged[name] = self._times_logged.get(name, 0) + 1
        call = LogCall(name, value, options)
        if isinstance(value, Metric):
            # A metric that is no attribute of the module: `log` will say so when it is played.
            call.metric = options.get("metric_attribute") or self._names.get(id(value))
        elif isinstance(value, Tensor):
            call.value = whole(value.detach()).clone()  # it may be a weight, and is sent later
        size = options.get("batch_size") or self._size
        one = _Recorded(call, size, size)
        self._of_step.append(one)
        self.calls.setdefault((name, nth), []).append(one)


@contextmanager
def _log_replaced(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Let ``module.log`` be another function; ``log_dict`` calls it, too."""
    module.__dict__["log"] = log
    try:
        yield
    finally:
        module.__dict__.pop("log", None)


def _drop(*_: Any, **__: Any) -> None:
    """Take the place of ``log`` where there is nothing to log."""


def _put_together(calls: Sequence[_Recorded]) -> LogCall:
    """The calls of one name in each micro-batch, as one of the batch."""
    call = calls[0].call
    counted = [one for one in calls if one.weight] or calls[-1:]
    values, weights = [one.call.value for one in counted], [one.weight for one in counted]
    options = {**call.options, "batch_size": int(sum(one.size for one in calls))}
    if call.metric is None:
        call = LogCall(call.name, _reduce(options.get("reduce_fx"), values, weights), options)
    return _travelling(LogCall(call.name, call.value, options, call.metric))


def _travelling(call: LogCall) -> LogCall:
    """A call as it can be sent."""
    if call.metric is not None:
        return LogCall(
            call.name, None, {**call.options, "metric_attribute": call.metric}, call.metric
        )
    return LogCall(call.name, _moved(call.value, torch.device("cpu")), call.options)


def _moved(value: Any, device: torch.device) -> Any:
    """A value on a device; the usual one is a tensor, which Lightning's way takes long for."""
    return value.to(device) if isinstance(value, Tensor) else move_data_to_device(value, device)


def _reduce(reduce_fx: Any, values: list[Any], weights: list[float]) -> Any:
    """The batch's value, from those of its micro-batches."""
    if len(values) == 1 or any(isinstance(value, Metric) for value in values):
        return values[-1]
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    match name:
        case "mean" | "avg":
            total = sum(value * weight for value, weight in zip(values, weights, strict=True))
            return total / sum(weights)
        case "sum":
            return sum(values)
        case "max" | "min":
            return (max if name == "max" else min)(values)
    return reduce_fx(torch.stack([torch.as_tensor(value) for value in values]))
