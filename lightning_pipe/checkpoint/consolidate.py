"""One ordinary checkpoint from many ranks, and each rank's part of one.

A rank holds the layers that it does not own on the meta device, under their usual names. So a
rank's checkpoint has everything in its place, with meta tensors for what others own, and the whole
one is the union.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.checkpoint.tensors import is_absent, tensors_in, with_tensors


def consolidate(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The whole checkpoint on rank 0, and elsewhere what was given. Collective.

    What several ranks have (replicas, those that share a layer) is sent by the first of them.

    Args:
        checkpoint: This rank's, which stays as it is: others may hold parts of it.

    Returns:
        On rank 0 with tensors of the other ranks, on the CPU, wherever it had some on the meta
        device, and with their optimizer states.
    """
    tensors = {path: tensor for path, tensor in tensors_in(checkpoint) if not tensor.is_meta}
    wanted: list[Any] = [[path for path, tensor in tensors_in(checkpoint) if tensor.is_meta]]
    dist.broadcast_object_list(wanted, src=0)
    states = {
        (number, key): state
        for number, optimizer in enumerate(checkpoint.get("optimizer_states", []))
        for key, state in optimizer["state"].items()
        if not is_absent(state)
    }
    mine = {path: tensors[path] for path in wanted[0] if path in tensors}
    senders = _first_with([*mine, *states])
    if dist.get_rank() != 0:
        mine = {path: tensor for path, tensor in mine.items() if senders[path] == dist.get_rank()}
        states = {key: state for key, state in states.items() if senders[key] == dist.get_rank()}
        # A GPU's tensors would be made on the same GPU again by the process that receives them.
        on_cpu = with_tensors((mine, states), lambda _, tensor: tensor.detach().cpu())
        dist.send_object_list([on_cpu], dst=0)
        return checkpoint
    for rank in range(1, dist.get_world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank)
        mine |= received[0][0]
        states |= received[0][1]
    whole: dict[str, Any] = with_tensors(checkpoint, lambda path, own: mine.get(path, own))
    if "optimizer_states" not in whole:
        return whole
    optimizers = [  # numbers of parameters come first, then whatever else an optimizer may keep
        {**optimizer, "state": dict(sorted(_of(states, number).items(), key=_number))}
        for number, optimizer in enumerate(whole["optimizer_states"])
    ]
    return {**whole, "optimizer_states": optimizers}


def _first_with(names: list[Any]) -> dict[Any, int]:
    """By name, the first rank that has given it. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, names)
    first: dict[Any, int] = {}
    for rank, theirs in enumerate(by_rank):
        for name in theirs:
            first.setdefault(name, rank)
    return first


def _of(states: Mapping[tuple[int, Any], Any], number: int) -> dict[Any, Any]:
    """The states of one optimizer."""
    return {key: state for (optimizer, key), state in states.items() if optimizer == number}


def own_state(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    keeps: Callable[[Tensor], bool] = lambda parameter: True,
) -> dict[str, Any]:
    """The part of an optimizer's state that belongs to parameters that this rank owns.

    Args:
        state: As the optimizer gives it. Adagrad, for one, has a state for absent parameters too.
        optimizer: Which has all parameters, those of other ranks on the meta device.
        keeps: Whether this rank has the state of a parameter that it owns.
    """
    others = {
        key
        for key, parameter in parameters_of(state, optimizer).items()
        if parameter.is_meta or not keeps(parameter)
    }
    return {**state, "state": {k: s for k, s in state["state"].items() if k not in others}}


def by_names(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's state by the names of the parameters instead of their numbers.

    torch loads one like the other: it looks at the order of the parameters in the groups.
    """
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {
        key: known.get(id(parameter), f"unnamed.{key}")
        for key, parameter in parameters_of(state, optimizer).items()
    }
    groups = [{**g, "params": [names[key] for key in g["params"]]} for g in state["param_groups"]]
    values = {names.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}


def parameters_of(state: Mapping[str, Any], optimizer: Optimizer) -> dict[Any, Tensor]:
    """An optimizer's parameters, by what stands for them in its state."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(keys, parameters, strict=False))


def _number(state: tuple[Any, Any]) -> float:
    return state[0] if isinstance(state[0], int) else math.inf
