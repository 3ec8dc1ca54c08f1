"""BatchNorm's running statistics of whole batches, though its layers see micro-batches.

A layer normalises by the statistics of the micro-batch in any case. Here it leaves them to be put
together, and its running statistics move once per batch, by those of all its samples: as torchgpipe
does it (Kim et al. 2020), and as on one device where no BatchNorm comes before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle


@dataclass
class _Moments:
    """Statistics of some values per channel.

    Attributes:
        count: Values in each channel.
        mean: Of each channel.
        squares: Sum of squared differences from the mean, of each channel.
    """

    count: int
    mean: Tensor
    squares: Tensor

    def join(self, other: _Moments) -> _Moments:
        """Of the values of both (Chan et al. 1979), without the cancellation of sums of squares."""
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        squares = self.squares + other.squares + gap**2 * (self.count * other.count / count)
        return _Moments(count, mean, squares)


class DeferredBatchNorm:
    """The BatchNorm layers of one stage.

    Args:
        layers: The stage's.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = {module: None for layer in layers for module in layer.modules()}
        self._norms = [module for module in modules if isinstance(module, _BatchNorm)]
        self._batch: dict[_BatchNorm, _Moments] = {}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, the layers leave their running statistics as they are, for :meth:`commit`.

        Raises:
            MisconfigurationException: A layer is called twice, and would update them twice.
        """
        with self._aside() as calls:
            yield
        for norm, found in calls.items():
            if len(found) > 1:
                raise MisconfigurationException(
                    f"A {type(norm).__name__} layer is called {len(found)} times in a forward: its "
                    "running statistics are then not those of a batch. Use a layer for each call, "
                    "or deferred_batchnorm=False."
                )
            before = self._batch.get(norm)
            self._batch[norm] = found[0] if before is None else before.join(found[0])

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Inside, the layers leave their running statistics as they are, as if they had not run."""
        with self._aside():
            yield

    @torch.no_grad()
    def commit(self) -> None:
        """The batch is complete: update the running statistics."""
        for norm, moments in self._batch.items():
            mean, variance = norm.running_mean, norm.running_var
            assert mean is not None
            assert variance is not None
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.add_(1)
            momentum = norm.momentum
            if momentum is None:  # the mean over all batches
                momentum = 1.0 / float(norm.num_batches_tracked)
            unbiased = moments.squares / (moments.count - 1)
            mean.copy_((1 - momentum) * mean + momentum * moments.mean)
            variance.copy_((1 - momentum) * variance + momentum * unbiased)
        self._batch.clear()

    @contextmanager
    def _aside(self) -> Iterator[dict[_BatchNorm, list[_Moments]]]:
        """Inside, layers that train write to other buffers; gives what they write."""
        calls: dict[_BatchNorm, list[_Moments]] = {}
        with ExitStack() as stack:
            for norm in self._norms:
                if norm.training and norm.track_running_stats and norm.running_mean is not None:
                    calls[norm] = []
                    for handle in _divert(norm, calls[norm]):
                        stack.callback(handle.remove)
            yield calls
        for norm in [norm for norm, found in calls.items() if not found]:
            del calls[norm]


def _divert(norm: _BatchNorm, found: list[_Moments]) -> list[RemovableHandle]:
    """Let each call write to buffers of its own, and append what it finds to ``found``."""
    kept: dict[str, Any] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept.update(norm._buffers, momentum=norm.momentum)
        for name, buffer in norm._buffers.items():
            norm._buffers[name] = None if buffer is None else torch.zeros_like(buffer)
        norm.momentum = 1.0  # the statistics of this call alone
        values = args[0] if args else kwargs["input"]
        kept["count"] = values.numel() // values.shape[1]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        mean, variance = norm.running_mean, norm.running_var
        count, norm.momentum = kept.pop("count"), kept.pop("momentum")
        norm._buffers.update(kept)
        kept.clear()
        if output is not None:
            assert mean is not None
            assert variance is not None
            exact = torch.promote_types(mean.dtype, torch.float32)
            found.append(_Moments(count, mean.to(exact), variance.to(exact) * (count - 1)))

    return [
        norm.register_forward_pre_hook(before, with_kwargs=True),
        norm.register_forward_hook(after, always_call=True),
    ]
