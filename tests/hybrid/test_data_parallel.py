"""Replicas of a pipeline train to the weights of one device with the same global batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from trainer.lit import Classifier, Options, assert_equal_weights, samples, trainer, weights
from trainer.ranks import Ranks

SAMPLES, BATCH = 37, 8


class Shares(Sampler[list[int]]):
    """Batches of a replica: each global batch is dealt out, by default in equal shares."""

    def __init__(self, replica: int, replicas: int, shares: tuple[int, ...] | None = None) -> None:
        self._replica, self._shares = replica, shares or (1,) * replicas

    def __iter__(self) -> Any:
        whole = sum(self._shares)
        first = sum(self._shares[: self._replica])
        for start in range(0, SAMPLES, BATCH):
            batch = list(range(start, min(start + BATCH, SAMPLES)))
            cut = [
                len(batch) * share // whole
                for share in (first, first + self._shares[self._replica])
            ]
            yield batch[cut[0] : cut[1]]

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)


class Model(Classifier):
    """Loads its replica's shares; sums its losses with SGD's momentum, so that scales matter."""

    def __init__(self, shares: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self._shares = shares

    def train_dataloader(self) -> Any:
        kwargs = (
            self.trainer.strategy.distributed_sampler_kwargs
            if self.trainer.world_size > 1
            else {"num_replicas": 1, "rank": 0}
        )
        return DataLoader(
            samples(SAMPLES),
            batch_sampler=Shares(
                kwargs["rank"],
                kwargs["num_replicas"],
                self._shares if kwargs["num_replicas"] > 1 else None,
            ),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=0.1)


def fit(
    pipeline: Options | None, options: Options, shares: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = Model(shares)
    trainer(pipeline, use_distributed_sampler=False, **options).fit(module)
    return weights(module)


@pytest.mark.parametrize(
    ("size", "pipeline", "options", "shares"),
    [
        (2, {"schedule": "1f1b", "data_parallel_size": 2}, {}, None),
        (4, {"schedule": "1f1b", "data_parallel_size": 2}, {"gradient_clip_val": 0.05}, None),
        (4, {"schedule": "gpipe", "data_parallel_size": 2}, {"accumulate_grad_batches": 2}, None),
        (4, {"schedule": "1f1b", "data_parallel_size": 2, "num_microbatches": 2}, {}, (3, 1)),
        (8, {"schedule": "interleaved", "stages_per_rank": 2, "data_parallel_size": 4}, {}, None),
        (8, {"schedule": "zero_bubble", "data_parallel_size": 4}, {}, None),
    ],
)
def test_weights_equal_one_device(
    ranks: Ranks, size: int, pipeline: Options, options: Options, shares: Any
) -> None:
    (expected,) = ranks.run(1, fit, None, options)
    whole, *_ = ranks.run(size, fit, pipeline, options, shares)
    assert_equal_weights(whole, expected)
