"""A small language model whose layers are shared by the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainer.lit import Options, numbers, trainer

from .models import SAMPLES, Shares

VOCABULARY, TIME, WIDTH, HEADS, DEPTH = 12, 5, 8, 4, 2


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


def distribute(model: nn.Sequential, mesh: DeviceMesh, cut_scores: bool) -> None:
    embedding, *blocks, head = model
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    for block in blocks:
        parallelize_module(block, mesh, BLOCK)
    layout = Shard(-1) if cut_scores else Replicate()
    style = ColwiseParallel(output_layouts=layout, use_local_output=not cut_scores)
    parallelize_module(head, mesh, style)


class Sharded(L.LightningModule):
    """Predicts tokens.

    Args:
        dropout: In the blocks.
        early: Whether the layers are built before the mesh is there.
        loss_parallel: Whether each rank has the scores of some tokens.
        starts_late: Whether layers start from numbers that are drawn when they are cut already.
        tied: Whether the last layer has the weight of the first.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        early: bool = False,
        loss_parallel: bool = False,
        starts_late: bool = False,
        tied: bool = False,
    ) -> None:
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
            mesh = self.device_mesh["tensor_parallel"]
            distribute(self.model, mesh, self.hparams.loss_parallel)
        if self.hparams.tied:
            self.model[-1].weight = self.model[0].weight
        if self.hparams.starts_late:
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
                    nn.init.trunc_normal_(module.weight, std=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        scores = self.model(tokens)
        if self.bias.requires_grad:  # PipeDream takes no parameter outside of the layers
            if isinstance(scores, DTensor):
                bias = DTensor.from_local(self.bias, scores.device_mesh, [Replicate()])
                scores = scores + bias
            else:
                scores = scores + self.bias
        cut = isinstance(scores, DTensor)  # not on one device, nor in evaluation
        with loss_parallel() if cut else nullcontext():
            return F.cross_entropy(scores.flatten(0, 1), following.flatten())

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
    short_trainer(pipeline, **options).fit(module)
    return weights(module)


def short_trainer(pipeline: Options | None, **options: Any) -> L.Trainer:
    """Few steps: an operation on a DTensor takes long on a CPU."""
    if pipeline is not None and not pipeline.get("schedule", "").startswith("pipedream"):
        pipeline = {"num_microbatches": 2, **pipeline}
    options = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 1, **options}
    return trainer(pipeline, use_distributed_sampler=False, **options)


def fit_and_save(pipeline: Options | None, path: Path) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = Sharded()
    run = short_trainer(pipeline)
    run.fit(module)
    run.save_checkpoint(path)
    return weights(module)


def resume(pipeline: Options | None, path: Path) -> dict[str, Tensor]:
    L.seed_everything(4, verbose=False)
    module = Sharded()
    short_trainer(pipeline, max_epochs=2).fit(module, ckpt_path=path)
    return weights(module)


def run_after_run(pipelines: list[Options | None]) -> dict[str, Any]:
    """Train one module with one partition after the other."""
    L.seed_everything(7, verbose=False)
    module = Sharded()
    after = []
    for pipeline in pipelines:
        run = short_trainer(pipeline)
        run.fit(module)
        after.append(weights(module))
    (validated,) = run.validate(module, verbose=False)
    return {"after": after, "validated": numbers(validated)}


def parts_in_memory(pipeline: Options) -> dict[str, Any]:
    """By parameter, the shape of this rank's part when training begins; None, if it is absent."""
    found: dict[str, Any] = {}

    class Looking(Sharded):
        def on_fit_start(self) -> None:
            for name, tensor in self.model.named_parameters():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                found[name] = None if local.is_meta else tuple(local.shape)

    short_trainer(pipeline, max_steps=1).fit(Looking())
    return found
