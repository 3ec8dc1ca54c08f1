"""Minima over many ranges of one array at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RangeMinimum:
    """A sparse table: where the least of any run of an array is, in constant time.

    Args:
        values: At least one.
    """

    def __init__(self, values: NDArray[np.float64]) -> None:
        self._values = values
        self._rows = [np.arange(len(values))]  # row l: the least of 2^l from here, or what is left
        width = 1
        while 2 * width <= len(values):
            row = self._rows[-1].copy()
            ahead = self._rows[-1][width:]
            row[:-width] = np.where(values[ahead] < values[row[:-width]], ahead, row[:-width])
            self._rows.append(row)
            width *= 2
        self._table = np.stack(self._rows)
        self._row_for = np.zeros(len(values) + 1, dtype=np.int64)
        self._row_for[1:] = np.log2(np.arange(1, len(values) + 1)).astype(np.int64)

    def where(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the index of the least of each range, the first if there are several.

        Args:
            start: Of the ranges.
            stop: Their ends, which do not belong to them; behind the start.
        """
        row = self._row_for[stop - start]
        left, right = self._table[row, start], self._table[row, stop - (1 << row)]
        found: NDArray[np.int64] = np.where(self._values[right] < self._values[left], right, left)
        return found

    def least(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.float64]:
        """Give the least of each range."""
        return self._values[self.where(start, stop)]
