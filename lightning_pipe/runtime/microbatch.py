"""Cut a batch into micro-batches, and put their outputs together again.

A batch is any nesting of tuples, named tuples, lists, dicts and dataclasses. The batch size N is
Lightning's: dimension 0 of the first tensor found. What is cut, along dimension 0, into
``min(num_microbatches, N)`` pieces of nearly equal size:

* tensors whose dimension 0 is N;
* lists of length N that hold one item per sample (no tensor inside has N rows itself), and tuples
  of N strings, into which torch's ``default_collate`` puts texts.

Everything else, scalars included, is shared by all micro-batches.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor


def split_sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Samples per micro-batch: ``tensor_split``'s sizes (``chunk`` may give fewer pieces)."""
    pieces = min(num_microbatches, batch_size)
    small, larger_ones = divmod(batch_size, pieces)
    return [small + 1] * larger_ones + [small] * (pieces - larger_ones)


def find_batch_size(batch: Any) -> int | None:
    """Dimension 0 of the first tensor in ``batch``; ``None`` if there is no such tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    for item in _children(batch):
        size = find_batch_size(item)
        if size is not None:
            return size
    return None


def leaves_of(batch: Any) -> Iterator[Any]:
    """Whatever in a batch is no container, in order."""
    children = _children(batch)
    if not children:
        yield batch
    for child in children:
        yield from leaves_of(child)


def split_batch(batch: Any, num_microbatches: int) -> tuple[list[Any], list[int]]:
    """Cut ``batch`` into at most ``num_microbatches`` pieces.

    Returns:
        The micro-batches, and the number of samples in each.

    Raises:
        MisconfigurationException: The batch holds no tensor with a dimension 0 and is to be cut.
    """
    batch_size = find_batch_size(batch)
    if batch_size is None or batch_size == 0:
        if num_microbatches == 1:
            return [batch], [1]
        raise MisconfigurationException(
            f"A batch of type {type(batch).__name__} is to be cut into {num_microbatches} "
            "micro-batches, but holds no tensor with samples along dimension 0. Put one in, or "
            "define `split_batch(self, batch, num_microbatches) -> list` in the LightningModule."
        )
    sizes = split_sizes(batch_size, num_microbatches)
    if len(sizes) == 1:
        return [batch], sizes
    return _split(batch, batch_size, sizes), sizes


def first_samples(batch: Any, count: int) -> Any:
    """Give the first samples of a batch.

    Raises:
        MisconfigurationException: It does not have so many.
    """
    batch_size = find_batch_size(batch)
    if batch_size is None or not 1 <= count <= batch_size:
        raise MisconfigurationException(
            f"batch_size={count} with a first batch of {batch_size} samples: expected a number "
            f"from 1 to {batch_size}."
        )
    if count == batch_size:
        return batch
    return _split(batch, batch_size, [count, batch_size - count])[0]


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def _split(value: Any, batch_size: int, sizes: list[int]) -> list[Any]:
    """One piece of ``value`` for each micro-batch."""
    if isinstance(value, Tensor):
        if value.ndim and value.shape[0] == batch_size:
            return list(torch.split(value, sizes))
    elif _has_items(value, batch_size):
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    elif children := _children(value):
        split = [_split(child, batch_size, sizes) for child in children]
        return [_rebuild(value, pieces) for pieces in zip(*split, strict=True)]
    return [value] * len(sizes)


def _has_items(value: Any, batch_size: int) -> bool:
    if isinstance(value, list):
        return len(value) == batch_size and not _has_rows(value, batch_size)
    texts = type(value) is tuple and all(isinstance(item, (str, bytes)) for item in value)
    return texts and len(value) == batch_size


def _has_rows(value: Any, batch_size: int) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.shape[0] == batch_size
    return any(_has_rows(child, batch_size) for child in _children(value))


def _rebuild(like: Any, children: Sequence[Any]) -> Any:
    """A container as ``like``, which holds ``children``."""
    if isinstance(like, dict):
        rebuilt = copy.copy(like)  # keeps the type, a default factory and the order
        for key, child in zip(like, children, strict=True):
            rebuilt[key] = child  # not `update`, which dicts that are dataclasses, too, may refuse
        return rebuilt
    if isinstance(like, Mapping):
        return type(like)(zip(like, children, strict=True))  # type: ignore[call-arg]
    if isinstance(like, tuple):
        return type(like)(*children) if hasattr(like, "_fields") else type(like)(children)
    if isinstance(like, list):
        return list(children)
    rebuilt = copy.copy(like)  # not __init__: it may do more than assign
    for field, child in zip(dataclasses.fields(like), children, strict=True):
        object.__setattr__(rebuilt, field.name, child)
    return rebuilt


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Put the outputs of the micro-batches together to that of the batch.

    Tensors with a row per sample are concatenated, lists with an item per sample too; a scalar
    floating-point tensor becomes the mean over the samples; anything else must be the same for
    every micro-batch.

    Args:
        outputs: One output per micro-batch, all of the same structure.
        sizes: Samples in each micro-batch.

    Raises:
        MisconfigurationException: A part of the output cannot be put together.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return _join_tensors(outputs, sizes)
    if isinstance(first, list) and _one_item_per_sample(outputs, sizes):
        return [item for output in outputs for item in output]
    if _children(first):
        columns = zip(*map(_children, outputs), strict=True)
        return _rebuild(first, [join_outputs(column, sizes) for column in columns])
    if any(other != first for other in outputs):
        raise MisconfigurationException(
            f"A part of the output that is no tensor differs between micro-batches: "
            f"{list(outputs)!r:.200}. Return it as a tensor, or use `num_microbatches=1`."
        )
    return first


def _join_tensors(outputs: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    first = outputs[0]
    if first.ndim and all(len(o) == size for o, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    if first.ndim == 0 and first.is_floating_point():
        weighted = [output * size for output, size in zip(outputs, sizes, strict=True)]
        return torch.stack(weighted).sum(0) / sum(sizes)
    if all(torch.equal(first, other) for other in outputs):
        return first
    shapes = [tuple(output.shape) for output in outputs]
    raise MisconfigurationException(
        f"The outputs of the micro-batches have shapes {shapes} for {list(sizes)} samples: they "
        "are not rows of samples, and differ, so no output of the whole batch follows from them. "
        "Return one row per sample, or use `num_microbatches=1`."
    )


def _one_item_per_sample(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    return [len(output) for output in outputs] == list(sizes) and not any(
        _has_rows(output, size) for output, size in zip(outputs, sizes, strict=True)
    )
