"""One rank's link to the others of its pipeline: who it is, and what it sends and receives."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.runtime.consensus import Consensus
from lightning_pipe.runtime.groups import Alone
from lightning_pipe.runtime.handshake import (
    Agreement,
    Announcement,
    Handshake,
    checksum,
    compare,
    passed_on,
)
from lightning_pipe.runtime.mailbox import Key, Mailbox
from lightning_pipe.runtime.microbatch import leaves_of
from lightning_pipe.runtime.transport import (
    Channel,
    PendingObject,
    Route,
    Transport,
    give_to_others,
)
from lightning_pipe.schedule.instructions import (
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
)


class Link:
    """What training and evaluation share on one rank.

    Args:
        transport: Connects the ranks.
        last: The rank of the last stage.
        parameters: Of the whole model, un-owned ones included: which of them are frozen is part
            of what messages look like.
        consensus: With other pipelines, if there are any.
    """

    def __init__(
        self,
        transport: Transport,
        last: int,
        parameters: Sequence[nn.Parameter],
        consensus: Consensus | None = None,
    ) -> None:
        self.transport, self.last, self._parameters = transport, last, list(parameters)
        self._consensus = consensus or Consensus(Alone())
        self.mailbox = Mailbox(transport)
        self._handshake = Handshake(transport, returns=last != transport.size - 1)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.transport.rank == self.last

    @property
    def has_peers(self) -> bool:
        """Whether other pipelines train the same model."""
        return self._consensus.is_needed

    def from_last(self, value: Any) -> Any:
        """Give the value of the last stage's rank to all; others' are ignored. Collective."""
        if not self.is_last:
            return PendingObject(self.transport, Channel.RESULT, self.last).wait()
        give_to_others(self.transport, value)
        return value

    @property
    def asked(self) -> bool:
        """On the first rank: whether others were asked to stop, if no ending will say so."""
        return self._handshake.asked

    def hear(self) -> Announcement | None:
        """What the previous rank is about to do; ``None`` on the first rank."""
        return self._handshake.hear()

    def meet(self, activity: str, loader: str, batch: int) -> None:
        """Raise unless all ranks are at the same place. Collective."""
        heard = self.hear()
        self.settle(activity, loader, batch, Agreement(), heard)
        self.agree(Announcement(activity, loader, batch, 0, 0, 0), heard)((), {})

    def confirm(self, loader: str, batch: int, ends: bool) -> None:
        """On the first rank: raise unless all pipelines pause after a batch, or none does."""
        self._consensus.confirm(loader, batch, ends)

    def settle(
        self, activity: str, loader: str, batch: int, mine: Agreement, heard: Announcement | None
    ) -> Agreement:
        """What all ranks of all pipelines agree on for a batch.

        Args:
            activity: As the user calls it.
            loader: Names where the batch comes from.
            batch: Its number.
            mine: What this rank would do; counts on the first rank.
            heard: What the previous rank is about to do.
        """
        if heard is None:
            return self._consensus.reach(activity, loader, batch, mine)
        return passed_on(mine, heard)

    def agree(
        self, mine: Announcement, heard: Announcement | None
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
        """Compare what this rank is about to do with what the previous one is.

        Returns:
            To be called with the arguments of the first pipelined call: compares those, too, and
            tells the next rank.
        """
        if heard is not None:
            compare(mine, heard, self.transport.rank, arguments=False)

        def on_first_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = checksum(leaves_of((args, kwargs)))
            complete = replace(mine, arguments=arguments)
            if heard is not None:
                compare(complete, heard, self.transport.rank, arguments=True)
            self._handshake.say(complete)

        return on_first_call

    def signatures(self, kind: str, microbatches: Sequence[Any]) -> list[Hashable]:
        """What the shapes of the messages of each micro-batch are known by, on both ends."""
        autocast = kind == "evaluation" and torch.is_autocast_enabled(self.transport.device.type)
        trained = stable_hash([parameter.requires_grad for parameter in self._parameters])
        return [(kind, autocast, trained, _shapes(microbatch)) for microbatch in microbatches]

    def expect(
        self,
        program: Iterable[Instruction],
        signatures: Mapping[int, Hashable],
        continuous: bool = False,
    ) -> None:
        """Ask for what a round will receive, as early as it is known.

        Args:
            program: The round's.
            signatures: By micro-batch.
            continuous: Whether a gradient may come in a later round; it is asked for in the round
                of its forward.
        """
        expected: dict[Route, list[tuple[Key, Hashable]]] = {}
        for instruction in program:
            match instruction:
                case ReceiveActivation(stage, microbatch, peer):
                    route = Channel.ACTIVATION, peer
                case SendActivation(stage, microbatch, peer) if continuous:
                    route = Channel.GRADIENT, peer
                case ReceiveGradient(stage, microbatch, peer) if not continuous:
                    route = Channel.GRADIENT, peer
                case _:
                    continue
            key = stage, microbatch
            expected.setdefault(route, []).append((key, signatures[microbatch]))
        for route, messages in expected.items():
            self.mailbox.expect(route, messages)


def _shapes(microbatch: Any) -> Hashable:
    return tuple(
        (tuple(leaf.shape), leaf.dtype)
        for leaf in leaves_of(microbatch)
        if isinstance(leaf, Tensor)
    )


def stable_hash(value: Any) -> int:
    """A hash that is the same in every process."""
    return zlib.crc32(repr(value).encode())
