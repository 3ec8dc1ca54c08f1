"""A GPT whose layers are shared by two ranks each, in a pipeline of two stages: four processes.

The module says in `configure_model` which tensors are cut and how, as for Lightning's
ModelParallelStrategy, by torch's `parallelize_module`. The cuts are Megatron's (Shoeybi et al.
2019): the first of two linear layers by columns, the second by rows, so that they meet once, where
the second's parts are summed; attention by heads; embedding and loss by the vocabulary.

python examples/tensor_parallel.py
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from gpt import VOCABULARY, Embedding, Head
from stdlib_text import StdlibText
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from lightning_pipe import PipelineStrategy


class Block(nn.Module):
    """A pre-norm transformer block, ``[batch, time, width]`` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.narrow(F.gelu(self.widen(self.feed_forward_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention of this rank's heads: as many as its part of the layers gives."""
        queries, keys, values = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.mix(mixed.transpose(1, 2).flatten(2))


BY_TOKENS = {"tokens": RowwiseParallel(input_layouts=Replicate())}
BY_HEADS_AND_COLUMNS = {
    **{name: ColwiseParallel() for name in ("queries", "keys", "values", "widen")},
    **{name: RowwiseParallel() for name in ("mix", "narrow")},
}
# Scores stay cut: each rank has those of its part of the vocabulary, and so the loss is computed.
BY_SCORES = {"1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}


class TensorParallelGPT(L.LightningModule):
    """Predicts the next byte.

    Args:
        context: Bytes that it sees at most.
        width: Of the residual stream.
        depth: Number of blocks.
        heads: Of each block's attention.
    """

    def __init__(self, context: int = 32, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if hasattr(self, "model"):  # it is called before each run
            return
        sizes = self.hparams
        embedding, head = Embedding(sizes.context, sizes.width), Head(sizes.width)
        blocks = [Block(sizes.width, sizes.heads) for _ in range(sizes.depth)]
        if self.device_mesh is not None:
            self.distribute(embedding, blocks, head, self.device_mesh["tensor_parallel"])
        self.model = nn.Sequential(embedding, *blocks, head)

    def distribute(
        self, embedding: nn.Module, blocks: list[Block], head: nn.Module, mesh: DeviceMesh
    ) -> None:
        """Cut the layers. Each rank makes those of its own stage only, afterwards."""
        parallelize_module(embedding, mesh, BY_TOKENS)
        for block in blocks:
            parallelize_module(block, mesh, BY_HEADS_AND_COLUMNS)
        parallelize_module(head, mesh, BY_SCORES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, next_tokens = batch
        scores = self.model(tokens).flatten(0, 1)
        with loss_parallel():  # the backward runs under it as well
            return F.cross_entropy(scores, next_tokens.flatten())


def main() -> None:
    """Train on four processes, then read the checkpoint without any of that."""
    torch.set_num_threads(1)
    L.seed_everything(1)
    strategy = PipelineStrategy(
        pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=4
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_steps=30,
        limit_val_batches=4,
        val_check_interval=30,
        logger=False,
        gradient_clip_val=1.0,
    )
    data = StdlibText(context=32, batch_size=16)
    trainer.fit(TensorParallelGPT(), data)
    trainer.save_checkpoint("tensor_parallel.ckpt")
    if trainer.is_global_zero:
        whole = TensorParallelGPT.load_from_checkpoint("tensor_parallel.ckpt")
        text = torch.frombuffer(bytearray(b"    def __init__(self, "), dtype=torch.uint8).long()
        likeliest = whole.model(text[None])[0, -1].softmax(-1).max()
        print(f"validation loss: {trainer.callback_metrics['val_loss']:.3f} nats per byte")
        print(f"parameters in the file: {sum(p.numel() for p in whole.parameters())}")
        print(f"the likeliest byte comes with {likeliest:.0%}, of {VOCABULARY} bytes")


if __name__ == "__main__":
    main()
