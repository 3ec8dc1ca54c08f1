"""A small language model whose layers are shared by the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainer.lit import Options, trainer

from .models import SAMPLES, Shares

VOCABULARY, TIME, WIDTH, HEADS, DEPTH = 12, 5, 8, 4, 3


class Attention(nn.Module):
    """Heads that each rank has some of."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.values = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        ]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, and two linear layers cut by columns, then by rows."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


BLOCK = {
    **{f"attention.{name}": ColwiseParallel() for name in ("queries", "keys", "values")},
    "attention.output": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def build(dropout: float) -> nn.Sequential:
    blocks = [Block(dropout) for _ in range(DEPTH)]
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, head)


def distribute(model: nn.Sequential, mesh: DeviceMesh) -> None:
    embedding, *blocks, head = model
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    for block in blocks:
        parallelize_module(block, mesh, BLOCK)
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))


class Sharded(L.LightningModule):
    """Predicts tokens.

    Args:
        dropout: In the blocks.
        early: Whether the layers are built before the mesh is there.
    """

    def __init__(self, dropout: float = 0.0, early: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))  # outside of all layers
        if early:
            self.model = build(dropout)

    def configure_model(self) -> None:
        if not self.hparams.early:
            if hasattr(self, "model"):  # in a second run
                return
            self.model = build(self.hparams.dropout)
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            distribute(self.model, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        scores = self.model(tokens) + (self.bias if not self._is_continuous else 0.0)
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())

    @property
    def _is_continuous(self) -> bool:
        """PipeDream refuses what is outside of the layers."""
        return not self.bias.requires_grad

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=0.1)

    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy
        replicas = {"num_replicas": 1, "rank": 0}
        if self.trainer.world_size > 1:
            replicas = strategy.distributed_sampler_kwargs
        sampler = Shares(replicas["rank"], (1,) * replicas["num_replicas"])
        return DataLoader(sentences(), batch_sampler=sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(sentences(), 8)


def sentences() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (SAMPLES, TIME + 1), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


def whole(tensor: Tensor) -> Tensor:
    """Collective for a DTensor that is there."""
    if isinstance(tensor, DTensor) and not tensor.is_meta:
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def weights(module: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole; those of layers of other ranks on the meta device."""
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def together(by_rank: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The weights of all ranks; where several have some, they are equal."""
    found = {}
    for name in by_rank[0]:
        there = [each[name] for each in by_rank if not each[name].is_meta]
        for other in there[1:]:
            torch.testing.assert_close(other, there[0], rtol=0, atol=1e-12)
        found[name] = there[0]
    return found


def fit(
    pipeline: Options | None, options: Options, model: Options, frozen_bias: bool = False
) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = Sharded(**model)
    module.bias.requires_grad_(not frozen_bias)
    trainer(pipeline, use_distributed_sampler=False, **options).fit(module)
    return weights(module)
