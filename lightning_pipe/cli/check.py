"""``lightning-pipe check``: whether a run would work, and compute what one device computes."""

from __future__ import annotations

import copy
import json as json_format
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_pipe.checking.parity import (
    TENSOR_PARALLEL,
    ParityError,
    ParityReport,
    Precision,
    compare_gradients,
)
from lightning_pipe.checking.preflight import look
from lightning_pipe.checking.preflight_rows import Findings, Plans, Row
from lightning_pipe.cli.target import load_target
from lightning_pipe.cli.units import in_gib, size_in_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_DEVICES = 2  # unless the user or the target says otherwise
_WORST = 5  # parameters that are shown
_PATIENCE_S = 2.0  # before a spinner appears
_STYLES: Final[Mapping[str, str]] = {
    "ok": "green",
    "warning": "yellow",
    "no": "bold red",
    "not checked": "dim",
}


def check(
    target: str,
    overrides: list[str] | None = None,
    *,
    data: str | None = None,
    devices: int | None = None,
    schedule: str | None = None,
    num_microbatches: int | Literal["auto"] | None = None,
    stages_per_rank: int | None = None,
    partition: Literal["parameters", "uniform", "time"] | list[int] | str | None = None,
    module: str | None = None,
    activation_checkpointing: Literal["none", "stage", "layer"] | None = None,
    weight_stashing: bool | None = None,
    vertical_sync: bool | None = None,
    deferred_batchnorm: bool | None = None,
    data_parallel_size: int | None = None,
    tensor_parallel_size: int | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    reshard_after_forward: bool | None = None,
    memory: str | None = None,
    batch_size: int | None = None,
    accelerator: str | None = None,
    parity: bool = True,
    precision: Precision = "64-true",
    tolerance: float | None = None,
    time_limit: float = 300.0,
    json: bool = False,
) -> int:
    """Tell before launch whether module, batch, schedule and memory go together.

    All that the strategy would refuse is listed, with the reason and what to change. Then one batch
    goes through a pipeline of processes and through one device, and the gradients of all parameters
    are compared. Where a pipeline must differ from one device, since it draws random numbers and
    normalises (BatchNorm) by micro-batch, it is compared with one device that runs the same
    micro-batches one after the other. Replicas divide the batch. Where ranks share layers
    (tensor_parallel_size) nothing is compared: one device has no mesh to distribute them over.

    Args:
        target: What to check: package.module:Name or path/to/file.py:Name of a LightningModule, of
            a function that returns one or a pair (module, data); or the YAML file of a Hydra or
            LightningCLI configuration.
        overrides: Words after the target that change it, as model.width=64 or data.batch_size=8.
        data: Where the data is, if the target is a Python name without any: name of a datamodule
            or of a function that returns one or a dataloader.
        devices: Number of ranks, of all replicas. Default: those of the target, or pipelines of 2.
        schedule: Of PipelineStrategy, as all options up to reshard_after_forward. Default of each:
            that of the target, or of PipelineStrategy.
        num_microbatches: Into how many micro-batches a batch is cut, or auto.
        stages_per_rank: Stages on each rank.
        partition: parameters, uniform, time, a file that lightning-pipe profile wrote, or the
            number of layers of each stage, as 3,5.
        module: Name of the nn.Sequential to cut.
        activation_checkpointing: Which activations are computed again in backward.
        weight_stashing: For pipedream.
        vertical_sync: For pipedream.
        deferred_batchnorm: Whether BatchNorm updates its statistics once per batch.
        data_parallel_size: Replicas, each with its share of the data.
        tensor_parallel_size: Ranks that share each layer.
        zero_stage: What replicas divide: 0 to 3.
        reshard_after_forward: For zero_stage 3: whether layers are gathered for each micro-batch.
        memory: Memory of a device, as 16GiB: estimate what each rank needs.
        batch_size: Take so many samples of the first batch. Default: all.
        accelerator: Of the Trainer. Default: that of the target for the checks, cpu for the runs.
        parity: Whether to run the batch and compare gradients.
        precision: Of these runs.
        tolerance: Largest relative difference of gradients that counts as equal. Default: 1e-8 in
            64-true, 1e-4 in 32-true.
        time_limit: Seconds after which these runs are ended.
        json: Print one JSON object instead.

    Returns:
        1 if something is in the way or gradients differ, else 0.

    Examples:
        lightning-pipe check my_project.py:LitModel --devices 4 --schedule 1f1b
        lightning-pipe check my_project.py:LitModel model.width=64 --data my_project.py:Data
        lightning-pipe check conf/train.yaml --batch-size 16 --memory 16GiB
        lightning-pipe check conf/train.yaml --schedule pipedream --no-parity --json

    Raises:
        ValueError: If an option is wrong, or the target cannot be loaded.
    """
    limit = None if memory is None else size_in_bytes(memory, "memory")
    given = {
        "schedule": schedule,
        "num_microbatches": num_microbatches,
        "stages_per_rank": stages_per_rank,
        "partition": partition,
        "module": module,
        "activation_checkpointing": activation_checkpointing,
        "weight_stashing": weight_stashing,
        "vertical_sync": vertical_sync,
        "deferred_batchnorm": deferred_batchnorm,
        "data_parallel_size": data_parallel_size,
        "tensor_parallel_size": tensor_parallel_size,
        "zero_stage": zero_stage,
        "reshard_after_forward": reshard_after_forward,
    }
    options = {name: value for name, value in given.items() if value is not None}
    with redirect_stdout(sys.stderr), _Waiting() as waiting:  # what the user's code prints
        loaded = load_target(target, overrides or [], data)
        strategy = {**loaded.strategy_options, **options}
        trainer = dict(loaded.trainer_options)
        ranks = _number(devices or trainer.pop("devices", None), strategy)
        trainer["accelerator"] = accelerator or trainer.get("accelerator", "cpu")
        twin = copy.deepcopy(loaded.module)  # which is looked into
        plans = Plans(twin, loaded.data, ranks, strategy, trainer, batch_size, limit)
        findings = look(plans, lambda done, of: waiting.show(f"Layer {done} of {of}"))
        del twin, plans
        report: ParityReport | str | None = None
        is_shared = findings.grid is not None and findings.grid.tensor > 1
        if parity and findings.is_possible and not is_shared:
            try:
                report = compare_gradients(
                    loaded.module,
                    loaded.data,
                    findings.num_ranks,
                    accelerator=accelerator or "cpu",
                    precision=precision,
                    tolerance=tolerance,
                    batch_size=batch_size,
                    time_limit=time_limit,
                    report=lambda phase: waiting.show(f"Running the batch: {phase}"),
                    **strategy,
                )
            except ParityError as error:
                report = str(error)
    rows = [*findings.rows, *_parity_rows(report, parity, is_shared)]
    is_ok = all(row.status != "no" for row in rows)
    if json:
        print(json_format.dumps(_finite(_as_json(is_ok, rows, findings, report))))
    else:
        _print(rows, findings, report)
    if isinstance(report, str):
        print(report, file=sys.stderr)
    return 0 if is_ok else 1


def _number(devices: Any, strategy: Mapping[str, Any]) -> int:
    """Read the Trainer's number of devices, which may be a list, "auto" or a text."""
    if isinstance(devices, list | tuple):
        return len(devices)
    try:
        return int(devices)
    except (TypeError, ValueError):
        sizes = (strategy.get(f"{axis}_parallel_size", 1) for axis in ("data", "tensor"))
        length = strategy.get("pipeline_parallel_size", "auto")
        length = _DEVICES if length == "auto" else length
        return prod(size for size in (length, *sizes) if isinstance(size, int))


def _parity_rows(
    report: ParityReport | str | None, wanted: bool, is_shared: bool = False
) -> list[Row]:
    if not wanted:
        return []
    if report is None and is_shared:
        return [Row("gradients", "not checked", TENSOR_PARALLEL)]
    if report is None:
        return [Row("gradients", "not checked", "The run would be refused.")]
    if isinstance(report, str):
        return [Row("gradients", "no", "The runs came to no result; their report is below.")]
    rows = [Row("gradients", "ok" if report.is_equal else "no", report.summary)]
    if report.logged:
        differing = report.logged_differently
        names = ", ".join(differing or report.logged)
        text = f"{names}: {'not ' if differing else ''}equal"
        rows.append(Row("logged values", "warning" if differing else "ok", text))
    return rows


def _as_json(
    is_ok: bool, rows: Sequence[Row], findings: Findings, report: ParityReport | str | None
) -> dict[str, Any]:
    return {
        "ok": is_ok,
        "rows": [asdict(row) for row in rows],
        "stages": [asdict(stage) for stage in findings.stages],
        "peak_bytes": findings.peak_bytes or None,
        "parity": {"error": report} if isinstance(report, str) else report and report.as_dict(),
    }


def _finite(value: Any) -> Any:
    """Put null in the place of what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _print(rows: Sequence[Row], findings: Findings, report: ParityReport | str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    table.add_column("")
    for row in rows:
        table.add_row(row.name, Text(row.status, _STYLES[row.status]), Text(row.text))
    console.print(table)
    if findings.stages:
        _print_stages(console, findings)
    if isinstance(report, ParityReport):
        _print_parity(console, report)


def _print_stages(console: Console, findings: Findings) -> None:
    from rich.table import Table

    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "rank", "layers", "parameters"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    if findings.peak_bytes:
        table.add_column("peak of the rank", justify="right")
    for stage in findings.stages:
        names = stage.first if stage.num_layers == 1 else f"{stage.first} ... {stage.last}"
        peak = [in_gib(findings.peak_bytes[stage.rank])] if findings.peak_bytes else []
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            f"{stage.num_layers}: {names}",
            f"{stage.parameters:,}",
            *peak,
        )
    console.print(table)


def _print_parity(console: Console, report: ParityReport) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameter", overflow="fold")
    for name in ("stage", "largest difference", "relative", "norm"):
        table.add_column(name, justify="right")
    for one in report.differences[:_WORST]:
        style = _STYLES["ok" if one.relative <= report.tolerance else "no"]
        table.add_row(
            Text(one.name),
            "all" if one.stage is None else str(one.stage),
            f"{one.absolute:.1e}",
            Text(f"{one.relative:.1e}", style),
            f"{one.norm:.1e}",
        )
    console.print(table)
    if len(report.differences) > _WORST:
        console.print(f"and {len(report.differences) - _WORST} more, with smaller differences")
    if report.loss is not None:
        console.print(f"loss: {report.loss[0]:.9g}, one device {report.loss[1]:.9g}")
    for note in report.notes:
        console.print(Text(note))


class _Waiting:
    """A spinner on stderr for what takes long.

    It turns when it is told what is going on: threads and forks do not go together.
    """

    def __enter__(self) -> _Waiting:
        """Begin to wait."""
        self._begin = time.monotonic()
        self._progress: Progress | None = None
        self._task: Any = None
        return self

    def show(self, text: str) -> None:
        """Say what is going on."""
        if time.monotonic() - self._begin < _PATIENCE_S:
            return
        if self._progress is None:
            self._progress = _new_progress()
            self._progress.start()
            self._task = self._progress.add_task(text, total=None)
        self._progress.update(self._task, description=text)
        self._progress.refresh()

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        if self._progress is not None:
            self._progress.stop()


def _new_progress() -> Progress:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
