"""Thresholds from the scores of good images.

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
    CONFIDENCE,
    Floats,
    Rate,
    binomial,
    images_needed,
    independent,
    percent,
    placed,
    rate_anywhere,
    rate_of,
    sorted_scores,
)

_SLACK = 1e-9  # of rates, for rounding


@dataclass(frozen=True)
class Threshold:
    """A threshold and its false-reject rate.

    Attributes:
        value: a score above it is flagged.
        false_rejects: the good calibration images above it, and the rate to expect of new good
            parts.
        target: the rate asked for; None for a threshold that was set by hand.
        kept: how the target is kept: by the `bound`, with 95 % confidence, or in the `mean`.
    """

    value: float
    false_rejects: Rate
    target: float | None = None
    kept: Literal["bound", "mean"] = "bound"

    @property
    def supported(self) -> bool:
        """Whether the images suffice for the target; True without a target."""
        rate = self.false_rejects
        promised = rate.at_most if self.kept == "bound" else rate.expected
        # The slack is for a target that is just what the images support, but for rounding.
        return self.target is None or promised <= self.target * (1 + _SLACK)

    def raised(self, value: float, scores: ArrayLike) -> Threshold:
        """A copy at a higher value with the same bounds, which still hold.

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
        """The expected false-reject rate, as a sentence for people."""
        rate = self.false_rejects
        chosen = ", wherever the threshold is set" if self.target is None else ""
        statement = (
            f"flags about {percent(rate.expected)} of good parts, at most "
            f"{percent(rate.at_most)} (95 % confidence, "
            f"{rate.images} good images{chosen})"
        )
        if self.target is None or self.supported:
            return statement
        if self.kept == "bound":
            needed = images_needed(self.target)
            return f"{statement}; a target of {percent(self.target)} needs {needed} good images"
        needed = math.ceil(1 / self.target * (1 - _SLACK)) - 1
        return f"{statement}; {percent(self.target)} on average needs {needed} good images"


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
        """`good` up to and including `review`, `review` up to and including `reject`, or `reject`.

        A score that isn't a number is rejected: what wasn't measured must not pass.
        """
        if score <= self.review.value:
            return "good"
        return "review" if score <= self.reject.value else "reject"


def threshold_for_false_reject_rate(
    scores: ArrayLike, target: float, groups: int | None = None
) -> Threshold:
    """The lowest threshold that rejects at most `target` of good parts, with 95 % confidence.

    It lies in a gap above the order statistic that the promise stands on, see `placed`: as far as
    the promise goes, higher is only safer. Where there are too few images to vouch for the target
    it lies just above their highest score, the most careful place that needs no guess about scores
    nobody has seen; `supported` is False and the bounds say what it is good for.

    Args:
        scores: (n,) finite scores of good images, higher is more anomalous.
        target: in (0, 1).
        groups: number of groups that the images come from, see `rate_of`.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite, or the target is out of range.
    """
    good = _checked(scores, target)
    # At most c of n above: the bound is within the target where a rate of `target` would show as
    # few as c only by a chance of 1 − 95 %.
    units = independent(len(good), groups)
    chances = np.cumsum(binomial(units, target))[:-1]
    fitting = int(np.searchsorted(chances, 1 - CONFIDENCE, side="right"))
    above = (fitting - 1) * len(good) // units
    return _above(good, above, target, "bound", groups)


def threshold_for_expected_rate(
    scores: ArrayLike, target: float, groups: int | None = None
) -> Threshold:
    """The lowest threshold that flags at most `target` of good parts on average.

    In the mean over sets of so many images, not with a promise for this one; the bounds say how
    far it may be off. Otherwise as `threshold_for_false_reject_rate`.

    Args:
        scores: (n,) finite scores of good images, higher is more anomalous.
        target: in (0, 1).
        groups: number of groups that the images come from, for the bounds.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite, or the target is out of range.
    """
    good = _checked(scores, target)
    fitting = math.floor(target * (len(good) + 1) * (1 + _SLACK))
    return _above(good, fitting - 1, target, "mean", groups)


def _checked(scores: ArrayLike, target: float) -> Floats:
    if not 0 < target < 1:
        raise ValueError(f"target must lie between 0 and 1, not {target}")
    return sorted_scores(scores, "a threshold")


def _above(
    good: Floats, above: int, target: float, kept: Literal["bound", "mean"], groups: int | None
) -> Threshold:
    """The threshold in a gap above all but the `above` highest of sorted scores."""
    value = placed(float(good[len(good) - 1 - max(above, 0)]), good)
    above = int((good > value).sum())
    rate = rate_of(above, len(good), (above + 1) / (len(good) + 1), groups=groups)
    return Threshold(value, rate, target, kept)


def threshold_at(value: float, scores: ArrayLike, groups: int | None = None) -> Threshold:
    """A threshold with its false-reject rate; valid even if chosen by these scores.

    Args:
        value: a score above it is flagged.
        scores: (n,) finite scores of good images.
        groups: number of groups that the images come from, for the bounds.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite, or the value isn't a number.
    """
    if math.isnan(value):
        raise ValueError("a threshold must be a number, not NaN")
    good = sorted_scores(scores, "a threshold")
    above = int((good > value).sum())
    rate = rate_anywhere(above, len(good), (above + 1) / (len(good) + 1), groups)
    return Threshold(value, rate)


def calibrate(
    scores: ArrayLike, *, review_rate: float, reject_rate: float, groups: int | None = None
) -> Calibration:
    """The review and the reject threshold from scores of good images.

    Args:
        scores: (n,) finite.
        review_rate: the share of good parts that may be called anything but good, in the mean.
            A look at a good part costs little: to promise more would leave small sets without any
            review, just where doubt is greatest.
        reject_rate: the share that may be rejected; at most `review_rate`.
        groups: number of groups that the images come from, see `rate_of`.

    Raises:
        DataError: no scores.
        ValueError: rates out of range or in the wrong order, or a score isn't finite.
    """
    if reject_rate > review_rate:
        raise ValueError(
            f"the reject rate ({reject_rate}) is above the review rate ({review_rate}); make it "
            "lower or equal"
        )
    return Calibration(
        review=threshold_for_expected_rate(scores, review_rate, groups),
        reject=threshold_for_false_reject_rate(scores, reject_rate, groups),
    )
