"""Thresholds with defects at hand: what they find, and which costs least."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration.rates import Floats, Rate, placed, rate_anywhere, rate_of, sorted_scores
from anomaly.calibration.thresholds import Threshold, threshold_at

# Parts of the scores that are left out one after the other, to judge a choice by what it hasn't
# seen.
_FOLDS = 100


@dataclass(frozen=True)
class Costs:
    """What mistakes cost, in any one unit.

    Attributes:
        false_reject: of rejecting a good part, at least 0.
        escape: of passing a defective one, at least 0.
        defect_share: p, the share of defective parts on the line, in [0, 1].

    Raises:
        ValueError: a cost is negative, or the share is out of range.
    """

    false_reject: float
    escape: float
    defect_share: float

    def __post_init__(self) -> None:
        if min(self.false_reject, self.escape) < 0 or not 0 <= self.defect_share <= 1:
            raise ValueError("costs must be at least 0 and the defect share from 0 to 1")

    def of_a_part(self, false_rejects: ArrayLike, escapes: ArrayLike) -> Floats:
        """Expected cost of a part, (1 − p) · false_reject · rate + p · escape · rate."""
        good, defective = np.asarray(false_rejects), np.asarray(escapes)
        p = self.defect_share
        return (1 - p) * self.false_reject * good + p * self.escape * defective


@dataclass(frozen=True)
class Choice:
    """A threshold chosen by cost.

    What to expect of new parts is estimated on scores that were not used for the choice: each
    hundredth is judged by the threshold that the others choose. The bounds hold at any threshold.

    Attributes:
        threshold: what it does to good parts.
        recall: what it does to defective ones.
        cost: expected cost of a part, in the unit of the costs given.
    """

    threshold: Threshold
    recall: Rate
    cost: float


def recall_at(threshold: float, defect_scores: ArrayLike, *, chosen: bool = False) -> Rate:
    """The share of defective images above a threshold, with 95 % bounds.

    Args:
        threshold: a score above it is flagged.
        defect_scores: (m,) finite.
        chosen: whether the threshold may have been chosen by these very scores.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite.
    """
    defects = sorted_scores(defect_scores, "recall")
    found = int((defects > threshold).sum())
    return (rate_anywhere if chosen else rate_of)(found, len(defects), found / len(defects))


def cheapest_threshold(good_scores: ArrayLike, defect_scores: ArrayLike, costs: Costs) -> Choice:
    """The threshold with the lowest expected cost of a part.

    Of equal costs the lowest threshold wins, which lets fewer defects escape. It lies in the
    middle of a gap between the scores of all images, see `placed`.

    Args:
        good_scores: (n,) finite scores of good images the model hasn't learned from.
        defect_scores: (m,) finite scores of defective images. They mustn't be those the choice
            is judged by afterwards.
        costs: of the mistakes.

    Raises:
        DataError: no good or no defect scores.
        ValueError: a score isn't finite.
    """
    good = sorted_scores(good_scores, "a threshold")
    defects = sorted_scores(defect_scores, "recall")
    value = _cheapest(good, defects, costs)
    rejected, found = _left_out(good, defects, costs)
    threshold, recall = threshold_at(value, good), recall_at(value, defects, chosen=True)
    # None rejected still says no less than that the next image would be the first.
    rejects = replace(threshold.false_rejects, expected=max(rejected, 1) / (len(good) + 1))
    recall = replace(recall, expected=found / len(defects))
    cost = float(costs.of_a_part(rejects.expected, 1 - recall.expected))
    return Choice(replace(threshold, false_rejects=rejects), recall, cost)


def _cheapest(good: Floats, defects: Floats, costs: Costs) -> float:
    scores = np.union1d(good, defects)
    candidates = np.append(-np.inf, scores)
    rejects = len(good) - np.searchsorted(good, candidates, side="right")
    escapes = np.searchsorted(defects, candidates, side="right")
    each = costs.of_a_part((rejects + 1) / (len(good) + 1), escapes / len(defects))
    return placed(float(candidates[int(np.argmin(each))]), scores, room=np.inf)


def _left_out(good: Floats, defects: Floats, costs: Costs) -> tuple[int, int]:
    """Good and defective images above the thresholds that are chosen without them.

    Of a class with one image nothing can be left out; that one is judged by the whole choice.
    """
    rejected = found = 0
    folds = min(_FOLDS, max(len(good), len(defects)))
    for fold in range(folds):
        out = [np.arange(len(s)) % folds == fold for s in (good, defects)]
        kept = [s[~o] if len(s) > 1 else s for s, o in zip((good, defects), out, strict=True)]
        value = _cheapest(kept[0], kept[1], costs)
        rejected += int((good[out[0]] > value).sum())
        found += int((defects[out[1]] > value).sum())
    return rejected, found
