"""PipeDream replayed on one device, with every version of the weights kept.

A replay is a loop over micro-batches (2BW: over batches): number i, counted since the pipeline was
empty, reads versions up to i, and its update makes version i+1 of all stages. It knows nothing of
schedules, ranks or messages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from .harness import Module, Trained

Policy: TypeAlias = Literal["stashing", "vertical_sync", "no_stashing", "2bw"]
Checkpointing: TypeAlias = Literal["none", "stage", "layer"]
Weights: TypeAlias = dict[str, Tensor]


def train(
    make_model: Callable[[], Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    policy: Policy,
    num_microbatches: int,
    drains: Collection[int] = (),
    lr_of: Callable[[int], float] | None = None,
    checkpointing: Checkpointing = "none",
) -> Trained:
    """Replay a training run.

    Args:
        make_model: Makes a model that minimizes the mean square error of its ``net``.
        batches: Inputs and targets.
        sizes: Layers of ``net`` in each stage.
        policy: Which versions are read.
        num_microbatches: Of a batch; fewer if it has fewer samples.
        drains: The batches after which the pipeline is empty.
        lr_of: The learning rate of a batch.
        checkpointing: What is recomputed. Without stashing it changes the gradients.
    """
    model = make_model()
    optimizer = model.configure_optimizers()
    old = _with_the_same_buffers(model.net)
    new = _with_the_same_buffers(model.net) if policy == "no_stashing" else old
    versions = [_weights(model.net)]  # since the fill began
    losses = []
    for number, (x, y) in enumerate(batches):
        if lr_of is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr_of(number)
        pieces = min(num_microbatches, len(x))
        losses.append(0.0)
        for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            share = len(xs) / len(x)
            _load(old, versions, sizes, _delays(policy, len(sizes)))
            if new is old:
                loss = mse_loss(old(xs), ys)
                loss.backward()
            else:
                _load(new, versions, sizes, [0] * len(sizes))
                old_units, new_units = (_units(net, sizes, checkpointing) for net in (old, new))
                loss = _mismatched(old_units, new_units, xs, ys)
            losses[-1] += share * loss.item()
            _add_gradients(model.net, new, share if policy == "2bw" else 1.0)
            if policy != "2bw":
                _update(optimizer, model.net, versions)
        if policy == "2bw":
            _update(optimizer, model.net, versions)
        if number in drains or pieces < num_microbatches:
            del versions[:-1]
    named = [*model.named_parameters(), *model.named_buffers()]
    return Trained({name: tensor.detach() for name, tensor in named}, losses)


def _delays(policy: Policy, num_stages: int) -> list[int]:
    """By how many updates the weights of each stage's forward are older than the newest."""
    if policy == "2bw":
        return [1] * num_stages
    if policy == "vertical_sync":
        return [num_stages - 1] * num_stages
    return list(range(num_stages))[::-1]


def _weights(net: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def _with_the_same_buffers(net: nn.Sequential) -> nn.Sequential:
    return copy.deepcopy(net, {id(buffer): buffer for buffer in net.buffers()})


def _load(
    net: nn.Sequential, versions: list[Weights], sizes: Sequence[int], delays: list[int]
) -> None:
    """Give each layer a version of its stage, so many updates before the newest."""
    delay_of = [delay for size, delay in zip(sizes, delays, strict=True) for _ in range(size)]
    newest = len(versions) - 1
    for name, parameter in net.named_parameters():
        delay = delay_of[int(name.split(".")[0])]
        parameter.data.copy_(versions[max(0, newest - delay)][name])
        parameter.grad = None


def _units(
    net: nn.Sequential, sizes: Sequence[int], checkpointing: Checkpointing
) -> list[nn.Module]:
    """The parts of which a backward needs the input and the weights, and nothing in between."""
    if checkpointing == "stage":
        ends = [0, *accumulate(sizes)]
        return [net[start:end] for start, end in pairwise(ends)]
    return list(net) if checkpointing == "layer" else list(_leaves(net))


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Single operations, as Linear or Tanh: a backward then reads the weights that are there."""
    if not isinstance(module, nn.Sequential):
        yield module
        return
    for child in module:
        yield from _leaves(child)


def _mismatched(old: Sequence[nn.Module], new: Sequence[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """Go forward through the old units, and back through the new ones; give the loss."""
    values = [x]
    with torch.no_grad():
        for unit in old:
            values.append(unit(values[-1]))
    output = values.pop().requires_grad_()
    loss = mse_loss(output, y)
    loss.backward()
    gradient = output.grad
    for unit, value in zip(reversed(new), reversed(values), strict=True):
        entered = value.detach().requires_grad_()
        unit(entered).backward(gradient)
        gradient = entered.grad
    return loss


def _add_gradients(net: nn.Module, net_then: nn.Module, factor: float) -> None:
    for parameter, then in zip(net.parameters(), net_then.parameters(), strict=True):
        if then.grad is not None:
            sum_before = 0 if parameter.grad is None else parameter.grad
            parameter.grad = sum_before + factor * then.grad


def _update(optimizer: torch.optim.Optimizer, net: nn.Module, versions: list[Weights]) -> None:
    optimizer.step()
    optimizer.zero_grad()
    versions.append(_weights(net))
