"""A backward in two parts: what the stage before waits for, and the gradients of the weights.

Both run the same autograd graph. On its paths from the stage's output to what entered the stage lie
nodes from which a branch leads off to parameters: those of linear layers, norms and convolutions,
say. The first part runs the paths alone and keeps what arrives at these *forks*; the second starts
at each fork with that and runs its branches alone. Layers know nothing of it: autograd asks a node
only for the gradients that are needed. The graph, and with it all activations, is kept until the
second part has run.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism"; ``torch.distributed.pipelining`` finds the
places to cut in the graph, too. What a layer computes again by a ``torch.utils.checkpoint`` of its
own (``use_reentrant=False``) it computes for the first part and for each fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_pipe.runtime.payload import Entrance

Start = tuple[GradientEdge, Tensor]
"""A place in a graph, and the gradient to start there with."""


class SplitBackward:
    """One micro-batch's backward on one stage, in two parts.

    Args:
        starts: Where it starts.
        entrance: Where gradients leave the stage; ``None`` if they do not, as on the first: then
            the second part is all of it.

    Raises:
        MisconfigurationException: The graph cannot be run in two parts.
    """

    def __init__(self, starts: Sequence[Start], entrance: Entrance | None) -> None:
        self._first: Sequence[Start] = ()
        self._second, self._forks, self._targets = list(starts), list[_Fork](), list[Tensor]()
        if entrance is None:
            return
        graph = _Graph([edge.node for edge, _ in starts], entrance)
        self._first = [start for start in starts if start[0].node in graph.on_path]
        self._second = [start for start in starts if start[0].node not in graph.on_path]
        self._forks, self._targets = graph.forks, graph.targets_at_once

    def input(self) -> None:
        """Run the part for the input."""
        if self._first:
            for fork in self._forks:
                fork.listen()
            run_backward(self._first, self._targets, keep=bool(self._forks))
            self._first = ()

    def weight(self) -> None:
        """Run the part for the weights, and let go of the graph."""
        run_backward(self._second, keep=bool(self._forks))
        for fork in self._forks:
            fork.run()
        self._second, self._forks = [], []


class _Fork:
    """A node on a path that also leads to parameters.

    Args:
        node: It.
        targets: The parameters.
    """

    def __init__(self, node: Node, targets: Sequence[Tensor]) -> None:
        self._node, self._targets = node, targets
        self._arrived: tuple[Tensor | None, ...] | None = None

    def listen(self) -> None:
        """Keep what arrives first; whenever the node runs again it gets that again.

        Otherwise a hook of a tensor that changes its gradient would change it once more.
        """

        def on_arrival(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            if self._arrived is None:
                self._arrived = gradients
                return None
            return self._arrived

        self._listener = self._node.register_prehook(on_arrival)

    def run(self) -> None:
        """Run the branches, if anything has arrived."""
        starts = [
            (GradientEdge(self._node, index), gradient)
            for index, gradient in enumerate(self._arrived or ())
            if gradient is not None
        ]
        run_backward(starts, self._targets)
        self._listener.remove()


class _Graph:
    """What is to know of a graph before it is run in two parts.

    A parameter that two forks lead to (one layer called twice) gets its gradient with the first
    part: from the upper fork the lower one can be reached, so that its part would come twice.

    Args:
        roots: Where backward starts.
        entrance: Where gradients leave.

    Attributes:
        on_path: The nodes that lead to the entrance, and that of it.
        forks: Those of them that lead to parameters otherwise, each with these.
        targets_at_once: The leaf behind the entrance, and the parameters of several forks.
    """

    def __init__(self, roots: Iterable[Node], entrance: Entrance) -> None:
        self.on_path: set[Node] = set()
        leaves: dict[Node, set[Node]] = {}  # that a node leads to, other than by the entrance
        forks: dict[Node, set[Node]] = {}
        at_once: set[Node] = set()
        for node in _children_first(roots):
            _refuse(node)
            children = _children(node)
            if entrance.is_at(node):
                self.on_path.add(node)
                at_once.update(children)
            elif any(child in self.on_path for child in children):
                self.on_path.add(node)
                branches = [leaves[child] for child in children if child not in self.on_path]
                if branches:
                    forks[node] = set().union(*branches)
            else:
                below = [leaves[child] for child in children]
                leaves[node] = set().union(*below) if below else {node}
        seen: set[Node] = set()
        for own in forks.values():
            at_once |= own & seen
            seen |= own
        self.forks = [
            _Fork(node, [_variable(leaf) for leaf in own - at_once])
            for node, own in forks.items()
            if own - at_once
        ]
        self.targets_at_once = [_variable(leaf) for leaf in at_once]


def _children_first(roots: Iterable[Node]) -> list[Node]:
    """All nodes below some roots, each after its children."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, left = stack.pop()
            if left:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(child, False) for child in _children(node)]
    return order


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _variable(leaf: Any) -> Tensor:
    """The tensor whose gradient a leaf of the graph adds up."""
    variable: Tensor = leaf.variable
    return variable


def _refuse(node: Any) -> None:
    """Refuse a node that cannot be run in two parts."""
    if "CheckpointFunctionBackward" in type(node).__name__:
        raise MisconfigurationException(
            "A layer uses torch.utils.checkpoint with use_reentrant=True, whose backward cannot be "
            "split into the parts for input and weights. Use a schedule without split backwards "
            "('1f1b'), or use_reentrant=False, which computes the layer again for each part."
        )
    variable = getattr(node, "variable", None)
    if variable is not None and variable._post_accumulate_grad_hooks:
        raise MisconfigurationException(
            f"A parameter of shape {tuple(variable.shape)} has a hook that waits for its "
            "accumulated gradient (register_post_accumulate_grad_hook), but split backwards bring "
            "gradients later than the rest of a backward. Use the hook `on_before_optimizer_step` "
            "instead, or a schedule without split backwards ('1f1b')."
        )


def run_backward(
    starts: Sequence[Start], targets: Sequence[Tensor] | None = None, keep: bool = False
) -> None:
    """Run a graph from some places on.

    Args:
        starts: Where; nowhere, and nothing runs.
        targets: The leaves whose gradients are wanted. Default: all.
        keep: Whether the graph will be run again.
    """
    if starts:
        edges, gradients = zip(*starts, strict=True)
        torch.autograd.backward(edges, gradients, retain_graph=keep, inputs=targets)
