"""Messages between threads."""

import threading
import time

import pytest
import torch

from lightning_pipe.runtime.errors import PeerLostError
from lightning_pipe.runtime.transport import (
    Channel,
    LocalHub,
    LocalTransport,
    PendingObject,
    send_object,
)

from .harness import on_ranks


def ends(size=2, timeout=5.0):
    hub = LocalHub(size, timeout)
    return [LocalTransport(rank, hub) for rank in range(size)], hub


def test_messages_of_a_channel_arrive_in_order():
    (sender, receiver), _ = ends()
    for value in range(3):
        sender.send(Channel.ACTIVATION, 1, torch.tensor([value]))
    pending = [receiver.receive(Channel.ACTIVATION, 0, (1,), torch.int64) for _ in range(3)]
    assert [p.wait().item() for p in pending] == [0, 1, 2]


def test_channels_and_peers_do_not_mix():
    (a, b, c), _ = ends(3)
    for number, (sender, channel) in enumerate((s, ch) for s in (a, b) for ch in Channel):
        sender.send(channel, 2, torch.tensor(number))
    expected = {
        (peer, channel): i
        for i, (peer, channel) in enumerate((p, ch) for p in (0, 1) for ch in Channel)
    }
    for (peer, channel), number in reversed(expected.items()):
        assert c.receive(channel, peer, (), torch.int64).wait().item() == number


def test_a_message_is_a_copy():
    (sender, receiver), _ = ends()
    tensor = torch.ones(2, requires_grad=True)
    sender.send(Channel.GRADIENT, 1, tensor)
    with torch.no_grad():
        tensor.zero_()
    arrived = receiver.receive(Channel.GRADIENT, 0, (2,), torch.float32).wait()
    assert torch.equal(arrived, torch.ones(2))
    assert not arrived.requires_grad


@pytest.mark.parametrize(("shape", "dtype"), [((3,), torch.float32), ((2,), torch.float64)])
def test_a_receive_of_another_shape_or_dtype_fails(shape, dtype):
    """gloo would abort the process, or succeed and say nothing."""
    (sender, receiver), _ = ends()
    sender.send(Channel.GRADIENT, 1, torch.ones(2))
    with pytest.raises(AssertionError, match="the ends disagree"):
        receiver.receive(Channel.GRADIENT, 0, shape, dtype).wait()


@pytest.mark.parametrize("size", [0, 10, 900, 1000, 1016, 1017, 5000])
def test_objects_of_any_size_arrive(size):
    (sender, receiver), _ = ends()
    coming = PendingObject(receiver, Channel.CONTROL, 0)
    send_object(sender, Channel.CONTROL, 1, b"x" * size)
    send_object(sender, Channel.CONTROL, 1, {"next": [size]})
    assert coming.wait() == b"x" * size
    assert PendingObject(receiver, Channel.CONTROL, 0).wait() == {"next": [size]}


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_sums_again_and_again(size):
    def work(transport):
        results = []
        for factor in (1.0, 10.0):
            tensor = torch.full((2,), factor * (transport.rank + 1))
            transport.groups.world.sum(tensor).wait()
            results.append(tensor.tolist())
        return results

    total = size * (size + 1) / 2
    assert on_ranks(size, work) == [[[total] * 2, [10 * total] * 2]] * size


def test_a_receive_that_nothing_is_sent_for_ends():
    (_, receiver), _ = ends(timeout=0.3)
    with pytest.raises(PeerLostError, match="rank 0 sent nothing"):
        receiver.receive(Channel.GRADIENT, 0, (2,), torch.float32).wait()


def test_a_sum_in_which_a_rank_is_missing_ends():
    (alone, _), _ = ends(timeout=0.3)
    with pytest.raises(PeerLostError, match="did not come"):
        alone.groups.world.sum(torch.ones(1)).wait()


@pytest.mark.parametrize(
    "wait",
    [
        lambda end: end.receive(Channel.GRADIENT, 0, (2,), torch.float32).wait(),
        lambda end: end.groups.world.sum(torch.ones(1)).wait(),
    ],
    ids=["receive", "sum"],
)
def test_waits_end_when_a_rank_has_failed(wait):
    (_, waiting), hub = ends(timeout=60.0)
    threading.Timer(0.1, hub.abort).start()
    start = time.monotonic()
    with pytest.raises(PeerLostError):
        wait(waiting)
    assert time.monotonic() - start < 10
