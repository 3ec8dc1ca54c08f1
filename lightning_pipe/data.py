"""All ranks of one pipeline load the same batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves

from lightning_pipe.runtime.errors import PipelineError


def load_alike(dataloader: Any, broadcast: Callable[[Any], Any], replica: int) -> None:
    """Let a dataloader give the same batches on all ranks of a pipeline.

    What it draws from the process's own random state agrees already, since the ranks keep that
    alike. Left are generators of its own, and Lightning's seeding of workers, which would differ
    by rank.

    Args:
        dataloader: Any iterable.
        broadcast: Gives rank 0's value to all. Called equally often on all ranks.
        replica: Data-parallel rank: replicas augment differently.

    Raises:
        PipelineError: It has another number of batches than on rank 0, and ranks would wait for
            each other at the end.
    """
    generators, batches = list(_generators(dataloader)), sized_len(dataloader)
    own = [generator.get_state() for generator in generators], batches
    states, expected = broadcast(own)
    if batches != expected:
        data = getattr(dataloader, "dataset", dataloader)
        raise PipelineError(
            f"The {type(dataloader).__name__} over {type(data).__name__} has {batches} batches on "
            f"this rank of the pipeline and {expected} on the first. All ranks of a pipeline must "
            "load the same batches: let the length of the data not depend on the rank."
        )
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    seeds_workers = int(os.environ.get("PL_SEED_WORKERS", 0))
    if seeds_workers and getattr(dataloader, "worker_init_fn", replica) is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


@contextmanager
def untouched(data: Any) -> Iterator[None]:
    """Put the generators of all loaders in a collection back at the end."""
    loaders = tree_leaves(data.iterables if isinstance(data, CombinedLoader) else data)
    generators = [generator for loader in loaders for generator in _generators(loader)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


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
