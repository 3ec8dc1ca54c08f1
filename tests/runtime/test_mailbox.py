"""Messages whose shape both ends learn once."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pipe.runtime.mailbox import AHEAD, Mailbox
from lightning_pipe.runtime.transport import Channel, LocalHub, LocalTransport

OUT, IN = (Channel.ACTIVATION, 1), (Channel.ACTIVATION, 0)
STAGE = 1


class Counting(LocalTransport):
    """Counts messages by their length in elements, and remembers what was asked for."""

    def __init__(self, rank, hub):
        super().__init__(rank, hub)
        self.sent, self.asked = 0, []

    def send(self, channel, peer, tensor):
        self.sent += 1
        super().send(channel, peer, tensor)

    def receive(self, channel, peer, shape, dtype):
        self.asked.append((tuple(shape), dtype))
        return super().receive(channel, peer, shape, dtype)


class Post:
    """Two mailboxes, and the ends that they use."""

    def __init__(self):
        hub = LocalHub(2, timeout=2.0)
        self.sender, self.receiver = Counting(0, hub), Counting(1, hub)
        self.outbox, self.inbox = Mailbox(self.sender), Mailbox(self.receiver)

    def deliver(self, *messages, channel=Channel.ACTIVATION):
        """Send trees by signature, all in one round, and receive them."""
        for i, (signature, tree) in enumerate(messages):
            self.outbox.send((channel, 1), (STAGE, i), signature, tree)
        expected = [((STAGE, i), signature) for i, (signature, _) in enumerate(messages)]
        self.inbox.expect((channel, 0), expected)
        return [self.inbox.receive((channel, 0), (STAGE, i))[0] for i in range(len(messages))]

    def messages(self):
        """How many messages were sent since the last call of this."""
        sent, self.sender.sent = self.sender.sent, 0
        return sent


def test_a_signature_costs_one_header():
    post = Post()
    for _ in range(2):
        for length in (4, 6):
            (arrived,) = post.deliver((length, torch.ones(length)))
            assert torch.equal(arrived, torch.ones(length))
    assert post.messages() == 4 + 2


def test_signatures_take_turns_within_a_round():
    post = Post()
    sent = [
        ("a", torch.ones(2)),
        ("b", (torch.zeros(3), None)),
        ("a", torch.zeros(2)),
        ("c", "text"),
    ]
    for _ in range(2):
        a, b, again, text = post.deliver(*sent)
        assert torch.equal(a, torch.ones(2))
        assert torch.equal(b[0], torch.zeros(3))
        assert b[1] is None
        assert torch.equal(again, torch.zeros(2))
        assert text == "text"


def test_constants_travel_with_every_message():
    post = Post()
    received = post.deliver(*(("s", (torch.ones(2), i, "x" * i)) for i in range(4)))
    assert [(i, text) for _, i, text in received] == [(i, "x" * i) for i in range(4)]


def test_long_constants_do_not_get_in_the_way_of_the_next_tensor():
    post = Post()
    texts = ["x" * 5000, "", "y" * 3000]
    received = post.deliver(*(("s", (torch.ones(2), text)) for text in texts))
    assert [text for _, text in received] == texts


def test_empty_tensors_do_not_travel():
    post = Post()
    post.deliver(("s", torch.ones(2, 0)))
    post.messages()
    (arrived,) = post.deliver(("s", torch.ones(2, 0)))
    assert arrived.shape == (2, 0)
    assert post.messages() == 0


def test_receives_are_asked_for_ahead_but_not_all_at_once():
    post = Post()
    post.deliver(("s", torch.ones(3)))
    post.receiver.asked.clear()
    keys = [(STAGE, i) for i in range(5)]
    post.inbox.expect(IN, [(key, "s") for key in keys])
    assert len(post.receiver.asked) == AHEAD
    for count, key in enumerate(keys, start=1):
        post.outbox.send(OUT, key, "s", torch.ones(3))
        post.inbox.receive(IN, key)
        assert len(post.receiver.asked) == min(count + AHEAD, len(keys))
    assert set(post.receiver.asked) == {((3,), torch.float32)}


def test_no_buffer_of_a_guessed_size_is_posted():
    """Behind a header or constants, whose size is not known, nothing is asked for."""
    post = Post()
    post.deliver(("known", torch.ones(3)), ("constant", (torch.ones(4), 1)))
    post.receiver.asked.clear()
    post.inbox.expect(IN, [((STAGE, 0), "new"), ((STAGE, 1), "known")])
    assert post.receiver.asked == []
    post.outbox.send(OUT, (STAGE, 0), "new", torch.ones(5))
    post.outbox.send(OUT, (STAGE, 1), "known", torch.ones(3))
    for i in range(2):
        post.inbox.receive(IN, (STAGE, i))
    post.receiver.asked.clear()
    post.inbox.expect(IN, [((STAGE, 0), "constant"), ((STAGE, 1), "known")])
    assert post.receiver.asked == [((4,), torch.float32)]


def test_stages_of_one_route_have_specs_of_their_own():
    """Interleaved stages send over one route what looks different for the same micro-batch."""
    post = Post()
    for _ in range(2):
        post.outbox.send(OUT, (1, 0), "s", torch.ones(2))
        post.outbox.send(OUT, (3, 0), "s", torch.ones(4))
        post.inbox.expect(IN, [((1, 0), "s"), ((3, 0), "s")])
        assert post.inbox.receive(IN, (1, 0))[0].shape == (2,)
        assert post.inbox.receive(IN, (3, 0))[0].shape == (4,)


def test_a_gradient_that_is_missing_later_arrives_as_zero():
    post = Post()
    post.deliver(("s", [torch.ones(2), torch.ones(3)]), channel=Channel.GRADIENT)
    (arrived,) = post.deliver(("s", [None, torch.ones(3)]), channel=Channel.GRADIENT)
    assert torch.equal(arrived[0], torch.zeros(2))
    assert torch.equal(arrived[1], torch.ones(3))


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3),
        torch.ones(2).double(),
        (torch.ones(2),),
        "text",
        torch.ones(2, requires_grad=True),
        None,
    ],
    ids=["shape", "dtype", "structure", "constant", "gradient", "missing"],
)
def test_a_broken_promise_is_refused_before_anything_is_sent(other):
    post = Post()
    post.deliver(("s", torch.ones(2)))
    post.messages()
    with pytest.raises(
        MisconfigurationException, match=r"Stage 1, micro-batch 7: the activation .* was"
    ):
        post.outbox.send(OUT, (STAGE, 7), "s", other)
    assert post.messages() == 0


def test_receiving_out_of_order_is_our_own_mistake():
    post = Post()
    post.inbox.expect(IN, [((STAGE, 0), "s"), ((STAGE, 1), "s")])
    with pytest.raises(AssertionError, match=r"message \(1, 0\) comes before \(1, 1\)"):
        post.inbox.receive(IN, (STAGE, 1))
