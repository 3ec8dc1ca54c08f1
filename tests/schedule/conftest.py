"""An interpreter of plans that shares nothing with the validator.

It moves labelled values through channels without tags, as ranks would, and says what goes wrong. It
knows nothing of `dependencies`: a forward needs its input in the rank's hands, and a receive takes
whatever comes next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import cast

import pytest

from lightning_pipe.schedule import (
    Backward,
    Communication,
    Forward,
    Instruction,
    Plan,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    Update,
)


class Broken(Exception):
    """What is wrong with a plan."""


def in_flight_bound(plan: Plan, rank: int) -> int:
    """Closed forms, summed over the rank's stages (GPipe; 1F1B; Megatron-LM's warm-up and one)."""
    P, m, v = plan.placement.num_ranks, plan.num_microbatches, len(plan.placement.stages_of(rank))
    if plan.schedule == "1f1b":
        return min(P - plan.placement.stages_of(rank)[0], m)
    if plan.schedule == "interleaved":
        return min((P - rank - 1) * 2 + (v - 1) * P + 1, m * v)
    return m * v


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
        self.finished: set[tuple[int, int]] = set()
        self.backwards: dict[int, int] = defaultdict(int)
        self.reduced: set[int] = set()
        self.updated: set[int] = set()

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
            case Backward():
                self.backward(step)
            case Reduce(s):
                ready = self.backwards[s] == self.plan.num_microbatches
                self.once(step, self.reduced, ready)
            case Update(s):
                self.once(step, self.updated, s in self.reduced)

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
        if step.version or len(self.kept) > in_flight_bound(self.plan, self.rank):
            raise Broken(f"rank {self.rank}: {step} has no such version, or too many in flight")

    def backward(self, step: Backward) -> None:
        s, i = step.stage, step.microbatch
        self.take(self.output_gradients, (s, i), step)
        self.take(self.kept, (s, i), step)
        self.backwards[s] += 1
        if s > 0 and self.here(s - 1):
            self.output_gradients.add((s - 1, i))
        elif s > 0:
            self.input_gradients.add((s, i))
        if step.version or self.plan.forward_only:
            raise Broken(f"rank {self.rank}: {step} has no place")

    def once(self, step: Reduce | Update, done: set[int], ready: bool) -> None:
        if not ready or step.stage in done:
            raise Broken(f"rank {self.rank}: {step} is too early, or comes twice")
        done.add(step.stage)

    def send(self, step: SendActivation | SendGradient) -> tuple[str, int, int]:
        if isinstance(step, SendActivation):
            self.take(self.outputs, (step.stage, step.microbatch), step)
            return "activation", step.stage + 1, step.microbatch
        self.take(self.input_gradients, (step.stage, step.microbatch), step)
        return "gradient", step.stage - 1, step.microbatch

    def receive(
        self, step: ReceiveActivation | ReceiveGradient, message: tuple[str, int, int]
    ) -> None:
        kind = "activation" if isinstance(step, ReceiveActivation) else "gradient"
        if message != (kind, step.stage, step.microbatch) or not self.here(step.stage):
            raise Broken(f"rank {self.rank}: {step} gets {message}")
        store = self.inputs if kind == "activation" else self.output_gradients
        store.add((step.stage, step.microbatch))

    def check_finished(self) -> None:
        """Nothing is left over, and the purpose is fulfilled."""
        stages = self.plan.placement.stages_of(self.rank)
        left = self.inputs | self.outputs | self.input_gradients
        if self.plan.forward_only:
            m = self.plan.num_microbatches
            fulfilled = len(self.finished) == (m if self.last in stages else 0)
            fulfilled &= len(self.kept) == m * len(stages)
        else:
            left |= self.kept | self.output_gradients
            fulfilled = self.updated == set(stages)
        if left or not fulfilled:
            raise Broken(f"rank {self.rank} has {left} left over, or has not finished")


def run_posted(plan: Plan) -> None:
    """Sends never block; a receive takes the next message of its channel."""
    ranks = [Rank(plan, rank) for rank in range(plan.placement.num_ranks)]
    todo = [deque(program) for program in plan.programs]
    channels: dict[object, deque[tuple[str, int, int]]] = defaultdict(deque)
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
