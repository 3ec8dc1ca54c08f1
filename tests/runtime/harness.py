"""Pipelines in one process: for each rank a thread, a model and an end of a `LocalTransport`.

Ranks get what they get in a real run: the layers of other ranks are on the meta device, so a rank
that touches one fails. What a test compares them with is plain Lightning on one device.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe.assembly import Assembly, Settings
from lightning_pipe.partition import find_layers, shard
from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.pipeline import Pipeline
from lightning_pipe.runtime.random_state import RandomStates
from lightning_pipe.runtime.rounds import Wishes
from lightning_pipe.runtime.training import TrainingResult
from lightning_pipe.runtime.transport import LocalHub, LocalTransport

torch.set_num_threads(1)

T = TypeVar("T")
_TIMEOUT = 20.0  # seconds that a rank waits for another before the test fails


@dataclass(frozen=True)
class Layout:
    """How a model becomes a pipeline."""

    schedule: str = "1f1b"
    num_ranks: int = 2
    num_microbatches: int = 4
    stages_per_rank: int = 1
    checkpointing: Any = "none"
    partition: Any = "uniform"
    evaluation_outputs: Any = "all"
    weight_stashing: bool = True
    vertical_sync: bool = False
    deferred_batchnorm: bool = False

    @property
    def settings(self) -> Settings:
        return Settings(
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            stages_per_rank=self.stages_per_rank,
            partition=self.partition,
            module=None,
            activation_checkpointing=self.checkpointing,
            evaluation_outputs=self.evaluation_outputs,
            weight_stashing=self.weight_stashing,
            vertical_sync=self.vertical_sync,
            deferred_batchnorm=self.deferred_batchnorm,
        )


class Rank:
    """One rank: its model, its end of the pipeline, its optimizer."""

    def __init__(self, model: L.LightningModule, layout: Layout, transport: LocalTransport) -> None:
        self.index, self.model = transport.rank, model
        assembly = Assembly(self.model, layout.settings, transport.rank, layout.num_ranks)
        sharing = assembly.shares(transport.groups).sharing()
        self.pipeline: Pipeline = assembly.connect(transport, RandomStates(0), sharing)
        own = {id(layer) for stage in self.pipeline.stages.values() for layer in stage.layers}
        found = find_layers(self.model)
        shard(found, [i for i, layer in enumerate(found.layers) if id(layer) in own])
        self.optimizer: Any = self.model.configure_optimizers()
        self.pipeline.apply_updates_by(self._apply)
        self.num_batches = 0
        self._lr_of: Callable[[int], float] | None = None

    def step(self, batch: Any, ends: bool = True) -> TrainingResult:
        """Run one batch through the pipeline; the gradients wait in the result."""
        number, self.num_batches = self.num_batches, self.num_batches + 1
        return self.pipeline.train(
            lambda microbatch, _: self.model.training_step(microbatch, number),
            batch,
            number,
            wishes=Wishes(ends=lambda _: ends),
        )

    def fit(
        self,
        batches: Sequence[Any],
        accumulate: int = 1,
        drains: Collection[int] = (),
        lr_of: Callable[[int], float] | None = None,
    ) -> list[float]:
        """Train as Lightning's loop does, which updates after the last batch in any case.

        An asynchronous schedule drains after the batches in ``drains`` and after the last. The
        update that comes from a batch has the learning rate that ``lr_of`` gives for it.
        """
        losses: list[float] = []
        self._lr_of = lr_of
        for number, batch in enumerate(batches):
            self.model.on_train_batch_start(batch, number)
            last = number + 1 == len(batches)
            result = self.step(batch, ends=last or number in drains)
            if number % accumulate == 0:
                self.optimizer.zero_grad()
            result.deliver(1 / accumulate)
            if result.update is not None and ((number + 1) % accumulate == 0 or last):
                self._update(result.update)
            losses += [finished.loss.item() for finished in result.finished]
        return losses

    def _update(self, batch: int) -> None:
        if self._lr_of is not None:
            self.optimizer.param_groups[0]["lr"] = self._lr_of(batch)
        self.optimizer.step()

    def _apply(self, gradients: Any, batch: int) -> None:
        """Make an update that the pipeline does not leave to `fit`."""
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._update(batch)
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers that live here."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if not tensor.is_meta}


@dataclass
class Trained:
    """What a training run came to: weights by name, and the loss of each batch."""

    weights: dict[str, Tensor]
    losses: list[float]


def on_ranks(num_ranks: int, work: Callable[[LocalTransport], T]) -> list[T]:
    """Run `work` on all ranks at once; raise the error that came first, the others as notes."""
    results, errors = _run(num_ranks, work)
    if errors:
        first, *others = errors.items()
        for rank, error in others:
            first[1].add_note(f"Then rank {rank}: {error!r}")
        raise first[1]
    return [results[rank] for rank in range(num_ranks)]


def errors_on_ranks(num_ranks: int, work: Callable[[LocalTransport], Any]) -> dict[int, Exception]:
    """Run `work` on all ranks at once; give the errors by rank, first things first."""
    return _run(num_ranks, work)[1]


def the_cause(errors: dict[int, Exception]) -> tuple[int, Exception]:
    """The one rank that failed by itself: the others have only lost it."""
    causes = [(r, error) for r, error in errors.items() if not isinstance(error, PeerLostError)]
    assert len(causes) == 1, f"expected one rank to fail, got {errors}"
    return causes[0]


def _run(
    num_ranks: int, work: Callable[[LocalTransport], T]
) -> tuple[dict[int, T], dict[int, Exception]]:
    hub = LocalHub(num_ranks, _TIMEOUT)
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(LocalTransport(rank, hub))
        except Exception as error:
            errors[rank] = error
            hub.abort()

    if num_ranks == 1:
        run(0)
        return results, errors
    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _TIMEOUT)
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang; the others: {errors}"
    return results, errors


def pipelined(
    make_model: Callable[[], L.LightningModule],
    batches: Sequence[Any],
    layout: Layout,
    accumulate: int = 1,
    drains: Collection[int] = (),
    lr_of: Callable[[int], float] | None = None,
) -> Trained:
    """Train in a pipeline; check that what lives on several ranks is equal there."""
    models = [make_model() for _ in range(layout.num_ranks)]  # before threads share a generator

    def work(transport: LocalTransport) -> Trained:
        rank = Rank(models[transport.rank], layout, transport)
        losses = rank.fit(batches, accumulate, drains, lr_of)
        return Trained(rank.weights(), losses)

    whole, *others = on_ranks(layout.num_ranks, work)
    for other in others:
        assert other.losses == whole.losses, "ranks disagree on the losses"
        for name, tensor in other.weights.items():
            assert torch.equal(whole.weights.setdefault(name, tensor), tensor), f"{name} differs"
    return whole


def one_device(
    make_model: Callable[[], L.LightningModule], batches: Sequence[Any], accumulate: int = 1
) -> Trained:
    """Train with plain Lightning."""
    model, losses = make_model(), _Losses(accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=losses,
        )
        trainer.fit(model, DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch))
    named = [*model.named_parameters(), *model.named_buffers()]
    return Trained({name: tensor.detach() for name, tensor in named}, losses.values)


@dataclass
class _Losses(L.Callback):
    """Records each batch's loss, which Lightning divides by the batches of an update."""

    accumulate: int
    values: list[float] = field(default_factory=list)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(outputs["loss"].item() * self.accumulate)


def difference(ours: Trained, expected: Trained) -> str | None:
    """Where two runs differ by more than 1e-10; `None` if nowhere."""
    if ours.weights.keys() != expected.weights.keys():
        return f"weights {sorted(ours.weights.keys() ^ expected.weights.keys())} on one side only"
    for number, (a, b) in enumerate(zip(ours.losses, expected.losses, strict=True)):
        if not abs(a - b) <= 1e-10:
            return f"loss of batch {number} is {a}, expected {b}"
    for name, weight in expected.weights.items():
        off = (ours.weights[name] - weight).abs().max().item()
        if not off <= 1e-10:
            return f"{name} is off by {off:.1e}"
    return None


def assert_equal(ours: Trained, expected: Trained) -> None:
    """Fail where two runs differ by more than 1e-10."""
    found = difference(ours, expected)
    assert found is None, found


class Module(L.LightningModule):
    """Layers, a mean square error, and AdamW; float64. Tests override what they are about."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With its usual eps Adam's step hardly depends on the scale of the gradients, and would
        # hide a wrong one.
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=0.1, weight_decay=0.1)
