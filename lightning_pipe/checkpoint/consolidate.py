"""One ordinary checkpoint from many ranks, and each rank's part of one.

A rank holds the layers that it does not own on the meta device, under their usual names. So a
rank's checkpoint has everything in its place, with meta tensors for what others own, and the whole
one is the union.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.checkpoint.tensors import KeyPath, tensors_in, with_tensors


def consolidate(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The whole checkpoint on rank 0, and elsewhere what was given. Collective.

    Args:
        checkpoint: This rank's, which stays as it is: others may hold parts of it.

    Returns:
        On rank 0 with tensors of the other ranks, on the CPU, wherever it had some on the meta
        device, and with their optimizer states.
    """
    missing: list[Any] = [[path for path, tensor in tensors_in(checkpoint) if tensor.is_meta]]
    dist.broadcast_object_list(missing, src=0)
    states = [{**optimizer["state"]} for optimizer in checkpoint.get("optimizer_states", [])]
    if dist.get_rank() != 0:
        mine = {path: tensor for path, tensor in tensors_in(checkpoint) if not tensor.is_meta}
        found = {path: mine[path] for path in missing[0] if path in mine}
        # A GPU's tensors would be made on the same GPU again by the process that receives them.
        on_cpu = with_tensors((found, states), lambda _, tensor: tensor.detach().cpu())
        dist.send_object_list([on_cpu], dst=0)
        return checkpoint
    tensors: dict[KeyPath, Tensor] = {}
    for rank in range(1, dist.get_world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank)
        tensors |= received[0][0]
        states = [{**other, **own} for own, other in zip(states, received[0][1], strict=True)]
    whole: dict[str, Any] = with_tensors(checkpoint, lambda path, own: tensors.get(path, own))
    if not states:
        return whole
    optimizers = [  # numbers of parameters come first, then whatever else an optimizer may keep
        {**optimizer, "state": dict(sorted(state.items(), key=_number))}
        for optimizer, state in zip(whole["optimizer_states"], states, strict=True)
    ]
    return {**whole, "optimizer_states": optimizers}


def own_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The part of an optimizer's state that belongs to parameters that this rank owns.

    Args:
        state: As the optimizer gives it. Adagrad, for one, has a state for absent parameters too.
        optimizer: Which has all parameters, those of other ranks on the meta device.
    """
    others = {key for key, parameter in _parameters(state, optimizer).items() if parameter.is_meta}
    return {**state, "state": {k: s for k, s in state["state"].items() if k not in others}}


def by_names(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's state by the names of the parameters instead of their numbers.

    torch loads one like the other: it looks at the order of the parameters in the groups.
    """
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {
        key: known.get(id(parameter), f"unnamed.{key}")
        for key, parameter in _parameters(state, optimizer).items()
    }
    groups = [{**g, "params": [names[key] for key in g["params"]]} for g in state["param_groups"]]
    values = {names.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}


def _parameters(state: Mapping[str, Any], optimizer: Optimizer) -> dict[Any, Tensor]:
    """An optimizer's parameters, by what stands for them in its state."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(keys, parameters, strict=False))


def _number(state: tuple[Any, Any]) -> float:
    return state[0] if isinstance(state[0], int) else math.inf
