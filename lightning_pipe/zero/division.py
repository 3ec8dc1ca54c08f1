"""What the replicas of this rank's stages divide among them, by the stage of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipe.runtime.gradient_shards import GradientShards
from lightning_pipe.runtime.training import Shards
from lightning_pipe.sharing import SharedParameters
from lightning_pipe.zero.full_shards import FullShards
from lightning_pipe.zero.optimizer_shards import OptimizerShards, assign


class Division:
    """Divides parameters, gradients and states of one rank with its replicas. Collective.

    Args:
        stage: Of ZeRO, 0 to 3.
        shared: What this rank shares with others.
        mesh: Of the replicas.
        reshards: For stage 3: whether layers are gathered for each micro-batch.
    """

    def __init__(
        self, stage: int, shared: SharedParameters, mesh: DeviceMesh, reshards: bool
    ) -> None:
        self._stage, self._replicas = stage, shared.replicas
        self._full = FullShards(shared.layers, mesh, shared.apart, reshards) if stage == 3 else None
        divided = [p for parameters in shared.of_stage.values() for p in parameters]
        tied = [p for parameters in self.whole.values() for p in parameters]
        whole = [*shared.apart, *(tied if stage == 3 else divided)]
        self._owners = assign(whole, shared.replicas.size) if stage else {}
        self._gradients = None
        self._on_one_replica: set[nn.Parameter] = set()  # are gradients of these
        if stage == 2:
            self._gradients = GradientShards(shared.of_stage, self._owners, shared.replicas)
            self._on_one_replica.update(divided)
        if stage == 3:
            shared.of_stage.clear()  # whole parameters, of which only parts stay in memory
        self._optimizer: OptimizerShards | None = None

    @property
    def whole(self) -> Mapping[int, Sequence[nn.Parameter]]:
        """By stage, parameters whose gradients are summed although the others' are divided."""
        return self._full.whole if self._full is not None else {}

    @property
    def shards(self) -> Shards | None:
        """What brings the gradients together, if it is not a sum that all replicas get."""
        return self._full or self._gradients

    def divide(self, optimizer: Optimizer) -> None:
        """Let an optimizer step on this replica's share."""
        if self._stage:
            self._optimizer = OptimizerShards(optimizer, self._owners, self._replicas)

    def copies(self, parameter: Tensor) -> int:
        """How many replicas have a gradient of a parameter, whole or in parts."""
        return 1 if parameter in self._on_one_replica else self._replicas.size

    def keeps_state(self, parameter: Any) -> bool:
        """Whether this replica has the optimizer's state of a parameter."""
        return self._optimizer is None or self._optimizer.is_own(parameter)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, states of an optimizer are loaded as they are."""
        with nullcontext() if self._optimizer is None else self._optimizer.in_full_precision():
            yield

    def hold_all(self) -> None:
        """Have whole layers in memory until :meth:`hold_parts`. Collective."""
        if self._full is not None:
            self._full.gather()

    def hold_parts(self) -> None:
        """Undo :meth:`hold_all`."""
        if self._full is not None:
            self._full.release()

    def close(self) -> None:
        """Give modules and optimizer their own ways back. Collective."""
        parts: list[Callable[[], None]] = [
            part.close
            for part in (self._optimizer, self._gradients, self._full)
            if part is not None
        ]
        for close in parts:
            close()
        self._optimizer = self._gradients = self._full = None
