"""How much lies at each score: the sorted, tie-grouped form that every metric is read from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """Weights in K groups of equal (or, when binned, nearly equal) scores, highest group first.

    Flagging the first k groups, k = 0 … K, gives the K + 1 points of every curve.

    Attributes:
        lowest: (K,) smallest score that falls into each group.
        highest: (K,) largest score that falls into each group; equal to `lowest` when exact.
        weights: (rows, K) float64; what a row stands for is the maker's business.
    """

    lowest: Floats
    highest: Floats
    weights: Floats

    @classmethod
    def of(cls, scores: ArrayLike, weights: ArrayLike) -> Tally:
        """Group equal scores.

        Args:
            scores: (n,) finite.
            weights: (rows, n).
        """
        distinct, group = np.unique(np.asarray(scores), return_inverse=True)
        summed = [
            np.bincount(group, weights=row, minlength=len(distinct))
            for row in np.asarray(weights, dtype=np.float64)
        ]
        edges = distinct[::-1].astype(np.float64)
        return cls(edges, edges, np.array(summed, dtype=np.float64)[:, ::-1])

    @property
    def exact(self) -> bool:
        """Whether each group is one score."""
        return bool(np.array_equal(self.lowest, self.highest))

    def thresholds(self) -> Floats:
        """(K + 1,) thresholds: scores above the k-th flag exactly the first k groups.

        Each lies midway between the groups it parts, and is a float32 wherever one fits in
        between, so that it does the same when compared in single precision.
        """
        above, below = self.lowest[:-1], self.highest[1:]
        midway = (above / 2 + below / 2).astype(np.float32).astype(np.float64)
        parting = np.where((midway >= below) & (midway < above), midway, below)
        with np.errstate(over="ignore"):
            under_all = np.nextafter(self.lowest[-1:].astype(np.float32), np.float32(-np.inf))
        return np.concatenate([self.highest[:1], parting, under_all.astype(np.float64)])
