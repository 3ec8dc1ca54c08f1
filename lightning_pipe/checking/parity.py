"""Parity: does a pipeline compute the gradients that one device computes?

One small batch goes through both, and gradients are compared parameter by parameter. What must
differ by nature is told apart: random numbers, which a pipeline draws for each micro-batch, and
BatchNorm, which normalises each micro-batch. Then one device runs the same micro-batches one after
the other, with the same random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf, isnan, sqrt
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_pipe.checking.parity_records import Run
from lightning_pipe.checking.parity_runs import Job, ParityError, Phase, Runs, run
from lightning_pipe.checks import check_world

__all__ = ["Difference", "ParityError", "ParityReport", "Precision", "compare_gradients"]

Precision = Literal["64-true", "32-true"]

TENSOR_PARALLEL = (
    "Gradients cannot be compared with tensor_parallel_size above 1: the module distributes its "
    "layers over a mesh, and one device has none. Compare without it (tensor_parallel_size=1)."
)
TOLERANCES: dict[Precision, float] = {"64-true": 1e-8, "32-true": 1e-4}
_NAMED = 3  # layers that a note lists


@dataclass(frozen=True)
class Difference:
    """By how much one parameter's gradients differ.

    Attributes:
        name: Of the parameter.
        stage: On which it is; ``None`` outside the layers.
        rank: With the largest difference, if several have the parameter.
        absolute: Largest difference of two elements.
        relative: That, over the largest element of one device's gradient. Where all elements are
            small among those of the whole model, as rounding errors are, over a share of the
            largest of the model.
        norm: Of one device's gradient.
    """

    name: str
    stage: int | None
    rank: int
    absolute: float
    relative: float
    norm: float


@dataclass(frozen=True)
class ParityReport:
    """What a comparison came to.

    Attributes:
        is_equal: Whether gradients and loss agree.
        reference: What one device ran: the ``"batch"``, or its ``"micro-batches"`` one after the
            other.
        tolerance: Largest relative difference that counts as equal.
        precision: Of all computations.
        num_microbatches: Into how many the batch was cut.
        differences: By parameter, the worst first.
        loss: Of the pipeline, and of one device; ``None`` if it was left out.
        logged: Values that both have logged, of the pipeline and of one device, by name.
        notes: What a reader should know, in sentences.
    """

    is_equal: bool
    reference: Literal["batch", "micro-batches"]
    tolerance: float
    precision: Precision
    num_microbatches: int
    differences: tuple[Difference, ...]
    loss: tuple[float, float] | None
    logged: dict[str, tuple[float, float]]
    notes: tuple[str, ...]

    @property
    def logged_differently(self) -> list[str]:
        """Names of logged values that do not agree."""
        return [n for n, pair in self.logged.items() if _relative(*pair) > self.tolerance]

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        one_device = "one device"
        if self.reference == "micro-batches":
            one_device += " that runs the same micro-batches one after the other"
        bad = [d for d in self.differences if d.relative > self.tolerance]
        if self.is_equal:
            worst = self.differences[0].relative if self.differences else 0.0
            and_loss = "" if self.loss is None else " and the loss"
            return (
                f"The gradients of {len(self.differences)} parameters{and_loss} equal those of "
                f"{one_device}: the largest relative difference is {worst:.1e}."
            )
        if not bad and self.loss is not None:
            return f"The loss is {self.loss[0]:.9g}; that of {one_device} is {self.loss[1]:.9g}."
        return (
            f"The gradients of {len(bad)} of {len(self.differences)} parameters differ from those "
            f"of {one_device}, most in {bad[0].name!r}: by {bad[0].relative:.1e}, where "
            f"{self.tolerance:.0e} is allowed."
        )

    def __str__(self) -> str:
        """The verdict, the worst parameters, and the notes."""
        rows = [
            f"  {d.name}: {d.absolute:.1e} absolute, {d.relative:.1e} relative, norm {d.norm:.1e}"
            for d in self.differences[:5]
        ]
        return "\n".join([self.summary, *rows, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def compare_gradients(
    module: LightningModule,
    /,  # PipelineStrategy has a `module` too
    data: Any = None,
    devices: int = 2,
    *,
    accelerator: str = "cpu",
    precision: Precision = "64-true",
    tolerance: float | None = None,
    batch_size: int | None = None,
    time_limit: float = 300.0,
    report: Callable[[Phase], None] = lambda _: None,
    **strategy_options: Any,
) -> ParityReport:
    """Run one batch through a pipeline and through one device, and compare the gradients.

    The module is trained by neither, and what happens to it happens in other processes. For a
    user's own test::

        report = compare_gradients(LitModel(), loader, devices=2, schedule="1f1b")
        assert report.is_equal, report

    Args:
        module: To train.
        data: A datamodule or a dataloader; left out where the module has a dataloader.
        devices: Number of processes, of all replicas together. The batch is divided among
            replicas; what they log, each of its own share, is left out.
        accelerator: Of the Trainer.
        precision: Of the Trainer. In ``"64-true"`` rounding hides nothing.
        tolerance: Largest relative difference that counts as equal. By default 1e-8 in
            ``"64-true"``, 1e-4 in ``"32-true"``.
        batch_size: Number of samples to try: the first ones of the first batch. All by default.
        time_limit: In seconds, after which all processes are ended.
        report: Called again and again while it runs, with what is running.
        strategy_options: Of :class:`PipelineStrategy`.

    Raises:
        ParityError: The pipeline, or one device, came to no result.
        MisconfigurationException: An option cannot work. Ranks that share layers cannot be compared
            with one device, which has no mesh that the module could distribute its layers over.
    """
    from lightning_pipe import PipelineStrategy

    # Wrong options are refused here, not in another process.
    grid = check_world(devices, *PipelineStrategy(**strategy_options)._sizes)
    if grid.tensor > 1:
        raise MisconfigurationException(TENSOR_PARALLEL)
    limit = TOLERANCES[precision] if tolerance is None else tolerance
    job = Job(module, data, grid, strategy_options, accelerator, precision, batch_size, time_limit)
    runs = run(job, functools.partial(agree, tolerance=limit), report)
    return judge(runs, module, limit, precision, grid.data)


def agree(ranks: Sequence[Run], reference: Run, tolerance: float) -> bool:
    """Say whether a pipeline's gradients and loss are those of a reference.

    Args:
        ranks: Of the pipeline.
        reference: One device's.
        tolerance: See :func:`compare_gradients`.
    """
    differences = compare(ranks, reference, tolerance)
    return _are_equal(ranks, reference, differences, tolerance)


def compare(ranks: Sequence[Run], reference: Run, tolerance: float) -> list[Difference]:
    """Compare gradients, the worst first.

    Args:
        ranks: Of the pipeline.
        reference: One device's.
        tolerance: Relative. Gradients whose elements are smaller than its root, times the largest
            of the model, are compared on that scale: those of a bias before a BatchNorm, which are
            zero but for rounding, would never agree else.
    """
    largest = max((_largest(g) for g in reference.gradients.values()), default=0.0)
    differences = []
    for name, expected in reference.gradients.items():
        scale = max(_largest(expected), sqrt(tolerance) * largest)
        off, rank = max(
            (
                (_distance(run.gradients[name], expected), rank)
                for rank, run in enumerate(ranks)
                if name in run.gradients
            ),
            default=(_largest(expected), 0),  # no rank has it
        )
        relative = off / scale if scale else (inf if off else 0.0)
        stage = next((run.stage_of[name] for run in ranks if name in run.stage_of), None)
        norm = float(expected.double().norm()) if expected is not None else 0.0
        differences.append(Difference(name, stage, rank, off, relative, norm))
    return sorted(differences, key=lambda difference: -difference.relative)


def judge(
    runs: Runs,
    module: LightningModule,
    tolerance: float,
    precision: Precision,
    replicas: int = 1,
) -> ParityReport:
    """Choose what the pipeline is to be compared with, and say why.

    Args:
        runs: Of pipeline and one device.
        module: The user's, for names of layers.
        tolerance: See :func:`compare_gradients`.
        precision: See :func:`compare_gradients`.
        replicas: Each of which had a share of the batch.
    """
    ranks, reference, notes = runs.ranks, runs.whole, []
    kind: Literal["batch", "micro-batches"] = "batch"
    if runs.again is not None and runs.one_by_one is not None:
        is_random = not agree([runs.again], runs.whole, tolerance)
        norms = [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
        if is_random:
            notes.append(_random_note(module))
        if norms:
            notes.append(
                f"{_listed(norms, 'BatchNorm')} normalises by micro-batch in a pipeline and by "
                "batch on one device, so that their gradients differ unless num_microbatches=1."
            )
        if is_random or norms:
            kind, reference = "micro-batches", runs.one_by_one
        elif agree(ranks, runs.one_by_one, tolerance):
            notes.append(
                "They are what one device computes from the micro-batches one after the other, "
                "but the loss of the batch is not the mean of theirs, weighted by samples: it may "
                "be a sum, a mean over tokens, or compare samples with each other. Return "
                "{'loss': loss, 'weight': number that the loss is a mean over} from training_step, "
                "or use num_microbatches=1."
            )
    differences = compare(ranks, reference, tolerance)
    is_equal = _are_equal(ranks, reference, differences, tolerance)
    worst = differences[0].relative if differences else 0.0
    if not is_equal and precision == "64-true" and tolerance < worst < 1e-5:
        notes.append(
            "So small a difference is one of rounding if the module computes in float32 somewhere "
            "(tensor.float(), dtype=torch.float32). Compare with precision='32-true' then."
        )
    last = ranks[-1]
    if replicas > 1:
        notes.append(_note_on_replicas(replicas, last.loss))
        last.logged = {}
    logged = {
        name: (last.logged[name], value)
        for name, value in reference.logged.items()
        if name in last.logged
    }
    report = ParityReport(
        is_equal,
        kind,
        tolerance,
        precision,
        len(last.sizes),
        tuple(differences),
        None if last.loss is None or reference.loss is None else (last.loss, reference.loss),
        logged,
        (),
    )
    if names := report.logged_differently:
        notes.append(
            f"Logged values that differ: {', '.join(map(repr, names))}. A pipeline puts those of "
            "micro-batches together, by reduce_fx, weighted by samples: that is exact for means "
            "over samples only. torchmetrics are exact."
        )
    return ParityReport(**{**vars(report), "notes": tuple(notes)})


def _are_equal(
    ranks: Sequence[Run], reference: Run, differences: Sequence[Difference], tolerance: float
) -> bool:
    losses = [
        _relative(run.loss, reference.loss)
        for run in ranks
        if run.loss is not None and reference.loss is not None
    ]
    # Not `any(... > tolerance)`: what is not a number is not equal.
    return all(off <= tolerance for off in (*losses, *(d.relative for d in differences)))


def _note_on_replicas(replicas: int, loss: float | None) -> str:
    left_out = "logged values, which each has of its own share"
    if loss is None:
        left_out += ", and the loss, since training_step returns weights of its own"
    return f"{replicas} replicas had a share of the batch each. Not compared: {left_out}."


def _relative(value: float, expected: float) -> float:
    if value == expected:
        return 0.0
    return abs(value - expected) / max(abs(expected), 1e-300)


def _largest(gradient: Tensor | None) -> float:
    if gradient is None or not gradient.numel():
        return 0.0
    return float(gradient.abs().max())


def _distance(gradient: Tensor | None, expected: Tensor | None) -> float:
    """Give the largest difference; a gradient that is missing is zero."""
    if gradient is None or expected is None:
        return _largest(expected if gradient is None else gradient)
    distance = _largest(gradient.double() - expected.double())
    return inf if isnan(distance) else distance


def _random_note(module: LightningModule) -> str:
    drawing = [
        name
        for name, layer in module.named_modules()
        if (isinstance(layer, _DropoutNd) and layer.p > 0)
        or isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
        or (isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0)
    ]
    what = _listed(drawing, "Random layer") if drawing else "The step"
    return (
        f"{what} draws random numbers, in a pipeline anew for each micro-batch and layer. One "
        "device drew the same."
    )


def _listed(names: Sequence[str], kind: str) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{kind} {', '.join(map(repr, names[:_NAMED]))}{more}"
