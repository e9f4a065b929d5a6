"""Thresholds with defects at hand: what they find, and which costs least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration.placement import placed
from anomaly.calibration.rates import Rate, rate_of, sorted_scores
from anomaly.calibration.thresholds import Threshold, threshold_at


@dataclass(frozen=True)
class Choice:
    """A threshold chosen by cost.

    Attributes:
        threshold: what it does to good parts.
        recall: what it does to defective ones.
        cost: expected cost of a part, in the unit of the costs given.
    """

    threshold: Threshold
    recall: Rate
    cost: float


def recall_at(threshold: float, defect_scores: ArrayLike, confidence: float = 0.95) -> Rate:
    """The share of defective images above a threshold.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite.
    """
    defects = sorted_scores(defect_scores, "recall")
    found = int((defects > threshold).sum())
    return rate_of(found, len(defects), found / len(defects), confidence)


def cheapest_threshold(
    good_scores: ArrayLike,
    defect_scores: ArrayLike,
    *,
    false_reject_cost: float,
    escape_cost: float,
    defect_share: float,
    confidence: float = 0.95,
) -> Choice:
    """The threshold with the lowest expected cost of a part.

    Cost is (1 − p) · false_reject_cost · rate of false rejects + p · escape_cost · (1 − recall).
    Of equal costs the lowest threshold wins, which lets fewer defects escape. It lies in
    the middle of a gap between the scores of all images, see `placed`.

    Args:
        good_scores: (n,) finite scores of good images the model hasn't learned from.
        defect_scores: (m,) finite scores of defective images. They mustn't be those the choice
            is judged by afterwards.
        false_reject_cost: of rejecting a good part, at least 0.
        escape_cost: of passing a defective one, at least 0.
        defect_share: p, the share of defective parts on the line, in [0, 1].
        confidence: of the bounds.

    Raises:
        DataError: no good or no defect scores.
        ValueError: a score isn't finite, a cost is negative, or the share is out of range.
    """
    if min(false_reject_cost, escape_cost) < 0 or not 0 <= defect_share <= 1:
        raise ValueError("costs must be at least 0 and the defect share from 0 to 1")
    good, defects = (
        sorted_scores(good_scores, "a threshold"),
        sorted_scores(defect_scores, "recall"),
    )
    scores = np.union1d(good, defects)
    candidates = np.append(-np.inf, scores)
    rejects = len(good) - np.searchsorted(good, candidates, side="right")
    escapes = np.searchsorted(defects, candidates, side="right")
    costs = (1 - defect_share) * false_reject_cost * (rejects + 1) / (len(good) + 1)
    costs = costs + defect_share * escape_cost * escapes / len(defects)
    value = placed(float(candidates[int(np.argmin(costs))]), scores, room=np.inf)
    threshold, recall = threshold_at(value, good, confidence), recall_at(value, defects, confidence)
    cost = (1 - defect_share) * false_reject_cost * threshold.false_rejects.expected
    cost += defect_share * escape_cost * (1 - recall.expected)
    return Choice(threshold, recall, cost)
