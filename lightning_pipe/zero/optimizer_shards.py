"""An optimizer of which each replica of a stage runs a part (ZeRO-1).

Whole parameters are dealt out, not slices of them, so that any optimizer computes what it would
compute by itself (one that looks at a whole matrix, as Muon or Adafactor do, too), and a parameter
has its state, whole, on one rank: a checkpoint is the union. The user's optimizer stays as it is:
it skips what has no gradient, so a step in which the parameters of other replicas have none is one
that makes no states for them.

With parameters in half precision the step is that of mixed-precision training (Micikevicius et al.
2018): on 32-bit copies, which are part of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.runtime.groups import Group, Pending
from lightning_pipe.runtime.reduction import Bucket, buckets, local_part
from lightning_pipe.runtime.training import withheld

_MASTER = "master_weight"
_HALF = (torch.bfloat16, torch.float16)


def assign(parameters: Sequence[nn.Parameter], num_replicas: int) -> dict[nn.Parameter, int]:
    """Deal out parameters so that all replicas get about equally many elements.

    Args:
        parameters: In the same order on all replicas.
        num_replicas: How many.

    Returns:
        The replica to which each belongs.
    """
    loads = [0] * num_replicas
    owners = {}
    for parameter in sorted(parameters, key=lambda p: p.numel(), reverse=True):
        owner = loads.index(min(loads))
        owners[parameter] = owner
        loads[owner] += parameter.numel()
    return owners


class OptimizerShards:
    """Lets an optimizer step on this replica's share of the parameters.

    Args:
        optimizer: The user's; its ``step`` is replaced until :meth:`close`.
        owners: To which replica each parameter of this rank belongs; one that is not among them
            is divided in itself, and each replica updates its part.
        replicas: The ranks that hold this rank's stages.
    """

    def __init__(
        self, optimizer: Optimizer, owners: Mapping[nn.Parameter, int], replicas: Group
    ) -> None:
        self._optimizer, self._owners, self._replicas = optimizer, owners, replicas
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._step: Callable[[], Any] = optimizer.step
        for parameter in [p for p in optimizer.state if not self.is_own(p)]:
            del optimizer.state[parameter]  # Adagrad, for one, begins with states

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step_on_share(closure)

        step.__dict__.update(getattr(self._step, "__dict__", {}))  # schedulers look for their marks
        optimizer.__dict__["step"] = MethodType(step, optimizer)  # which schedulers may wrap

    def close(self) -> None:
        """Give the optimizer its own step back."""
        self._optimizer.__dict__.pop("step", None)
        if getattr(self._step, "__func__", None) is not type(self._optimizer).step:
            self._optimizer.__dict__["step"] = self._step  # as a scheduler had replaced it

    def is_own(self, parameter: Any) -> bool:
        """Whether this replica updates a parameter, and keeps the optimizer's state for it."""
        return self._owners.get(parameter, self._replicas.index) == self._replicas.index

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Inside, 32-bit copies stand in the optimizer for this replica's half-precision ones.

        So does a state that is loaded, which torch converts to what its parameter is.
        """
        before = [group["params"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [self._exchange(parameter) for parameter in group["params"]]
        try:
            yield
        finally:
            # Loading has made new groups, and a new state.
            for group, parameters in zip(self._optimizer.param_groups, before, strict=True):
                group["params"] = parameters
            state = self._optimizer.state
            for parameter, master in self._masters.items():
                master.grad = None
                if master in state:
                    values = state[parameter] = state.pop(master)
                    given = values.get(_MASTER)
                    if given is not None and given is not master:
                        with torch.no_grad():
                            master.copy_(given)
                    values[_MASTER] = master.detach()

    def _exchange(self, parameter: nn.Parameter) -> nn.Parameter:
        """The copy for a parameter, with its gradient and its state; or the parameter itself."""
        if parameter.is_meta or parameter.dtype not in _HALF or not self.is_own(parameter):
            return parameter
        master = self._masters.get(parameter)
        if master is None:
            master = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            self._masters[parameter] = master
        else:
            now, kept = local_part(parameter).detach(), local_part(master).detach()
            if not torch.equal(now, kept.to(now.dtype)):  # it was changed between steps
                kept.copy_(now)
        if parameter.grad is not None:
            master.grad = parameter.grad.float()
        if parameter in self._optimizer.state:
            self._optimizer.state[master] = self._optimizer.state.pop(parameter)
        return master

    def _step_on_share(self, closure: Callable[[], Any] | None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        others = [parameter for parameter in self._parameters if not self.is_own(parameter)]
        with withheld(others), self.in_full_precision():
            self._step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)
            self._share_updates()
        return result

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _share_updates(self) -> None:
        """Give each parameter from the replica to which it belongs to all."""
        parameters = self._parameters
        under_way: list[tuple[Pending, Bucket]] = []
        for owner in range(self._replicas.size):
            theirs = [
                local_part(p)
                for p in parameters
                if p.requires_grad and self._owners.get(p) == owner
            ]
            for bucket in buckets(theirs):
                under_way.append((self._replicas.broadcast(bucket.packed, owner), bucket))
        for pending, bucket in under_way:
            pending.wait()
            bucket.unpack()
