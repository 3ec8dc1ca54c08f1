"""Updates of an asynchronous schedule: several in a batch, each with its own batch's values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.runtime.weights import Gradients

_PLAIN = (bool, int, float, str, type(None))


class Updates:
    """Steps an optimizer with the hyper-parameters of the batch that an update comes from.

    A gradient is applied some batches after its forward, and by then a scheduler has changed the
    learning rate. So the values of the param groups are kept as they were when a batch began.

    Args:
        module: The user's.
        precision: Makes the step, between Lightning's hooks.
        optimizer: Gives the optimizer.
    """

    def __init__(
        self, module: LightningModule, precision: Precision, optimizer: Callable[[], Optimizer]
    ) -> None:
        self._module, self._precision, self._optimizer = module, precision, optimizer
        self._values: dict[int, list[dict[str, Any]]] = {}  # of the param groups, by batch
        self._states: set[tuple[int, str]] = set()  # entries in which the optimizer keeps a state

    def remember(self, batch: int) -> None:
        """Keep the values as they are now, for the updates that will come from a batch."""
        values = _values(self._optimizer())
        self._values[batch] = [{k: _copy(v) for k, v in group.items()} for group in values]

    def apply(self, gradients: Gradients, batch: int) -> None:
        """Make an update that Lightning does not know of, with its hooks around the step.

        Args:
            gradients: Of this rank; the parameters themselves have none.
            batch: Number of the batch that they come from.
        """
        optimizer = self._optimizer()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with self.of(batch):
            self._precision.optimizer_step(optimizer, model=self._module, closure=_nothing)
        for parameter, _ in gradients:
            parameter.grad = None

    @contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Inside, the param groups have the values of a batch; older batches are forgotten."""
        groups = self._optimizer().param_groups
        before, values = _values(self._optimizer()), self._values[batch]
        self._values = {number: v for number, v in self._values.items() if number >= batch}
        for index, (group, own) in enumerate(zip(groups, values, strict=False)):
            group.update({k: v for k, v in own.items() if (index, k) not in self._states})
        given = [{k: (v, _edits(v)) for k, v in g.items()} for g in _values(self._optimizer())]
        try:
            yield
        finally:
            for index, (group, entered, old) in enumerate(zip(groups, given, before, strict=True)):
                for name, (value, edits) in entered.items():
                    if group[name] is not value or _edits(value) != edits:  # by the step
                        self._states.add((index, name))
                    elif name in old:
                        group[name] = old[name]


def _values(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _copy(value: Any) -> Any:
    """A copy of a value that may be changed in place; a number is none."""
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _edits(value: Any) -> int:
    """How often a tensor was changed in place."""
    return value._version if isinstance(value, Tensor) else 0


def _nothing() -> None:
    """The closure of a step whose gradients are there."""
