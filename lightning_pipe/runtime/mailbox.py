"""Send and receive the activations and gradients of one rank.

Both ends of a message must know its spec before it can be asked for, and it must be asked for
early to be fast. So a spec is agreed on once per *signature* (a hashable that both ends derive
from the micro-batch by themselves): the first message of a signature is led by a header, and from
then on both ends count on the same spec. A message without one (``None``) always has a header.

Receives are asked for in the order of the plan, at most ``AHEAD`` at a time for each channel and
peer: the next is on its way while this one is used, and memory stays bounded.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pipe.runtime.payload import Spec, TensorSpec, assemble, disassemble
from lightning_pipe.runtime.transport import (
    Channel,
    Pending,
    PendingObject,
    Route,
    Transport,
    send_object,
)

AHEAD = 2

Key = tuple[int, int]  # stage and micro-batch that a message is for


@dataclass
class _Expected:
    """A message that the plan says will come."""

    key: Key
    signature: Hashable
    spec: Spec | None = None  # once its own header is here
    pending: list[Pending | None] | None = None  # once asked for; None for an empty tensor


@dataclass
class _Inbox:
    expected: deque[_Expected] = field(default_factory=deque)
    ready: bool = True  # False where a message must be complete before the next is asked for


class Mailbox:
    """One rank's letters, over a transport.

    Args:
        transport: Carries the tensors.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sent: dict[Hashable, Spec] = {}
        self._known: dict[Hashable, Spec] = {}
        self._inboxes: dict[Route, _Inbox] = {}
        self._unconfirmed: dict[Route, deque[tuple[Key, int]]] = defaultdict(deque)

    def expect(self, route: Route, messages: Iterable[tuple[Key, Hashable]]) -> None:
        """Say what will come over a route, in order; what is known already is asked for."""
        inbox = self._inboxes.setdefault(route, _Inbox())
        inbox.expected.extend(_Expected(key, signature) for key, signature in messages)
        self._ask(route, inbox)

    def send(self, route: Route, key: Key, signature: Hashable, tree: Any) -> None:
        """Send a tree to a peer, as the message for stage and micro-batch ``key``.

        Raises:
            MisconfigurationException: The tree cannot be sent, or is not what the signature
                promised.
        """
        channel, peer = route
        leaves, spec = disassemble(tree)
        name = (route, key[0], signature)
        promised = self._sent.get(name)
        count = 0
        if promised is None:
            if signature is not None:
                self._sent[name] = spec
            count += send_object(self._transport, channel, peer, spec)
        elif promised != spec:
            leaves = _keep_promise(leaves, spec, promised, key, channel)
            spec = promised
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.numel():
                self._transport.send(channel, peer, leaf)
                count += 1
        if spec.has_constants:
            constants = [leaf for leaf in leaves if leaf is not None and not _is_tensor(leaf)]
            count += send_object(self._transport, channel, peer, constants)
        self._unconfirmed[route].append((key, count))

    def confirm(self, route: Route, key: Key) -> None:
        """The message for ``key``, and all before it, have arrived: an answer to it is here.

        With several stages on a rank answers come in another order than what they answer, so a
        later message may have confirmed this one already.
        """
        sent = self._unconfirmed[route]
        if all(sent_key != key for sent_key, _ in sent):
            return
        count = 0
        for confirmed, messages in iter(sent.popleft, None):
            count += messages
            if confirmed == key:
                break
        self._transport.arrived(*route, count)

    def end_round(self, control_rounds: int = 0) -> None:
        """Wait for what was sent in earlier rounds; that of this one may still be under way.

        Args:
            control_rounds: See :meth:`Transport.settle`.
        """
        self._unconfirmed.clear()
        self._transport.settle(control_rounds)

    def receive(self, route: Route, key: Key) -> tuple[Any, Spec]:
        """Wait for the message for ``key``, which must be the next one of its route.

        Returns:
            The tree that was sent, and its spec, which says what needs a gradient at the sender.
        """
        inbox = self._inboxes[route]
        message = inbox.expected[0]
        assert message.key == key, f"message {message.key} comes before {key}"
        spec = self._spec_of(route, message)
        if spec is None:
            spec = message.spec = PendingObject(self._transport, *route).wait()
            if message.signature is not None:
                self._known[route, key[0], message.signature] = spec
        self._ask(route, inbox)
        assert message.pending is not None
        tensors: list[Tensor | None] = [
            pending.wait()
            if pending
            else torch.empty(leaf.shape, dtype=leaf.dtype, device=self._transport.device)
            for pending, leaf in zip(message.pending, spec.tensors, strict=True)
        ]
        constants = PendingObject(self._transport, *route).wait() if spec.has_constants else []
        inbox.expected.popleft()
        inbox.ready = True
        self._ask(route, inbox)
        return assemble(tensors, constants, spec), spec

    def _ask(self, route: Route, inbox: _Inbox) -> None:
        """Ask for the next messages of a route, as far as their specs are known."""
        channel, peer = route
        for index in range(min(AHEAD, len(inbox.expected))):
            message = inbox.expected[index]
            if message.pending is not None:
                continue
            spec = self._spec_of(route, message)
            if spec is None or not inbox.ready:
                return
            message.pending = [
                self._transport.receive(channel, peer, leaf.shape, leaf.dtype)
                if 0 not in leaf.shape
                else None
                for leaf in spec.tensors
            ]
            inbox.ready = not spec.has_constants  # those come next, and are of unknown size

    def _spec_of(self, route: Route, message: _Expected) -> Spec | None:
        known = self._known.get((route, message.key[0], message.signature))
        return message.spec if known is None else known


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _keep_promise(
    leaves: list[Any], spec: Spec, promised: Spec, key: Key, channel: Channel
) -> list[Any]:
    """Leaves as promised: a gradient that is missing this time is zero."""
    if channel is Channel.GRADIENT:
        leaves = [
            torch.zeros(expected.shape, dtype=expected.dtype)
            if leaf is None and isinstance(expected, TensorSpec)
            else leaf
            for leaf, expected in zip(leaves, promised.leaves, strict=False)
        ]
        spec = Spec(spec.structure, disassemble(leaves)[1].leaves)
    if spec == promised:
        return leaves
    raise MisconfigurationException(
        f"Stage {key[0]}, micro-batch {key[1]}: the {channel.value} sent to it is {spec}, but was "
        f"{promised} for an earlier micro-batch of the same shapes. What stages exchange may "
        "depend only on the shapes of the batch. Pad it, or cut the model at another layer."
    )
