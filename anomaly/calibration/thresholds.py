"""Thresholds from the scores of good images, and of defects where costs are given.

The scores must come from images that the scoring model hasn't learned from. If they and the parts
still to come are alike (exchangeable), the rate of false rejects above the k-th highest of n
scores follows Beta(k, n − k + 1) whatever the scores' distribution: its mean is k / (n + 1), and
its quantiles are the bounds given here (Wilks 1941; Vovk 2012, "Conditional validity of inductive
conformal predictors", proposition 2). Ties only lower the true rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration.rates import (
    Floats,
    Rate,
    binomial,
    images_needed,
    percent,
    placed,
    rate_anywhere,
    rate_of,
    sorted_scores,
)

_SLACK = 1e-9  # of rates, for rounding
# Parts of the scores that are left out one after the other, to judge a choice by cost by what it
# hasn't seen.
_FOLDS = 100


@dataclass(frozen=True)
class Threshold:
    """A threshold and what it will do to good parts.

    Attributes:
        value: a score above it is flagged.
        false_rejects: the good calibration images above it, and the rate to expect of new good
            parts.
        confidence: of the bounds.
        target: the rate asked for; None for a threshold that was set by hand or by cost.
        kept: how the target is kept: by the `bound`, at the confidence, or in the `mean`.
    """

    value: float
    false_rejects: Rate
    confidence: float
    target: float | None = None
    kept: Literal["bound", "mean"] = "bound"

    @property
    def supported(self) -> bool:
        """Whether there are images enough for the target to be kept. True without a target."""
        rate = self.false_rejects
        promised = rate.at_most if self.kept == "bound" else rate.expected
        # The slack is for a target that is just what the images support, but for rounding.
        return self.target is None or promised <= self.target * (1 + _SLACK)

    def raised(self, value: float, scores: ArrayLike) -> Threshold:
        """A threshold like this one at a higher value; its bounds stay, and are kept all the more.

        Args:
            value: one that isn't higher changes nothing.
            scores: those that this one was found with.
        """
        if value <= self.value:
            return self
        good = sorted_scores(scores, "a threshold")
        above = int((good > value).sum())
        expected = (above + 1) / (len(good) + 1)
        rate = replace(self.false_rejects, count=above, expected=expected, low=0.0)
        return replace(self, value=value, false_rejects=rate)

    @property
    def statement(self) -> str:
        """What to expect, as a sentence for people."""
        rate = self.false_rejects
        chosen = ", wherever the threshold was put" if self.target is None else ""
        statement = (
            f"flags about {percent(rate.expected)} of good parts, at most "
            f"{percent(rate.at_most)} ({percent(self.confidence)} confidence, "
            f"{rate.images} good images{chosen})"
        )
        if self.target is None or self.supported:
            return statement
        if self.kept == "bound":
            needed = images_needed(self.target, self.confidence)
            return f"{statement}; a target of {percent(self.target)} needs {needed} good images"
        needed = math.ceil(1 / self.target * (1 - _SLACK)) - 1
        return f"{statement}; {percent(self.target)} in the mean needs {needed} good images"


@dataclass(frozen=True)
class Calibration:
    """Two thresholds: good up to `review`, rejected above `reject`, for a person in between.

    Raises:
        ValueError: the review threshold lies above the reject threshold.
    """

    review: Threshold
    reject: Threshold

    def __post_init__(self) -> None:
        if self.review.value > self.reject.value:
            raise ValueError(
                f"the review threshold {self.review.value:g} lies above the reject threshold "
                f"{self.reject.value:g}"
            )

    def verdict(self, score: float) -> str:
        """`good`, `review` or `reject`."""
        return verdict(score, self.review.value, self.reject.value)


def verdict(score: float, review: float, reject: float) -> str:
    """`good` up to and including `review`, `review` up to and including `reject`, else `reject`.

    A score that isn't a number is rejected: what wasn't measured must not pass.
    """
    if score <= review:
        return "good"
    return "review" if score <= reject else "reject"


def threshold_for_false_reject_rate(
    scores: ArrayLike, target: float, confidence: float = 0.95
) -> Threshold:
    """The lowest threshold that rejects at most `target` of good parts, with `confidence`.

    It lies in a gap above the order statistic that the promise stands on, see `placed`: as far as
    the promise goes, higher is only safer. Where there are too few images to vouch for the target
    it lies just above their highest score, the most careful place that needs no guess about scores
    nobody has seen; `supported` is False and the bounds say what it is good for.

    Args:
        scores: (n,) finite scores of good images, higher is more anomalous.
        target: in (0, 1).
        confidence: in (0, 1).

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite, or target or confidence are out of range.
    """
    good = _checked(scores, target, confidence)
    # At most c of n above: the bound is within the target where a rate of `target` would show as
    # few as c only by a chance of 1 − confidence.
    chances = np.cumsum(binomial(len(good), target))[:-1]
    fitting = int(np.searchsorted(chances, 1 - confidence, side="right"))
    return _above(good, fitting - 1, confidence, target, "bound")


def threshold_for_expected_rate(
    scores: ArrayLike, target: float, confidence: float = 0.95
) -> Threshold:
    """The lowest threshold above which no more than `target` of good parts are to be expected.

    In the mean over sets of so many images, not with a promise for this one; the bounds say how
    far it may be off. Otherwise as `threshold_for_false_reject_rate`.

    Args:
        scores: (n,) finite scores of good images, higher is more anomalous.
        target: in (0, 1).
        confidence: of the bounds, in (0, 1).

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite, or target or confidence are out of range.
    """
    good = _checked(scores, target, confidence)
    fitting = math.floor(target * (len(good) + 1) * (1 + _SLACK))
    return _above(good, fitting - 1, confidence, target, "mean")


def _checked(scores: ArrayLike, target: float, confidence: float) -> Floats:
    for name, value in (("target", target), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {value}")
    return sorted_scores(scores, "a threshold")


def _above(
    good: Floats, above: int, confidence: float, target: float, kept: Literal["bound", "mean"]
) -> Threshold:
    """The threshold in a gap above all but the `above` highest of sorted scores."""
    value = placed(float(good[len(good) - 1 - max(above, 0)]), good)
    above = int((good > value).sum())
    rate = rate_of(above, len(good), (above + 1) / (len(good) + 1), confidence)
    return Threshold(value, rate, confidence, target, kept)


def threshold_at(value: float, scores: ArrayLike) -> Threshold:
    """What a threshold does to good parts, wherever it came from, also from these very scores.

    Args:
        value: a score above it is flagged.
        scores: (n,) finite scores of good images.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite, or the value isn't a number.
    """
    if math.isnan(value):
        raise ValueError("a threshold must be a number, not NaN")
    good = sorted_scores(scores, "a threshold")
    above = int((good > value).sum())
    rate = rate_anywhere(above, len(good), (above + 1) / (len(good) + 1))
    return Threshold(value, rate, confidence=0.95)


def calibrate(
    scores: ArrayLike, *, review_rate: float, reject_rate: float, confidence: float = 0.95
) -> Calibration:
    """Both thresholds from the scores of good images.

    Args:
        scores: (n,) finite.
        review_rate: the share of good parts that may be called anything but good, in the mean.
            A look at a good part costs little: to promise more would leave small sets without any
            review, just where doubt is greatest.
        reject_rate: the share that may be rejected; at most `review_rate`.
        confidence: that the reject rate is kept.

    Raises:
        DataError: no scores.
        ValueError: rates out of range or in the wrong order, or a score isn't finite.
    """
    if reject_rate > review_rate:
        raise ValueError(
            f"more good parts can't be rejected ({reject_rate}) than reviewed ({review_rate})"
        )
    return Calibration(
        review=threshold_for_expected_rate(scores, review_rate, confidence),
        reject=threshold_for_false_reject_rate(scores, reject_rate, confidence),
    )


@dataclass(frozen=True)
class Costs:
    """What verdicts cost, in any one currency.

    Attributes:
        false_reject: of rejecting a good part, at least 0.
        escape: of calling a defective part good, at least 0.
        review: of a person's look at a part, good or defective, at least 0.
        defect_share: p, the share of defective parts on the line, in [0, 1].

    Raises:
        ValueError: a price is negative, or the share is out of range.
    """

    false_reject: float
    escape: float
    review: float
    defect_share: float

    def __post_init__(self) -> None:
        if min(self.false_reject, self.escape, self.review) < 0 or not 0 <= self.defect_share <= 1:
            raise ValueError("prices must be at least 0 and the defect share from 0 to 1")

    @property
    def weights(self) -> tuple[float, float, float, float]:
        """What each share that `of_a_part` takes adds to its cost: W in cost = p · escape + W · s.

        The first and third hang on the review threshold alone, the others on the reject threshold.
        """
        p = self.defect_share
        of_good = (1 - p) * self.review, (1 - p) * (self.false_reject - self.review)
        return (*of_good, p * (self.review - self.escape), -p * self.review)

    def of_a_part(
        self,
        good_flagged: ArrayLike,
        good_rejected: ArrayLike,
        caught: ArrayLike,
        rejected: ArrayLike,
    ) -> Floats:
        """Expected cost of a part.

        (1 − p) · (false_reject · F + review · R) + p · (escape · E + review · S), where F of the
        good parts are rejected and R are for review, E of the defective ones are called good and S
        are for review.

        Args:
            good_flagged: the share of good parts that aren't called good, F + R.
            good_rejected: of them the rejected ones, F.
            caught: the share of defective parts that aren't called good, 1 − E.
            rejected: of them the rejected ones, 1 − E − S.
        """
        shares = good_flagged, good_rejected, caught, rejected
        total = sum(w * np.asarray(s) for w, s in zip(self.weights, shares, strict=True))
        # The terms cancel where nothing costs anything: rounding must not make that a gain.
        return np.asarray(np.maximum(self.defect_share * self.escape + total, 0.0))


@dataclass(frozen=True)
class Choice:
    """Two thresholds chosen by cost.

    What to expect of new parts is estimated on scores that were not used for the choice: each
    hundredth is judged by the thresholds that the others choose. The bounds hold at any threshold.

    Attributes:
        review: what the review threshold does to good parts.
        reject: what the reject threshold does to them.
        caught: the share of defective parts above the review threshold.
        rejected: of them above the reject threshold.
        cost: expected cost of a part, in the currency of the prices.
        low: lower end of its interval, with 95 % confidence.
        high: upper end.
    """

    review: Threshold
    reject: Threshold
    caught: Rate
    rejected: Rate
    cost: float
    low: float
    high: float


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
    caught = int((defects > threshold).sum())
    return (rate_anywhere if chosen else rate_of)(caught, len(defects), caught / len(defects))


def cheapest_thresholds(good_scores: ArrayLike, defect_scores: ArrayLike, costs: Costs) -> Choice:
    """The review and the reject threshold with the lowest expected cost of a part.

    A dearer escape raises neither of them: it weighs on the review threshold alone, unless both are
    one. Of equal costs the lowest thresholds win. Both lie in a gap between the scores of all
    images, see `placed`: review begins at its lower end, where good parts end, and rejection in its
    middle.

    Args:
        good_scores: (n,) finite scores of good images the model hasn't learned from.
        defect_scores: (m,) finite scores of defective images. They mustn't be those the choice
            is judged by afterwards.
        costs: of verdicts.

    Raises:
        DataError: no good or no defect scores.
        ValueError: a score isn't finite.
    """
    good = sorted_scores(good_scores, "a threshold")
    defects = sorted_scores(defect_scores, "recall")
    both = _cheapest(good, defects, costs)
    flagged = [threshold_at(value, good) for value in both]
    found = [recall_at(value, defects, chosen=True) for value in both]
    counts = _left_out(good, defects, costs)
    # None flagged still says no less than that the next image would be the first.
    of_good = [max(count, 1) / (len(good) + 1) for count in counts[0]]
    of_defects = [count / len(defects) for count in counts[1]]
    cost = float(costs.of_a_part(*of_good, *of_defects))
    rates = [t.false_rejects for t in flagged] + found
    weighed = list(zip(costs.weights, rates, strict=True))
    # Each share at the end of its interval that is worse: of good and of defective images both
    # fail together once in 40 times at most.
    ends = [
        float(costs.of_a_part(*((r.high if (w > 0) == worst else r.low) for w, r in weighed)))
        for worst in (False, True)
    ]
    review, reject = (
        replace(t, false_rejects=replace(t.false_rejects, expected=share))
        for t, share in zip(flagged, of_good, strict=True)
    )
    caught, rejected = (
        replace(r, expected=share) for r, share in zip(found, of_defects, strict=True)
    )
    low, high = max(0.0, min(ends[0], cost)), max(ends[1], cost)
    return Choice(review, reject, caught, rejected, cost, low, high)


def _cheapest(good: Floats, defects: Floats, costs: Costs) -> tuple[float, float]:
    """The review and the reject threshold that cost least on these scores."""
    scores = np.union1d(good, defects)
    candidates = np.append(-np.inf, scores)
    flagged = (len(good) - np.searchsorted(good, candidates, side="right") + 1) / (len(good) + 1)
    found = 1 - np.searchsorted(defects, candidates, side="right") / len(defects)
    of_good, of_rejected_good, of_caught, of_rejected = costs.weights
    review = of_good * flagged + of_caught * found  # what hangs on the review threshold
    reject = of_rejected_good * flagged + of_rejected * found
    # Rejection costs what it does and the cheapest review threshold that isn't above.
    at = int(np.argmin(np.minimum.accumulate(review) + reject))
    lower = int(np.argmin(review[: at + 1]))
    highest = placed(float(candidates[at]), scores, room=np.inf)
    return min(placed(float(candidates[lower]), scores), highest), highest


def _left_out(good: Floats, defects: Floats, costs: Costs) -> tuple[list[int], list[int]]:
    """Good and defective images above both thresholds that are chosen without them.

    Of a class with one image nothing can be left out; that one is judged by the whole choice.
    """
    flagged, found = [0, 0], [0, 0]
    folds = min(_FOLDS, max(len(good), len(defects)))
    for fold in range(folds):
        out = [np.arange(len(s)) % folds == fold for s in (good, defects)]
        kept = [s[~o] if len(s) > 1 else s for s, o in zip((good, defects), out, strict=True)]
        for i, value in enumerate(_cheapest(kept[0], kept[1], costs)):
            flagged[i] += int((good[out[0]] > value).sum())
            found[i] += int((defects[out[1]] > value).sum())
    return flagged, found
