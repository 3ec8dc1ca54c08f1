"""The random numbers of a pipeline: the same on every stage where they must be.

The user's step runs on every stage, so what it draws before the pipelined call (noise, a mixup
weight, a mask) must not depend on the stage. And what the layers draw (dropout) should depend
neither on how the layers are spread over ranks nor on whether a forward is run again. So no
stream is ever *continued*: each starts from a seed that is a function of what it is for,

    seed of a step  = mix(seed, replica, batch, micro-batch, 0; -1 after the call)
    seed of a layer = mix(seed, replica, batch, micro-batch, 1 + layer)

and after a round the process's own random states are put back, which therefore advance alike on
all ranks (so that shuffled loaders agree). Torch's generators start anew for each layer; Python's
and NumPy's, from which layers rarely draw, only for each run of layers that is recomputed as one,
so what layers draw from those two repeats, but depends on the partition.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A well-mixed 64-bit hash of integers (the finaliser of SplitMix64, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + number % (1 << 64) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class RandomStates:
    """All random states that user code draws from: torch (CPU and device), Python, NumPy.

    Args:
        seed: Of the run; equal on all ranks.
        replica: Data-parallel rank; equal on all ranks of one pipeline.
        device: The device whose generator is seeded too, if it is not the CPU.
    """

    def __init__(self, seed: int, replica: int = 0, device: torch.device | None = None) -> None:
        self._base = mix(seed, replica)
        self._device = device if device is not None and device.type == "cuda" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put all random states back at the end, whatever happens inside."""
        before = self.get()
        try:
            yield
        finally:
            self.set(before)

    def get(self) -> tuple[Any, ...]:
        """Copies of all states, picklable."""
        device = torch.cuda.get_rng_state(self._device) if self._device else None
        numpy_state = np.random.get_state()
        return torch.default_generator.get_state(), random.getstate(), numpy_state, device

    def set(self, states: tuple[Any, ...]) -> None:
        """Put back what :meth:`get` returned."""
        cpu, python, numpy_state, device = states
        torch.default_generator.set_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy_state)
        if device is not None and self._device is not None:
            torch.cuda.set_rng_state(device, self._device)

    def seed_step(self, batch: int, microbatch: int, after_call: bool = False) -> None:
        """Start the stream of one run of the user's step, or of what follows its call."""
        self._seed_all(mix(self._base, batch, microbatch, -1 if after_call else 0))

    def seed_stage(self, batch: int, microbatch: int, layer: int) -> None:
        """Start the streams of a stage whose first layer is ``layer`` of the whole model."""
        self._seed_all(mix(self._base, batch, microbatch, layer + 1))

    def seed_layer(self, batch: int, microbatch: int, layer: int) -> None:
        """Start the stream of one layer, numbered over the whole model; torch's only."""
        self._seed_torch(mix(self._base, batch, microbatch, layer + 1))

    def _seed_all(self, seed: int) -> None:
        self._seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    def _seed_torch(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed & (_MASK >> 1))
        if self._device is not None:
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed & (_MASK >> 1))
