"""One loss scale for all stages: where a gradient overflows on one, no stage makes the update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_pipe.runtime.reduction import local_part


def scaler_of(precision: Precision) -> torch.amp.GradScaler | None:
    """The scaler of a precision plugin, if it has one that scales."""
    scaler = getattr(precision, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        return scaler
    return None


class _Scaler(ShardedGradScaler):
    """Looks at this rank's parts of gradients: torch's does not mix DTensors with others."""

    def _unscale_grads_(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        parts = [
            SimpleNamespace(grad=local_part(parameter.grad))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        whole = SimpleNamespace(param_groups=[{"params": parts}])
        return super()._unscale_grads_(whole, *args, **kwargs)  # type: ignore[arg-type]


class SharedScaler:
    """Takes the place of a precision plugin's scaler, and looks for overflow on all ranks.

    A stage whose gradients are finite would make an update that another one skips, and the scales
    would come apart. torch's scaler for sharded parameters agrees on both, and works on a rank
    that has no parameters as well. It gets the settings and the state of the plugin's own.

    Args:
        precision: The plugin.
        device: Of this rank's gradients.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        own = scaler_of(precision)
        assert own is not None
        self._precision, self._own = precision, own
        self._shared = _Scaler(
            device.type,
            own.get_scale(),
            own.get_backoff_factor(),
            own.get_growth_factor(),
            own.get_growth_interval(),
            process_group=dist.group.WORLD,
        )
        self._shared.load_state_dict(own.state_dict())
        precision.scaler = self._shared  # type: ignore[attr-defined]

    def scale(self, loss: Tensor) -> Tensor:
        """Scale a loss before its backward."""
        return self._shared.scale(loss)

    def close(self) -> None:
        """Give the plugin its own scaler back, as training has left it."""
        self._own.load_state_dict(self._shared.state_dict())
        self._precision.scaler = self._own  # type: ignore[attr-defined]
        self._shared.process_group = None  # which keeps connections open
