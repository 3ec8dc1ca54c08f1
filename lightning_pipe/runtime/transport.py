"""Move tensors between the ranks of one pipeline.

A transport only carries tensors whose shapes both ends know. Channels are independent of each
other; on one channel, what one rank sends to another arrives in order.
"""

from __future__ import annotations

import io
import pickle
import queue
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.local_groups import LocalGroups, Meeting

_FRAME_BYTES = 4096  # an object up to this size is one message


class Channel(Enum):
    """What travels apart from the rest, so that neither delays the other.

    Attributes:
        CONTROL: From each rank to the next: what is about to happen.
        RESULT: From the rank of the last stage to all others: what came of it.
        ACTIVATION: From a stage to the next.
        GRADIENT: From a stage to the one before.
    """

    CONTROL = "control"
    RESULT = "result"
    ACTIVATION = "activation"
    GRADIENT = "gradient"

    __hash__ = object.__hash__  # Enum's own is a Python function, and this is a key all over


Route = tuple[Channel, int]
"""A channel and the peer at its other end."""


ReceiveModel = Literal["posted", "rendezvous"]
"""Whether a send returns at once and is kept until it arrives, or waits for its receive."""


class Pending(Protocol):
    """A receive that has been asked for."""

    def wait(self) -> Tensor:
        """The tensor that was sent; raises PeerLostError."""
        ...


class Transport(Protocol):
    """One rank's end of the connections of a pipeline."""

    rank: int
    size: int
    device: torch.device
    receive_model: ReceiveModel

    def send(self, channel: Channel, peer: int, tensor: Tensor) -> None:
        """Start to send; returns at once. The tensor must not change until it has arrived."""
        ...

    def receive(
        self, channel: Channel, peer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Pending:
        """Ask for the next tensor of a channel. Both ends must agree on shape and dtype."""
        ...

    def arrived(self, channel: Channel, peer: int, count: int) -> None:
        """Let go of the oldest messages of a channel, which are known to have arrived."""
        ...

    def settle(self, control_rounds: int = 0) -> None:
        """End a round, and wait until all that was sent in earlier ones has arrived.

        Args:
            control_rounds: For so many rounds more, control messages and results may be under way.
        """
        ...


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: torch's own way takes 0.1 ms and 400 bytes for a number."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.dtype in _ARRAYS:
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


_ARRAYS = {torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.uint8}


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def send_object(transport: Transport, channel: Channel, peer: int, value: Any) -> int:
    """Send anything that can be pickled; small objects take one message.

    Returns:
        The number of messages sent.
    """
    return _send_pickled(transport, channel, peer, _pickled(value))


def give_to_others(transport: Transport, value: Any) -> None:
    """Send an object to all other ranks, as a result."""
    data = _pickled(value)
    for peer in range(transport.size):
        if peer != transport.rank:
            _send_pickled(transport, Channel.RESULT, peer, data)


def _send_pickled(transport: Transport, channel: Channel, peer: int, data: bytes) -> int:
    head = len(data).to_bytes(8, "big") + data[: _FRAME_BYTES - 8]
    messages = [head.ljust(_FRAME_BYTES, b"\0"), data[_FRAME_BYTES - 8 :]]
    for message in filter(None, messages):
        transport.send(channel, peer, torch.frombuffer(bytearray(message), dtype=torch.uint8))
    return 1 if not messages[1] else 2


class PendingObject:
    """A receive of an object; asked for on construction, of which ahead is faster."""

    def __init__(self, transport: Transport, channel: Channel, peer: int) -> None:
        self._receive: Callable[[int], Pending] = lambda size: transport.receive(
            channel, peer, (size,), torch.uint8
        )
        self._frame = self._receive(_FRAME_BYTES)

    def wait(self) -> Any:
        """The object; raises PeerLostError."""
        frame = bytes(self._frame.wait().cpu().numpy())
        size, data = int.from_bytes(frame[:8], "big"), frame[8:]
        if size > len(data):
            data += bytes(self._receive(size - len(data)).wait().cpu().numpy())
        return pickle.loads(data[:size])


class LocalTransport:
    """All ranks in one process, a thread each: for tests, and to study schedules.

    Args:
        rank: This end's.
        hub: What the ends share; ``LocalHub(size)``.
    """

    device = torch.device("cpu")
    receive_model: ReceiveModel = "posted"

    def __init__(self, rank: int, hub: LocalHub) -> None:
        self.rank, self.size, self._hub = rank, hub.size, hub
        self.groups = hub.groups(rank)

    def send(self, channel: Channel, peer: int, tensor: Tensor) -> None:
        """See :class:`Transport`."""
        self._hub.queues[channel, self.rank, peer].put(tensor.detach().clone())

    def receive(
        self, channel: Channel, peer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Pending:
        """See :class:`Transport`."""
        return _PendingLocal(self._hub, (channel, peer, self.rank), shape, dtype)

    def arrived(self, channel: Channel, peer: int, count: int) -> None:
        """See :class:`Transport`; nothing is ever under way."""

    def settle(self, control_rounds: int = 0) -> None:
        """See :class:`Transport`; nothing is ever under way."""


class LocalHub:
    """The queues between the ranks of a :class:`LocalTransport`.

    Args:
        size: How many ranks.
        timeout: Seconds after which a wait ends in an error.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout
        ranks = range(size)
        self.queues: dict[tuple[Channel, int, int], queue.SimpleQueue[Tensor]] = {
            (channel, a, b): queue.SimpleQueue()
            for channel in Channel
            for a in ranks
            for b in ranks
        }
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()
        self.failed = threading.Event()

    def groups(self, rank: int) -> LocalGroups:
        """The groups of a rank."""
        return LocalGroups(rank, self.size, self._meeting)

    def abort(self) -> None:
        """Let every wait end in an error: a rank has failed."""
        with self._lock:
            self.failed.set()
            for meeting in self._meetings.values():
                meeting.barrier.abort()

    def _meeting(self, ranks: tuple[int, ...]) -> Meeting:
        with self._lock:
            meeting = self._meetings.setdefault(ranks, Meeting(len(ranks), self.timeout))
            if self.failed.is_set():
                meeting.barrier.abort()
            return meeting


class _PendingLocal:
    def __init__(
        self,
        hub: LocalHub,
        key: tuple[Channel, int, int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._hub, self._key, self._expected = hub, key, (tuple(shape), dtype)

    def wait(self) -> Tensor:
        waited = 0.0
        while not self._hub.failed.is_set() and waited < self._hub.timeout:
            try:
                tensor = self._hub.queues[self._key].get(timeout=0.2)
            except queue.Empty:
                waited += 0.2
                continue
            assert (tuple(tensor.shape), tensor.dtype) == self._expected, "the ends disagree"
            return tensor
        raise PeerLostError(f"rank {self._key[1]} sent nothing within {waited:.0f} s, or failed")
