"""An interpreter of plans that shares nothing with the validator.

It moves labelled values through channels without tags, as ranks would, and says what goes wrong. It
knows nothing of `dependencies`: a forward needs its input in the rank's hands, and a receive takes
whatever comes next.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import cast

import pytest

from lightning_pipe.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Communication,
    Compute,
    Forward,
    Instruction,
    Plan,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
    VersionPolicy,
)

Message = tuple[str, int, int, int]  # kind, stage that it enters, micro-batch, version


class Broken(Exception):
    """What is wrong with a plan."""


def in_flight_bound(plan: Plan, rank: int) -> int:
    """Closed forms, summed over the rank's stages (GPipe; 1F1B; Megatron-LM's warm-up and one)."""
    P, m, v = plan.placement.num_ranks, plan.num_microbatches, len(plan.placement.stages_of(rank))
    if plan.schedule in ("1f1b", "pipedream", "pipedream_2bw"):
        return min(P - plan.placement.stages_of(rank)[0], m)
    if plan.schedule == "zero_bubble":
        return min(P, m) * v
    if plan.schedule == "interleaved":
        return min((P - rank - 1) * 2 + (v - 1) * P + 1, m * v)
    return m * v


def update_of(plan: Plan, i: int) -> int:
    """Which update the gradient of micro-batch i belongs to."""
    if plan.policy is VersionPolicy.SYNCHRONOUS:
        return 0
    if plan.policy is VersionPolicy.DOUBLE_BUFFERED:
        return [n for n, count in enumerate(plan.batches) for _ in range(count)][i]
    return i


def version_rule(plan: Plan, step: Compute) -> int:
    """The table of PipeDream's versions."""
    i, w_0 = step.microbatch, plan.placement.num_stages - 1
    w_s = w_0 - step.stage
    newest = max(0, i - w_s)
    return {
        VersionPolicy.SYNCHRONOUS: 0,
        VersionPolicy.STASHING: newest,
        VersionPolicy.VERTICAL_SYNC: max(0, i - w_0),
        VersionPolicy.NO_STASHING: newest if isinstance(step, Forward) else i,
        VersionPolicy.DOUBLE_BUFFERED: max(0, update_of(plan, i) - 1),
    }[plan.policy]


def live_bound(plan: Plan, stage: int) -> int:
    """How many versions of a stage may be alive."""
    w_0 = plan.placement.num_stages - 1
    return {
        VersionPolicy.SYNCHRONOUS: 1,
        VersionPolicy.STASHING: w_0 - stage + 1,
        VersionPolicy.VERTICAL_SYNC: w_0 + 1,
        VersionPolicy.NO_STASHING: 1,
        VersionPolicy.DOUBLE_BUFFERED: 2,
    }[plan.policy]


class Rank:
    """What one rank holds while it runs its program."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.last = plan, rank, plan.placement.num_stages - 1
        m = range(plan.num_microbatches)
        self.inputs = {(0, i) for i in m} if plan.placement.rank_of[0] == rank else set()
        self.outputs: set[tuple[int, int]] = set()
        self.output_gradients: set[tuple[int, int]] = set()
        self.input_gradients: set[tuple[int, int]] = set()
        self.kept: set[tuple[int, int]] = set()
        self.halves: set[tuple[int, int]] = set()  # backwards whose second part is due
        self.finished: set[tuple[int, int]] = set()
        self.versions = {s: {0} for s in plan.placement.stages_of(rank)}
        self.missing = Counter((s, update_of(plan, i)) for s in self.versions for i in m)
        self.reduced: set[tuple[int, int]] = set()
        self.updated: set[tuple[int, int]] = set()

    def take(self, store: set[tuple[int, int]], key: tuple[int, int], what: object) -> None:
        if key not in store:
            raise Broken(f"rank {self.rank}: nothing to work on for {what}")
        store.remove(key)

    def here(self, stage: int) -> bool:
        return 0 <= stage <= self.last and self.plan.placement.rank_of[stage] == self.rank

    def run(self, step: Instruction) -> None:
        if not self.here(step.stage):
            raise Broken(f"rank {self.rank}: {step} is foreign")
        match step:
            case Forward():
                self.forward(step)
            case Backward() | BackwardInput():
                self.backward(step)
            case BackwardWeight(s, i):
                self.take(self.halves, (s, i), step)
                self.end(step)
                self.read(step)
            case Reduce(s, k):
                self.once(step, self.reduced, self.missing.get((s, k)) == 0)
            case Update(s, k):
                self.once(step, self.updated, (s, k) in self.reduced)
                self.update(step)

    def forward(self, step: Forward) -> None:
        s, i = step.stage, step.microbatch
        self.take(self.inputs, (s, i), step)
        self.kept.add((s, i))
        if s == self.last:
            self.output_gradients.add((s, i))
            self.finished.add((s, i))
        elif self.here(s + 1):
            self.inputs.add((s + 1, i))
        else:
            self.outputs.add((s, i))
        self.read(step)
        if len(self.kept) > in_flight_bound(self.plan, self.rank):
            raise Broken(f"rank {self.rank}: {step} is one too many in flight")

    def backward(self, step: Backward | BackwardInput) -> None:
        s, i = step.stage, step.microbatch
        self.take(self.output_gradients, (s, i), step)
        if isinstance(step, BackwardInput):
            self.halves.add((s, i))
        else:
            self.end(step)
        if s > 0 and self.here(s - 1):
            self.output_gradients.add((s - 1, i))
        elif s > 0:
            self.input_gradients.add((s, i))
        self.read(step)
        if self.plan.forward_only:
            raise Broken(f"rank {self.rank}: {step} has no place")

    def end(self, step: Backward | BackwardWeight) -> None:
        s, i = step.stage, step.microbatch
        self.take(self.kept, (s, i), step)
        self.missing[s, update_of(self.plan, i)] -= 1

    def read(self, step: Compute) -> None:
        right = step.version == version_rule(self.plan, step)
        if not right or step.version not in self.versions[step.stage]:
            raise Broken(f"rank {self.rank}: {step} reads a wrong version, or one that is not held")

    def update(self, step: Update) -> None:
        s, k = step.stage, step.update
        in_order = k == max(self.versions[s])
        self.versions[s] = {v for v in {*self.versions[s], k + 1} if v >= step.keeps}
        held = len(self.versions[s])
        if not in_order or not 1 <= held <= live_bound(self.plan, s):
            raise Broken(f"rank {self.rank}: {step} is out of order, or holds {held} versions")

    def once(self, step: Reduce | Update, done: set[tuple[int, int]], ready: bool) -> None:
        if not ready or (step.stage, step.update) in done:
            raise Broken(f"rank {self.rank}: {step} is too early, or comes twice")
        done.add((step.stage, step.update))

    def send(self, step: SendActivation | SendGradient) -> Message:
        s, i = step.stage, step.microbatch
        if isinstance(step, SendActivation):
            self.take(self.outputs, (s, i), step)
            if step.version != version_rule(self.plan, Forward(s, i)):
                raise Broken(f"rank {self.rank}: {step} names a wrong version")
            return "activation", s + 1, i, step.version
        self.take(self.input_gradients, (s, i), step)
        return "gradient", s - 1, i, 0

    def receive(self, step: ReceiveActivation | ReceiveGradient, message: Message) -> None:
        s, i = step.stage, step.microbatch
        expected = ("gradient", s, i, 0)
        if isinstance(step, ReceiveActivation):
            expected = ("activation", s, i, step.version)
        if message != expected or not self.here(s):
            raise Broken(f"rank {self.rank}: {step} gets {message}")
        store = self.inputs if isinstance(step, ReceiveActivation) else self.output_gradients
        store.add((s, i))

    def check_finished(self) -> None:
        """Nothing is left over, and the purpose is fulfilled."""
        stages = self.plan.placement.stages_of(self.rank)
        left = self.inputs | self.outputs | self.input_gradients
        if self.plan.forward_only:
            m = self.plan.num_microbatches
            fulfilled = len(self.finished) == (m if self.last in stages else 0)
            fulfilled &= len(self.kept) == m * len(stages)
        else:
            left |= self.kept | self.output_gradients | self.halves
            fulfilled = self.updated == set(self.missing)
        if left or not fulfilled:
            raise Broken(f"rank {self.rank} has {left} left over, or has not finished")


def run_posted(plan: Plan) -> None:
    """Sends never block; a receive takes the next message of its channel."""
    ranks = [Rank(plan, rank) for rank in range(plan.placement.num_ranks)]
    todo = [deque(program) for program in plan.programs]
    channels: dict[object, deque[Message]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while todo[rank.rank]:
                step = todo[rank.rank][0]
                if isinstance(step, SendActivation | SendGradient):
                    message = rank.send(step)
                    channels[rank.rank, step.peer, message[0]].append(message)
                elif isinstance(step, ReceiveActivation | ReceiveGradient):
                    kind = "activation" if isinstance(step, ReceiveActivation) else "gradient"
                    channel = channels[step.peer, rank.rank, kind]
                    if not channel:
                        break
                    rank.receive(step, channel.popleft())
                else:
                    rank.run(step)
                todo[rank.rank].popleft()
                moved = True
    if any(todo) or any(channels.values()):
        raise Broken("deadlock, or messages that nobody takes")
    for rank in ranks:
        rank.check_finished()


def run_rendezvous(plan: Plan) -> None:
    """A send meets the next receive of the same pair; neighbours in a program go as one batch."""
    ranks = [Rank(plan, rank) for rank in range(plan.placement.num_ranks)]
    todo = [deque(program) for program in plan.programs]
    batches: list[list[Communication]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            queue, batch = todo[rank.rank], batches[rank.rank]
            while queue and not batch:
                while queue and isinstance(queue[0], Communication):
                    batch.append(cast(Communication, queue.popleft()))
                if not batch:
                    rank.run(queue.popleft())
                moved = True
        for sender in ranks:
            for receiver in ranks:
                moved |= meet(sender, receiver, batches)
    if any(todo) or any(batches):
        raise Broken("deadlock")
    for rank in ranks:
        rank.check_finished()


def meet(sender: Rank, receiver: Rank, batches: list[list[Communication]]) -> bool:
    """Hand over what the open batches of two ranks can."""
    moved = False
    while True:
        sends = (x for x in batches[sender.rank] if isinstance(x, SendActivation | SendGradient))
        send = next((x for x in sends if x.peer == receiver.rank), None)
        receives = (
            x for x in batches[receiver.rank] if isinstance(x, ReceiveActivation | ReceiveGradient)
        )
        receive = next((x for x in receives if x.peer == sender.rank), None)
        if send is None or receive is None:
            return moved
        receiver.receive(receive, sender.send(send))
        batches[sender.rank].remove(send)
        batches[receiver.rank].remove(receive)
        moved = True


@pytest.fixture(scope="session")
def broken() -> Callable[..., str]:
    """Give the function that says what is wrong with a plan, the empty string if nothing is."""

    def find(plan: Plan, receive_model: str = "posted") -> str:
        run = run_posted if receive_model == "posted" else run_rendezvous
        try:
            run(plan)
        except Broken as problem:
            return str(problem) or "broken"
        return ""

    return find
