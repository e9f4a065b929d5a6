"""Areas, averages and maxima of curves, from the good and defective weight at each score.

Every function takes `good` and `defect` of shape (..., K), highest score first, and reduces the
last axis; leading axes (random draws) are carried along.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Metrics:
    """Named figures of one evaluation.

    Attributes:
        values: the figures; None where the data leave one undefined.
        reasons: for each None in `values`, why.
    """

    values: dict[str, float | None]
    reasons: dict[str, str] = field(default_factory=dict)

    def __or__(self, other: Metrics) -> Metrics:
        """Both sets of figures; those of `other` win where a name is in both."""
        kept = {name: why for name, why in self.reasons.items() if name not in other.values}
        return Metrics(self.values | other.values, kept | other.reasons)

    def only(self, name: str) -> Metrics:
        """One of the figures."""
        reasons = {name: self.reasons[name]} if name in self.reasons else {}
        return Metrics({name: self.values[name]}, reasons)

    @classmethod
    def undefined(cls, names: tuple[str, ...], reason: str) -> Metrics:
        """All of `names` undefined for one reason."""
        return cls(dict.fromkeys(names), dict.fromkeys(names, reason))


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


def cumulative(weights: Floats) -> Floats:
    """(..., K + 1) weight of the first 0 … K groups."""
    start = np.zeros((*weights.shape[:-1], 1))
    return np.concatenate([start, np.cumsum(weights, axis=-1, dtype=np.float64)], axis=-1)


def cumulative_share(weights: Floats) -> Floats:
    """(..., K + 1) share of all weight in the first 0 … K groups, from 0 to exactly 1."""
    total = cumulative(weights)
    return np.asarray(total / total[..., -1:], dtype=np.float64)


def area(x: Floats, y: Floats, stop: float = 1.0) -> Floats:
    """Area under the polyline (x, y), x rising from 0, up to `stop`, interpolated there."""
    inside = x.clip(max=stop)
    width, middle = np.diff(inside), (inside[..., 1:] + inside[..., :-1]) / 2
    run, rise = np.diff(x), np.diff(y)
    slope = np.divide(rise, run, out=np.zeros_like(rise), where=run > 0)
    return np.asarray((width * (y[..., :-1] + slope * (middle - x[..., :-1]))).sum(axis=-1))


def auroc(good: Floats, defect: Floats) -> Floats:
    """Area under the ROC curve; a tie counts half."""
    return area(cumulative_share(good), cumulative_share(defect))


def precision(good: Floats, defect: Floats) -> Floats:
    """(..., K + 1) share of defects in the first 0 … K groups; 1 where nothing is flagged."""
    true, false = cumulative(defect), cumulative(good)
    return np.divide(true, true + false, out=np.ones_like(true), where=true + false > 0)


def average_precision(good: Floats, defect: Floats) -> Floats:
    """Precision at each score, weighted by the recall gained there."""
    gained = np.diff(cumulative_share(defect))
    return np.asarray((gained * precision(good, defect)[..., 1:]).sum(axis=-1))


def f1_scores(good: Floats, defect: Floats) -> Floats:
    """(..., K + 1) F1 when the first 0 … K groups are flagged."""
    true, false = cumulative(defect), cumulative(good)
    return np.asarray(2 * true / (true + false + true[..., -1:]))
