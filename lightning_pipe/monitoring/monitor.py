"""PipelineMonitor: a callback that says where the time of a pipeline went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.imports import RequirementCache
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pipe import trainer_patches as patches
from lightning_pipe.monitoring.clock import behind_first
from lightning_pipe.monitoring.report import MonitorReport, RankRecords
from lightning_pipe.runtime.recording import Recorder
from lightning_pipe.views.chrome_trace import trace_of, write_trace
from lightning_pipe.views.picture import SUFFIXES, draw


class PipelineMonitor(Callback):
    """Record what the ranks do in `fit`, and log which share of their time is a bubble, and why.

    Logged are, as means over the ranks and for each rank (``pipeline/rank0/bubble``, ...):
    ``pipeline/bubble``, the share of the time from the first forward to the last backward of a
    batch, or of a fill with an asynchronous schedule, and to the sum of the gradients after it, in
    which a rank does not compute; its parts ``bubble_warm_up``, ``bubble_imbalance``,
    ``bubble_communication``, ``bubble_cool_down``, ``bubble_overhead`` and ``bubble_reduction``
    (`lightning_pipe.monitoring.bubbles` says what they are), which add up to it; and, of the worst
    stage, ``peak_in_flight`` (micro-batches), ``live_versions`` (of the weights) and ``staleness``
    (updates that a gradient comes late). All ranks log the same; the values are in
    ``trainer.callback_metrics``, too. Of several replicas the first one is shown, and where ranks
    share layers, the first of these. What ``zero_stage`` 2 and 3 send in forwards and backwards is
    part of these.

    The ranks' records are put together where the pipeline is empty and only there: with a
    synchronous schedule every ``log_every_n_steps``, with an asynchronous one at the end of each
    training epoch. At the end of `fit` a summary is printed, with the step time that the measured
    costs of stages and messages should give, and rank 0 writes the files.

    Args:
        log_every_n_steps: Between two times that values are logged. Default: as the Trainer's.
            Only for synchronous schedules.
        trace: File for the latest batches of all ranks, in Chrome's trace format, for
            https://ui.perfetto.dev; next to what was measured is what is predicted.
        picture: File for the latest batch (with an asynchronous schedule: batches) as a picture:
            ``.png``, ``.svg`` or ``.pdf``.
        record_steps: How many batches are kept; each value is about the latest so many. Of a fill
            over more batches than that the first and the last so many are kept.

    Attributes:
        report: After `fit`, on rank 0, all of this as an object. With the start methods "fork" and
            "spawn" that is a process that has ended.

    Raises:
        MisconfigurationException: An argument cannot work, or has no effect.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        trace: str | Path | None = None,
        picture: str | Path | None = None,
        record_steps: int = 10,
    ) -> None:
        for name, number in (
            ("log_every_n_steps", log_every_n_steps),
            ("record_steps", record_steps),
        ):
            if number is not None and number < 1:
                raise MisconfigurationException(f"{name}={number} must be at least 1")
        if picture is not None and Path(picture).suffix.lower() not in SUFFIXES:
            raise MisconfigurationException(
                f"picture={str(picture)!r} must end in {', '.join(SUFFIXES)}"
            )
        self._log_every_n_steps, self._record_steps = log_every_n_steps, record_steps
        self._trace, self._picture = trace, picture
        self._recorder: Recorder | None = None
        self._logged_step: int | None = None
        self.report: MonitorReport | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything is trained."""
        from lightning_pipe import PipelineStrategy

        if stage != "fit":
            return
        self.report = None
        if not isinstance(trainer.strategy, PipelineStrategy):
            raise MisconfigurationException(
                f"PipelineMonitor looks at a pipeline, but the strategy is "
                f"{type(trainer.strategy).__name__}. Give the Trainer "
                "strategy=PipelineStrategy(...), or leave the callback out."
            )
        if self._picture is not None and not RequirementCache("matplotlib"):
            raise MisconfigurationException(
                f"picture={str(self._picture)!r} needs matplotlib, which is not installed: "
                "pip install 'lightning-pipe[plot]'"
            )
        if trainer.is_global_zero:
            for path in (self._trace, self._picture):
                if path is not None:
                    Path(path).parent.mkdir(parents=True, exist_ok=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to record."""
        pipeline = _strategy(trainer).pipeline
        if pipeline.continuous and self._log_every_n_steps is not None:
            raise MisconfigurationException(
                f"PipelineMonitor(log_every_n_steps={self._log_every_n_steps}) with the "
                f"asynchronous schedule {_strategy(trainer).timing.schedule!r}: between batches "
                "its ranks must not wait for each other. Leave it out: values are logged at the "
                "end of each training epoch."
            )
        self._recorder, self._logged_step = Recorder(self._record_steps), None
        pipeline.record_to(self._recorder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """With a synchronous schedule, log every so many steps."""
        if _strategy(trainer).pipeline.continuous:
            return
        every = self._log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = patches.batches_logged(trainer)
        if every and (step + 1) % every == 0 and step != self._logged_step:
            self._log(trainer, step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With an asynchronous schedule, log: the pipeline was drained."""
        if _strategy(trainer).pipeline.continuous:
            self._log(trainer, patches.batches_logged(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a summary, and write the files."""
        if self._logged_step is None:  # a short run
            report = self._log(trainer, patches.batches_logged(trainer))
        else:
            report = self._exchange(trainer)[0]
        _strategy(trainer).pipeline.record_to(None)
        self._recorder = None
        if report is not None and report.batches:
            self.report = report
            rank_zero_info(str(report))
            self._write_files(report)

    def _log(self, trainer: Trainer, step: int) -> MonitorReport | None:
        """Put the ranks' records together, and log what comes of it. Collective."""
        self._logged_step = step
        report, metrics = self._exchange(trainer)
        for logger in trainer.loggers:
            logger.log_metrics({**metrics, "epoch": trainer.current_epoch}, step=step)
        return report

    def _exchange(self, trainer: Trainer) -> tuple[MonitorReport | None, dict[str, float]]:
        """Give rank 0 all records, and all ranks the metrics. Collective."""
        strategy, recorder = _strategy(trainer), self._recorder
        assert recorder is not None
        measured = strategy.pipeline.measured
        versions = {stage: versions for stage, (versions, _) in measured.weights.items()}
        mine = RankRecords(
            list(recorder.fills),
            behind_first() if trainer.num_nodes > 1 else 0.0,
            dict(measured.peak_in_flight),
            versions,
        )
        gathered = strategy.gather(mine)
        report = None
        if gathered is not None:  # replicas run the same programs, and their ranks alike
            first = [gathered[rank] for rank in strategy.grid.pipelines()[0]]
            report = MonitorReport(first, strategy.timing)
        metrics: dict[str, float] = strategy.broadcast(report.metrics if report else {})
        device = strategy.root_device
        values = {name: torch.tensor(value, device=device) for name, value in metrics.items()}
        trainer.callback_metrics.update(values)
        return report, metrics

    def _write_files(self, report: MonitorReport) -> None:
        if self._trace is not None:
            measured, predicted = report.events()
            events = trace_of(measured, process="measured")
            write_trace(self._trace, events + trace_of(predicted, process="predicted"))
        if self._picture is not None:
            draw(report.timeline(), self._picture, unit="s")


def _strategy(trainer: Trainer) -> Any:
    """A PipelineStrategy; `setup` has looked."""
    return trainer.strategy
