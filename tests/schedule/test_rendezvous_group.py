"""Programs over a process group whose sends wait for their receives, as NCCL's do.

The package has no NCCL transport. What one would rest on is the order that `exchange` gives to
programs, which the validator proves. Here ranks are threads, at speeds of their own, and each
hands what it communicates between two computes to a group as one batch (`batch_isend_irecv`), on
one communicator: messages have no tags, and the n-th send of a rank to another one meets the n-th
receive that this one asks of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import groupby

import pytest

from lightning_pipe.schedule import SCHEDULES, Placement, Plan, look_up, make_plan
from lightning_pipe.schedule.instructions import (
    Communication,
    Instruction,
    Receive,
    Send,
    requirements,
)

WAIT_S = 10.0
DEADLOCK_S = 0.3  # to wait for a plan of which it is known that it hangs


class FakeGroup:
    """A communicator of threads. A batch returns when all of its messages have been taken."""

    def __init__(self, wait_s: float) -> None:
        self._changed, self._wait_s = threading.Condition(), wait_s
        self._sends: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)

    def batch_isend_irecv(
        self, rank: int, sends: list[tuple[int, Instruction]], sources: list[int]
    ) -> list[Instruction]:
        """Exchange messages.

        Args:
            rank: Of the caller.
            sends: To whom, and what.
            sources: From whom to receive.

        Returns:
            What came, in the order of the sources.
        """
        sending = [(self._sends[rank, peer], _Message(what)) for peer, what in sends]
        receiving = [(self._receives[peer, rank], _Message()) for peer in sources]
        with self._changed:
            for queue, message in [*sending, *receiving]:
                queue.append(message)
            self._meet()
            mine = [message for _, message in [*sending, *receiving]]
            if not self._changed.wait_for(lambda: all(m.met for m in mine), self._wait_s):
                raise TimeoutError(f"rank {rank} waits for ever")
        return [message.what for _, message in receiving if message.what is not None]

    def _meet(self) -> None:
        for pair, sends in self._sends.items():
            receives = self._receives[pair]
            while sends and receives:
                send, receive = sends.popleft(), receives.popleft()
                receive.what, send.met, receive.met = send.what, True, True
        self._changed.notify_all()


class _Message:
    def __init__(self, what: Instruction | None = None) -> None:
        self.what, self.met = what, False


def run(plan: Plan, seed: int, wait_s: float = WAIT_S) -> None:
    """Run all ranks; raises what the first one that fails raises."""
    group, errors = FakeGroup(wait_s), list[Exception]()
    required = requirements(plan)

    def work(rank: int) -> None:
        speed = random.Random(f"{seed} {rank}")
        try:
            for exchange in exchanges(plan.programs[rank]):
                if not exchange:  # something is computed
                    time.sleep(speed.choice((0.0, 0.0, 0.0005)))
                    continue
                sends = [(step.peer, step) for step in exchange if isinstance(step, Send)]
                receives = [step for step in exchange if isinstance(step, Receive)]
                came = group.batch_isend_irecv(rank, list(sends), [r.peer for r in receives])
                assert [(what,) for what in came] == [required[step] for step in receives]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(plan.placement.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def exchanges(program: tuple[Instruction, ...]) -> Iterator[list[Communication]]:
    """What is communicated between two other instructions; nothing for these."""
    for communicates, steps in groupby(program, lambda step: isinstance(step, Communication)):
        yield [step for step in steps if isinstance(step, Communication)] if communicates else []


SHAPES = [
    *((name, 4, 1, 8) for name in ("gpipe", "1f1b", "zero_bubble")),
    ("naive", 4, 1, 1),
    ("interleaved", 4, 2, 8),
    ("interleaved", 3, 3, 6),
    ("zero_bubble", 4, 2, 8),
    ("pipedream", 4, 1, (1,) * 9),
    ("pipedream_2bw", 4, 1, (4,) * 3),
    ("forward", 4, 2, 5),
]


@pytest.mark.parametrize(("schedule", "num_ranks", "stages_per_rank", "count"), SHAPES)
def test_every_schedule_comes_to_its_end(
    schedule: str, num_ranks: int, stages_per_rank: int, count: int | tuple[int, ...]
) -> None:
    placement = look_up(schedule).place(num_ranks, stages_per_rank)
    plan = make_plan(schedule, placement, count, "rendezvous")
    for seed in range(3):
        run(plan, seed)


def test_no_schedule_is_forgotten() -> None:
    assert {schedule for schedule, *_ in SHAPES} == set(SCHEDULES)


def test_a_plan_for_another_transport_hangs() -> None:
    plan = make_plan("interleaved", Placement.round_robin(2, 2), 4, "posted")
    with pytest.raises(TimeoutError, match="waits for ever"):
        run(plan, 0, DEADLOCK_S)
