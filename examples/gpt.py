"""A byte-level GPT as an ordinary LightningModule: nothing in here knows about pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

VOCABULARY = 256  # all bytes


class Embedding(nn.Module):
    """Bytes and their positions, ``[batch, time]`` to ``[batch, time, width]``."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """A pre-norm transformer block (Xiong et al. 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class Head(nn.Sequential):
    """Scores of all bytes, ``[batch, time, width]`` to ``[batch, time, 256]``."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))
        nn.init.normal_(self[1].weight, std=0.02)  # the first loss is log(256), about 5.5


class LitGPT(L.LightningModule):
    """Predicts the next byte; losses are in nats per byte.

    Args:
        context: Bytes that it sees at most.
        width: Of the residual stream.
        depth: Number of blocks.
        heads: Of each block's attention.
        optimizer: Makes an optimizer, given the parameters.
        scheduler: Makes a learning rate scheduler, stepped after every batch, given the optimizer.
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = AdamW,
        scheduler: Callable[[Optimizer], LRScheduler] = LinearLR,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.model = nn.Sequential(
            Embedding(context, width),
            *[Block(width, heads) for _ in range(depth)],
            Head(width),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, next_tokens = batch
        return F.cross_entropy(self.model(tokens).flatten(0, 1), next_tokens.flatten())
