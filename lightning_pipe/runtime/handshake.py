"""Agree with the neighbours on what a round works on, before any tensor of it moves.

Every rank loads the batch by itself. At the start of a round a small message passes down the
pipeline that says what the sender is about to do and a checksum of its data. A rank compares it
with its own and raises instead of training on two halves of different batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.runtime.errors import PipelineError
from lightning_pipe.runtime.transport import Channel, PendingObject, Transport, send_object

_SAMPLES = 1024  # elements of each tensor that a checksum looks at
# `torch.take` knows no unsigned integers but bytes.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class Agreement:
    """What rank 0 decides for all ranks, and what it is asked for.

    Attributes:
        asked: Whether the sender, or a rank before it, was asked to stop.
        stops: Whether training stops after this round.
        decisions: What only one clock must decide, in an order that all ranks know.
        last: Whether the data of another replica ends with this batch, before this one's.
        count: Into how many micro-batches the batch is cut.
        samples: Of this replica's batch.
        share: What they are of the samples of all replicas.
    """

    asked: bool = False
    stops: bool = False
    decisions: tuple[bool, ...] = ()
    last: bool = False
    count: int = 1
    samples: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class Announcement:
    """What a rank is about to do.

    Attributes:
        activity: As the user calls it, "training" or "validation".
        loader: Names where the batch comes from.
        batch: Number of the batch.
        shapes: Hash of shapes and dtypes of all micro-batches.
        data: Checksum of the batch.
        arguments: Checksum of what the pipelined call gets for the first micro-batch.
        ends: Whether the sender empties its pipeline after this, or leaves its loop.
        agreement: What the ranks agree on in this round.
    """

    activity: str
    loader: str
    batch: int
    shapes: int
    data: int
    arguments: int
    ends: bool = True
    agreement: Agreement = Agreement()


def passed_on(mine: Agreement, heard: Announcement | None) -> Agreement:
    """What a rank says: rank 0's decisions, and whether any rank up to itself was asked to stop."""
    if heard is None:
        return mine
    return replace(heard.agreement, asked=mine.asked or heard.agreement.asked)


class Handshake:
    """Passes announcements down the pipeline.

    Args:
        transport: Connects the ranks.
        returns: Whether what the last rank says comes back to the first, a round later: where the
            last stage is not on the last rank, nothing else says who was asked to stop.

    Attributes:
        asked: On the first rank: whether any rank was asked to stop in an earlier round.
    """

    def __init__(self, transport: Transport, returns: bool = False) -> None:
        self._transport = transport
        self._receives = transport.rank > 0 or (returns and transport.size > 1)
        self._sends = transport.rank + 1 < transport.size or (returns and transport.size > 1)
        self._coming: PendingObject | None = None
        self._round = 0
        self.asked = False

    def hear(self) -> Announcement | None:
        """The previous rank's announcement of this round; ``None`` on the first rank."""
        rank, self._round = self._transport.rank, self._round + 1
        if not self._receives:
            return None
        if rank == 0 and self._round == 1:
            self._ask()
            return None
        coming = self._coming or self._ask()
        try:
            heard: Announcement = coming.wait()
        except PipelineError as error:
            error.add_note(f"lightning_pipe: pipeline rank {rank}, waiting for a batch to begin")
            raise
        self._ask()  # for the next
        if rank == 0:
            self.asked |= heard.agreement.asked
            return None
        return heard

    def _ask(self) -> PendingObject:
        previous = (self._transport.rank - 1) % self._transport.size
        self._coming = PendingObject(self._transport, Channel.CONTROL, previous)
        return self._coming

    def say(self, mine: Announcement) -> None:
        """Tell the next rank, if there is one."""
        if self._sends:
            next_rank = (self._transport.rank + 1) % self._transport.size
            send_object(self._transport, Channel.CONTROL, next_rank, mine)


def compare(mine: Announcement, heard: Announcement, rank: int, arguments: bool) -> None:
    """Raise unless two ranks are about to do the same.

    Args:
        mine: This rank's announcement.
        heard: The previous rank's.
        rank: This rank's place in the pipeline.
        arguments: Whether ``mine.arguments`` is known already.

    Raises:
        PipelineError: They differ; says in what, and what to do.
    """
    ranks = f"Pipeline ranks {rank - 1} and {rank}"
    if (heard.activity, heard.batch) != (mine.activity, mine.batch):
        raise PipelineError(
            f"{ranks} are not at the same place: {heard.activity} batch {heard.batch} and "
            f"{mine.activity} batch {mine.batch}. All ranks of a pipeline must run the same "
            f"batches of {mine.loader}: give its data the same length on every rank, and let no "
            "rank skip a step or stop by itself."
        )
    if heard.ends != mine.ends:
        last, other = (rank - 1, rank) if heard.ends else (rank, rank - 1)
        raise PipelineError(
            f"{ranks} disagree on where training pauses: after {mine.activity} batch {mine.batch} "
            f"of {mine.loader}, rank {last} leaves the loop or validates, and rank {other} does "
            "not. Give the data the same length on every rank, and let no rank stop by itself."
        )
    if (heard.shapes, heard.data) != (mine.shapes, mine.data):
        raise PipelineError(
            f"{ranks} got different batches from {mine.loader} ({mine.activity} batch "
            f"{mine.batch}). All ranks of a pipeline must load the same batches in the same "
            "order: seed what its data and its order are drawn from alike on every rank "
            "(`seed_everything(...)` before they are made), and let nothing depend on the rank."
        )
    if arguments and heard.arguments != mine.arguments:
        raise PipelineError(
            f"{ranks} called the pipelined module with different arguments, though the batch of "
            f"{mine.loader} is the same ({mine.activity} batch {mine.batch}). What the step does "
            "before the call must not depend on the rank, nor draw random numbers from "
            "generators of its own that are seeded differently."
        )


def checksum(values: Iterable[Any]) -> int:
    """A checksum over up to 1024 elements of each tensor among ``values``."""
    total = 0
    for value in values:
        if isinstance(value, Tensor) and _has_elements(value):
            value = value.detach().resolve_conj().resolve_neg()
            if value.dtype in _SIGNED:
                value = value.view(_SIGNED[value.dtype])
            sample = torch.take(value, _sample_indices(value.numel(), value.device))
            data = sample.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            total = zlib.crc32(data, total)
    return total


def _has_elements(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_meta and value.numel() > 0


@lru_cache(maxsize=64)
def _sample_indices(count: int, device: torch.device) -> Tensor:
    # Single precision would round the last index up, past the end of a large tensor.
    spread = torch.linspace(0, count - 1, min(count, _SAMPLES), dtype=torch.float64)
    return spread.long().to(device)
