"""Areas, averages and maxima of curves, from the good and defective weight at each score.

Every function takes `good` and `defect` of shape (..., K), highest score first, and reduces the
last axis; leading axes (random draws) are carried along. The `*_error` functions say how
far the figure can be from the exact one when a group holds scores that differ: inside a group the
exact curve may take any rising path from the group's first corner to its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anomaly.evaluation.metrics.tally import Floats


@dataclass(frozen=True)
class Curve:
    """Points of a curve for a plot, in order of falling threshold.

    Attributes:
        x: (n,) false-positive rate, or recall.
        y: (n,) recall, or precision.
        thresholds: (n,) scores above which a part counts as flagged.
    """

    x: Floats
    y: Floats
    thresholds: Floats

    def thinned(self, points: int) -> Curve:
        """At most `points` of the points, evenly spread along the curve; both ends are kept."""
        steps = np.abs(np.diff(self.x)) + np.abs(np.diff(self.y))
        path = np.concatenate([[0.0], np.cumsum(steps)])
        wanted = np.searchsorted(path, np.linspace(0.0, path[-1], points - 1))
        kept = np.union1d(wanted, len(path) - 1)
        return Curve(self.x[kept], self.y[kept], self.thresholds[kept])


def cumulative(weights: Floats) -> Floats:
    """(..., K + 1) weight of the first 0 … K groups."""
    start = np.zeros((*weights.shape[:-1], 1))
    return np.concatenate([start, np.cumsum(weights, axis=-1, dtype=np.float64)], axis=-1)


def cumulative_share(weights: Floats) -> Floats:
    """(..., K + 1) share of all weight in the first 0 … K groups, from 0 to exactly 1."""
    total = cumulative(weights)
    return np.asarray(total / total[..., -1:], dtype=np.float64)


def area(x: Floats, y: Floats, start: float = 0.0, stop: float = 1.0) -> Floats:
    """Area under the polyline (x, y), x rising, from `start` to `stop`, interpolated there."""
    width, middle = _clipped_segments(x, start, stop)
    run, rise = np.diff(x), np.diff(y)
    slope = np.divide(rise, run, out=np.zeros_like(rise), where=run > 0)
    return np.asarray((width * (y[..., :-1] + slope * (middle - x[..., :-1]))).sum(axis=-1))


def area_error(x: Floats, y: Floats, start: float = 0.0, stop: float = 1.0) -> float:
    """How far any rising curve through the same points can be from `area`: its two staircases."""
    width, _ = _clipped_segments(x, start, stop)
    here = float(area(x, y, start, stop))
    return max(here - float((width * y[:-1]).sum()), float((width * y[1:]).sum()) - here)


def _clipped_segments(x: Floats, start: float, stop: float) -> tuple[Floats, Floats]:
    """Width and middle of what lies of each segment between `start` and `stop`."""
    inside = np.clip(x, start, stop)
    return np.diff(inside), (inside[..., 1:] + inside[..., :-1]) / 2


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


def average_precision_error(good: Floats, defect: Floats) -> float:
    """How far `average_precision` can be from that of the same scores ungrouped.

    The best order in a group puts its defects first, the worst its good ones. Under the worst
    the precision is concave in the defects passed, so its mean is at least that of both ends.
    """
    mixed = defect > 0
    true, false = cumulative(defect), cumulative(good)
    before, after = true[:-1][mixed], true[1:][mixed]
    false_before, false_after = false[:-1][mixed], false[1:][mixed]
    first = np.minimum(before + 1, after)
    best = after / (after + false_before)
    worst = (first / (first + false_after) + after / (after + false_after)) / 2
    here = after / (after + false_after)
    share = defect[mixed] / true[-1]
    return max(float((share * (best - here)).sum()), float((share * (here - worst)).sum()))


def f1_scores(good: Floats, defect: Floats) -> Floats:
    """(..., K + 1) F1 when the first 0 … K groups are flagged."""
    true, false = cumulative(defect), cumulative(good)
    return np.asarray(2 * true / (true + false + true[..., -1:]))


def f1_max_error(good: Floats, defect: Floats) -> float:
    """How much higher F1 can be at a threshold inside a group than at the best border."""
    true, false = cumulative(defect), cumulative(good)
    inside = 2 * true[1:] / (true[1:] + false[:-1] + true[-1])
    return float(max(inside.max() - f1_scores(good, defect).max(), 0.0))


def roc(good: Floats, defect: Floats, thresholds: Floats) -> Curve:
    """Recall over false-positive rate."""
    return Curve(cumulative_share(good), cumulative_share(defect), thresholds)


def precision_recall(good: Floats, defect: Floats, thresholds: Floats) -> Curve:
    """Precision over recall; starts at (0, 1), where nothing is flagged."""
    return Curve(cumulative_share(defect), precision(good, defect), thresholds)
