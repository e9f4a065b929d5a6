"""Scores of more pixels than fit into memory, kept as weights in bins.

A float32's bits, read as an integer, are in the order of the numbers, so a bin is simply the bits
without the last few: its width is a fixed ratio of the score, it nests in the next coarser one,
and no range has to be known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from anomaly.evaluation.metrics.tally import Floats, Tally

_SIGN = np.uint32(1 << 31)
# The keys of the lowest and the highest finite float32.
_LEAST, _MOST = np.uint64(0x0080_0000), np.uint64(0xFF7F_FFFF)


class ScoreHistogram:
    """Rows of weights over bins of scores, in bounded memory.

    Bins are as fine as `max_bins` allows over the range seen so far: single float32 values at
    first, then runs of 2, 4, 8 … of them. Which bins result depends only on the lowest and
    highest score, not on the order of the calls. Takes 8 · rows · max_bins bytes at most.

    Args:
        rows: how many kinds of weight to keep.
        max_bins: the most bins to keep.
    """

    def __init__(self, rows: int, max_bins: int) -> None:
        self._max_bins = max_bins
        self._shift = 0
        self._first = 0
        self._weights: Floats = np.zeros((rows, 0))

    def add(self, scores: NDArray[np.float32], weights: Mapping[int, float | Floats]) -> None:
        """Add scores to some of the rows.

        Args:
            scores: (n,) finite.
            weights: by row, the weight of each score, (n,), or one for all.
        """
        if not len(scores):
            return
        keys = _ordered_keys(scores)
        low, high = int(keys.min()), int(keys.max())
        self._make_room(low, high)
        start = low >> self._shift
        bins = (keys >> self._shift).astype(np.intp)
        bins -= start
        counts = np.bincount(bins)
        here = slice(start - self._first, start - self._first + len(counts))
        for row, weight in weights.items():
            single = isinstance(weight, float)
            self._weights[row, here] += (
                counts * weight if single else np.bincount(bins, weights=weight)
            )

    def tally(self) -> Tally:
        """The occupied bins; their borders are the extreme scores a bin can hold."""
        occupied = np.flatnonzero(self._weights.any(axis=0))[::-1]
        bins = (occupied + self._first).astype(np.uint64)
        shift = np.uint64(self._shift)
        lowest = _scores_of(bins << shift)
        highest = _scores_of(((bins + np.uint64(1)) << shift) - np.uint64(1))
        return Tally(lowest, highest, self._weights[:, occupied])

    def _make_room(self, low: int, high: int) -> None:
        """Widen the range to the keys `low` … `high`, coarsening where the bins wouldn't fit."""
        if self._weights.shape[1]:
            low = min(low, self._first << self._shift)
            high = max(high, ((self._first + self._weights.shape[1]) << self._shift) - 1)
        shift = self._shift
        while (high >> shift) - (low >> shift) >= self._max_bins:
            shift += 1
        first, count = low >> shift, (high >> shift) - (low >> shift) + 1
        if (shift, first, count) == (self._shift, self._first, self._weights.shape[1]):
            return
        widened = np.zeros((len(self._weights), count))
        old = (np.arange(self._weights.shape[1]) + self._first) >> (shift - self._shift)
        for new_row, row in zip(widened, self._weights, strict=True):
            new_row += np.bincount(old - first, weights=row, minlength=count)
        self._shift, self._first, self._weights = shift, first, widened


class ExactScores:
    """Weights by score, unbinned, every score kept: for sets that fit into memory.

    Args:
        rows: how many kinds of weight to keep.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._scores: list[NDArray[np.float32]] = []
        self._weights: list[Floats] = []

    def add(self, scores: NDArray[np.float32], weights: Mapping[int, float | Floats]) -> None:
        """Add scores (n,) to some of the rows."""
        spread = np.zeros((self._rows, len(scores)))
        for row, weight in weights.items():
            spread[row] = weight
        self._scores.append(scores.copy())
        self._weights.append(spread)

    def tally(self) -> Tally:
        """The distinct scores."""
        if not self._scores:
            return Tally.of([], np.zeros((self._rows, 0)))
        return Tally.of(np.concatenate(self._scores), np.concatenate(self._weights, axis=1))


def _ordered_keys(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Integers in the order of the scores; both zeros get the same."""
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _scores_of(keys: NDArray[np.uint64]) -> Floats:
    """The scores of `_ordered_keys`; a bin's border past the finite ones becomes the last."""
    bits = np.clip(keys, _LEAST, _MOST).astype(np.uint32)
    bits = np.where(bits & _SIGN, bits ^ _SIGN, ~bits)
    return bits.view(np.float32).astype(np.float64)
