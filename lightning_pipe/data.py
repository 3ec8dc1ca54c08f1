"""All ranks of one pipeline load the same batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function


def load_alike(dataloader: Any, broadcast: Callable[[Any], Any], replica: int) -> None:
    """Let a dataloader give the same batches on all ranks of a pipeline.

    What it draws from the process's own random state agrees already, since the ranks keep that
    alike. Left are generators of its own, and Lightning's seeding of workers, which would differ
    by rank.

    Args:
        dataloader: Any iterable.
        broadcast: Gives rank 0's value to all. Called equally often on all ranks.
        replica: Data-parallel rank: replicas augment differently.
    """
    generators = list(_generators(dataloader))
    states = broadcast([generator.get_state() for generator in generators])
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    seeds_workers = int(os.environ.get("PL_SEED_WORKERS", 0))
    if seeds_workers and getattr(dataloader, "worker_init_fn", replica) is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


def _generators(dataloader: Any) -> Iterator[torch.Generator]:
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    owners = [
        dataloader,
        getattr(dataloader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    seen = set()
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in seen:
            seen.add(id(generator))
            yield generator
