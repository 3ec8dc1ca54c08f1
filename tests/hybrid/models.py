"""Models and data for several pipelines, and how one device would train on the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler
from trainer.lit import Classifier, Options, samples, trainer, weights

SAMPLES, BATCH = 37, 8
VOCABULARY, WIDTH = 7, 6


class Shares(Sampler[list[int]]):
    """The batches of one replica: its share of each global batch, the last of which is short.

    Args:
        replica: Which.
        shares: Of all replicas.
        count: Of samples.
    """

    def __init__(self, replica: int, shares: tuple[int, ...], count: int = SAMPLES) -> None:
        before, whole = sum(shares[:replica]), sum(shares)
        self._part = [before / whole, (before + shares[replica]) / whole]
        self._count = count

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self._count, BATCH):
            batch = list(range(start, min(start + BATCH, self._count)))
            first, last = (round(len(batch) * part) for part in self._part)
            yield batch[first:last]

    def __len__(self) -> int:
        return -(-self._count // BATCH)


def replica_of(run: L.Trainer) -> tuple[int, int]:
    """This process's replica, and how many there are."""
    kwargs = getattr(run.strategy, "distributed_sampler_kwargs", None) or {}
    return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)


class DealtOut(L.LightningModule):
    """Loads its replica's shares of each batch (a mixin)."""

    shares: tuple[int, ...] | None = None

    def train_dataloader(self) -> Any:
        replica, replicas = replica_of(self.trainer)
        shares = self.shares if self.shares and replicas > 1 else (1,) * replicas
        return DataLoader(self.data(), batch_sampler=Shares(replica, shares))

    def data(self) -> Any:
        return samples(SAMPLES)

    def configure_optimizers(self) -> Any:
        # With its usual eps Adam's step hardly depends on the scale of the gradients.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=0.1)


class Dealt(DealtOut, Classifier):
    """The usual classifier, of which a parameter is outside of all layers."""


class Inside(Dealt):
    """The same without it, for asynchronous schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature.requires_grad_(False)


class Weighted(Dealt):
    """Weighs its samples by their class, so that micro-batches have weights of their own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = (1.0 + y).sum()
        losses = F.cross_entropy(self.model(x) * self.log_temperature.exp(), y, reduction="none")
        return {"loss": ((1.0 + y) * losses).sum() / weight, "weight": weight}


class Tied(DealtOut):
    """Predicts the next of some symbols; the head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *hidden, head)
        head.weight = self.model[0].weight

    def data(self) -> Any:
        tokens = torch.arange(SAMPLES * 5).view(SAMPLES, 5)
        return ((tokens * tokens) % VOCABULARY).unbind(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss


class TiedLate(Tied):
    """Built in `configure_model`, where nothing has memory; three stages have the weight."""

    def build(self) -> None:
        if self._trainer is None:  # not yet
            return
        super().build()
        middle = nn.Linear(WIDTH, VOCABULARY, bias=False)
        middle.weight = self.model[0].weight
        self.model.insert(3, nn.Sequential(middle, nn.Linear(VOCABULARY, WIDTH)))

    def configure_model(self) -> None:
        self.build()


def fit(
    kind: type[DealtOut],
    pipeline: Options | None,
    options: Options | None = None,
    shares: tuple[int, ...] | None = None,
) -> dict[str, Tensor]:
    """Train, and return the weights."""
    L.seed_everything(3, verbose=False)
    module = kind()
    module.shares = shares
    trainer(pipeline, use_distributed_sampler=False, **options or {}).fit(module)
    return weights(module)
