"""The tensors in nested dicts, lists and tuples, and where they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

KeyPath = tuple[Any, ...]
"""Where something is: keys of dicts and indices of lists and tuples."""


def tensors_in(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Tensor]]:
    """All tensors of a tree, which is at ``path``. Other mappings than dicts are no part of it."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_in(value, (*path, key))


def is_absent(tree: Any) -> bool:
    """Whether it is, or holds, a tensor on the meta device, which is another rank's."""
    return any(tensor.is_meta for _, tensor in tensors_in(tree))


def with_tensors(tree: Any, new: Callable[[KeyPath, Tensor], Tensor], path: KeyPath = ()) -> Any:
    """The same tree with other tensors.

    Args:
        tree: It stays as it is; what holds no tensor to replace is part of both trees.
        new: Gives what to put in the place of a tensor.
        path: Of the tree.
    """
    if isinstance(tree, Tensor):
        return new(path, tree)
    if isinstance(tree, dict):
        items = {key: with_tensors(value, new, (*path, key)) for key, value in tree.items()}
        changed = {key: value for key, value in items.items() if value is not tree[key]}
        if changed:
            tree = copy.copy(tree)  # with the versions that a state dict may have
            tree.update(changed)
    elif isinstance(tree, (list, tuple)):
        values = [with_tensors(value, new, (*path, index)) for index, value in enumerate(tree)]
        if any(value is not old for value, old in zip(values, tree, strict=True)):
            return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree
