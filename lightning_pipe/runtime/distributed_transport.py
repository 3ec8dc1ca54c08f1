"""The transport between processes, over ``torch.distributed``.

gloo moves no data before the receiver asks for it, and a message costs three to five times as
much when it is asked for late (75 us against 250 to 390 us on loopback). It stops the process
when a buffer is smaller than what arrives. Activations and gradients, there and back, have groups,
and with them connections, of their own: what is sent and what is received contend for the lock of
a connection (with interleaved stages, where both directions carry both, 0.2 ms a message). Control
messages and results go one way each.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.transport import Channel, Pending, ReceiveModel, Route

_THERE_AND_BACK = (Channel.ACTIVATION, Channel.GRADIENT)
_HOST = torch.device("cpu")


def on_host(tensor: Tensor) -> Tensor:
    """A contiguous tensor in the memory of the host; complete, if it had to be copied.

    From a GPU it is copied to pinned memory, as anything else would be copied twice. Torch keeps
    that for the next copy.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)  # waits for what computes it


class GlooTransport:
    """Point-to-point messages over gloo groups; tensors on a GPU are staged through the host.

    Constructing it is collective over the *whole world*, as making a process group is.

    Args:
        pipelines: The global ranks of every pipeline of the world, in order of their stages.
        device: Where received activations and gradients are put.
        timeout: After which a wait ends in an error.
    """

    receive_model: ReceiveModel = "posted"

    def __init__(
        self, pipelines: Sequence[Sequence[int]], device: torch.device, timeout: timedelta
    ) -> None:
        self.device, self._timeout = device, timeout
        self._groups: dict[tuple[Channel, bool], Any] = {}  # bool: whether to a later rank
        me = dist.get_rank()
        for ranks, channel in itertools.product(pipelines, Channel):
            both = (True,), (False,)
            for directions in both if channel in _THERE_AND_BACK else ((True, False),):
                group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
                if me in ranks:
                    self._groups |= {(channel, forth): group for forth in directions}
                    self.rank, self.size = list(ranks).index(me), len(ranks)
        # A send that nobody holds is cancelled, and one that is done does not say so.
        self._sent: dict[Route, deque[tuple[Any, Tensor]]] = defaultdict(deque)
        self._of_round: dict[Route, deque[int]] = defaultdict(deque)  # of them, oldest round first
        self._asked: set[_PendingGloo] = set()  # and not waited for yet

    def send(self, channel: Channel, peer: int, tensor: Tensor) -> None:
        """See :class:`Transport`."""
        tensor = on_host(tensor.detach())
        # The group's own method: dist.isend adds checks that cost a third of the message.
        try:
            work = self._groups[channel, self.rank < peer].send([tensor], peer, 0)
        except RuntimeError as error:
            raise PeerLostError(f"sending to rank {peer}: {error}") from error
        self._sent[channel, peer].append((work, tensor))

    def receive(
        self, channel: Channel, peer: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Pending:
        """See :class:`Transport`."""
        # What is said about tensors is read by Python: that stays on the host.
        device = self.device if channel in _THERE_AND_BACK else _HOST
        buffer = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
        try:
            work = self._groups[channel, peer < self.rank].recv([buffer], peer, 0)
        except RuntimeError as error:  # that is said where it is waited for, which names the place
            return _LostPeer(f"receiving from rank {peer}: {error}")
        pending = _PendingGloo(work, buffer, peer, self._asked, device)
        self._asked.add(pending)
        return pending

    def arrived(self, channel: Channel, peer: int, count: int) -> None:
        """See :class:`Transport`."""
        route = channel, peer
        self._let_go(route, count)
        rounds = self._of_round[route]
        for index, sent in enumerate(rounds):
            rounds[index] -= min(count, sent)
            count -= min(count, sent)

    def settle(self, control_rounds: int = 0) -> None:
        """See :class:`Transport`."""
        for route, sent in self._sent.items():
            rounds = self._of_round[route]
            rounds.append(len(sent) - sum(rounds))
            kept = 1 if route[0] in _THERE_AND_BACK else 1 + control_rounds
            while len(rounds) > kept:
                self._let_go(route, rounds.popleft())

    def _let_go(self, route: Route, count: int) -> None:
        """Wait for the oldest messages of a route."""
        sent = self._sent[route]
        for _ in range(count):
            try:
                sent[0][0].wait()
            except RuntimeError as error:
                raise PeerLostError(f"sending to rank {route[1]}: {error}") from error
            sent.popleft()

    def close(self) -> None:
        """Give the connections up. All that was sent must have arrived, on all ranks."""
        for group in set(self._groups.values()):
            dist.destroy_process_group(group)
        self._groups = {}

    def abandon(self) -> None:
        """Close the connections at once, so that no peer waits for this rank.

        gloo keeps them open as long as anything refers to their group, or to a send or a receive,
        done or not. The traceback of a failure must refer to none, so this class alone does.
        """
        for pending in self._asked:
            pending.forget()
        for sent in self._sent.values():
            sent.clear()
        self._groups = {}


class _LostPeer:
    """A receive that could not even be asked for.

    Args:
        message: Why.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def wait(self) -> Tensor:
        raise PeerLostError(self._message)


class _PendingGloo:
    __slots__ = ("_asked", "_buffer", "_device", "_peer", "_work")

    def __init__(
        self, work: Any, buffer: Tensor, peer: int, asked: set[_PendingGloo], device: torch.device
    ) -> None:
        self._work, self._buffer, self._peer = work, buffer, peer
        self._asked, self._device = asked, device

    def wait(self) -> Tensor:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"receiving from rank {self._peer}: {error}") from error
        finally:
            self.forget()
        self._asked.discard(self)
        return self._buffer.to(self._device)

    def forget(self) -> None:
        self._work = None
