"""How far the clocks of two ranks are apart.

``time.perf_counter`` is one clock for all processes of a host, and begins anywhere on another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_TRIES = 8


def behind_first(clock: Callable[[], float] = time.perf_counter) -> float:
    """Say how far this rank's clock is behind that of rank 0. Collective.

    Rank 0 is asked for its time, and the answer is taken to have been given half-way. The fastest
    of several tries counts: it is wrong by half of its time at the most, and all but never by so
    much (Cristian 1989).

    Args:
        clock: Of this rank, in seconds.

    Returns:
        Seconds to add to this rank's times; 0 on rank 0.
    """
    rank, answer = dist.get_rank(), torch.zeros((), dtype=torch.float64)
    if rank == 0:
        for peer in range(1, dist.get_world_size()):
            for _ in range(_TRIES):
                dist.recv(answer, peer)
                dist.send(answer.fill_(clock()), peer)
        return 0.0
    tries = []
    for _ in range(_TRIES):
        asked = clock()
        dist.send(answer, 0)
        dist.recv(answer, 0)
        answered = clock()
        tries.append((answered - asked, float(answer) - (asked + answered) / 2))
    return min(tries)[1]
