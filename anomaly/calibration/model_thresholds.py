"""The thresholds of a model: what they are, where they came from, and the scores behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from anomaly.calibration.costs import cheapest_threshold
from anomaly.calibration.rates import Floats, Rate, percent, supported_rate
from anomaly.calibration.scale import ScoreScale
from anomaly.calibration.thresholds import (
    Calibration,
    Threshold,
    calibrate,
    threshold_at,
    threshold_for_false_reject_rate,
)


@dataclass(frozen=True)
class GoodScores:
    """What good images score under a model that hasn't learned from them.

    Attributes:
        names: of the n images.
        image: their image scores.
        peak: the highest value of each one's anomaly map.
        source: how they were had, for people.
        groups: from how many groups (lots, or parts seen more than once) the images come; None
            where none are known.
    """

    names: tuple[str, ...]
    image: tuple[float, ...]
    peak: tuple[float, ...]
    source: str
    groups: int | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GoodScores:
        """The way back from `dataclasses.asdict`, whose tuples JSON knows as lists."""
        names, image, peak = (tuple(values[key]) for key in ("names", "image", "peak"))
        return cls(names, image, peak, values["source"], values["groups"])

    @property
    def caution(self) -> str | None:
        """Why the bounds may promise too much; None where nothing is known against them."""
        if self.groups is None:
            return None
        held = "one group" if self.groups == 1 else f"{self.groups} groups"
        least = supported_rate(self.groups)
        return (
            f"the images come from {held}: as far as those of a group are alike, the bounds "
            f"promise too much, and {held} can vouch for no less than {percent(least)}"
        )


@dataclass(frozen=True)
class Thresholds:
    """Where good ends.

    Attributes:
        calibration: the review and the reject threshold, and what each does to good parts.
        pixel: an anomaly-map value above this is marked.
        label: how the thresholds were found: `calibrated`, `by cost` or `by hand`.
        good: the scores of good images behind them.
    """

    calibration: Calibration
    pixel: float
    label: str
    good: GoodScores

    @property
    def image(self) -> float:
        """An image score above this is rejected."""
        return self.calibration.reject.value

    @property
    def review(self) -> float:
        """An image score above this, up to `image`, is for a person to decide."""
        return self.calibration.review.value

    @cached_property
    def review_pixel(self) -> float:
        """An anomaly-map value above this, up to `pixel`, is what an image is for review for."""
        return min(_pixels_at(self.review, self.good), self.pixel)

    @property
    def images(self) -> int:
        """How many good images stand behind the thresholds."""
        return len(self.good.image)

    def verdict(self, score: float) -> str:
        """`good`, `review` or `reject`."""
        return self.calibration.verdict(score)

    def calibrated(self, score: float) -> float:
        """How rare a score is among good parts, in powers of ten; see `ScoreScale`."""
        return float(self._scale(score))

    def lines(self) -> list[str]:
        """What the thresholds are and how far to trust them, for people."""
        both = self.calibration
        lines = [f"thresholds {self.label} on {self.good.source}"]
        if self.review == self.image:
            lines.append(
                f"reject above {self.image:.5g}, nothing to review: {both.reject.statement}"
            )
        else:
            lines.append(f"review above {self.review:.5g}: {both.review.statement}")
            lines.append(f"reject above {self.image:.5g}: {both.reject.statement}")
        return lines if self.good.caution is None else [*lines, self.good.caution]

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the scores."""
        return {
            "label": self.label,
            "source": self.good.source,
            "review": _threshold_json(self.calibration.review),
            "reject": _threshold_json(self.calibration.reject),
            "pixel": self.pixel,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], good: GoodScores) -> Thresholds:
        """The way back from `to_json`."""
        calibration = Calibration(_threshold(values["review"]), _threshold(values["reject"]))
        return cls(calibration, values["pixel"], values["label"], good)

    @cached_property
    def _scale(self) -> ScoreScale:
        return ScoreScale(self.good.image)


def thresholds_from(good: GoodScores, review_rate: float, reject_rate: float) -> Thresholds:
    """Both thresholds at false-reject rates, and the pixel threshold that goes with them."""
    calibration = calibrate(good.image, review_rate=review_rate, reject_rate=reject_rate)
    return _with_pixels(calibration, "calibrated", good)


def thresholds_by_hand(good: GoodScores, review: float, reject: float) -> Thresholds:
    """Thresholds that somebody has chosen, with what they do to good parts.

    Raises:
        ValueError: the review threshold lies above the reject threshold.
    """
    calibration = Calibration(threshold_at(review, good.image), threshold_at(reject, good.image))
    return _with_pixels(calibration, "by hand", good)


def thresholds_by_cost(
    good: GoodScores,
    defect_scores: Sequence[float],
    *,
    review_rate: float,
    false_reject_cost: float,
    escape_cost: float,
    defect_share: float,
) -> tuple[Thresholds, float]:
    """The reject threshold that costs least, and review from where good parts get rare.

    Args:
        good: scores of good images.
        defect_scores: image scores of defects; see `cheapest_threshold`, also for the costs.
        review_rate: the share of good parts that may not be called good.
        false_reject_cost: of rejecting a good part.
        escape_cost: of passing a defective one.
        defect_share: of the parts on the line.

    Returns:
        The thresholds, and the expected cost of a part.
    """
    choice = cheapest_threshold(
        good.image,
        defect_scores,
        false_reject_cost=false_reject_cost,
        escape_cost=escape_cost,
        defect_share=defect_share,
    )
    review = threshold_for_false_reject_rate(good.image, review_rate)
    if review.value > choice.threshold.value:
        review = choice.threshold
    return _with_pixels(Calibration(review, choice.threshold), "by cost", good), choice.cost


def _with_pixels(calibration: Calibration, label: str, good: GoodScores) -> Thresholds:
    """Thresholds of images with the pixel threshold that is as rare among good images.

    The k-th highest image score becomes the k-th highest peak of a map; in between it is linear,
    and beyond both ends proportional. Where the image score is the map's peak, both are equal.
    """
    return Thresholds(calibration, _pixels_at(calibration.reject.value, good), label, good)


def _pixels_at(value: float, good: GoodScores) -> float:
    """The anomaly map's value that is as rare among good images as an image score."""
    return _matched(value, np.sort(np.array(good.image)), np.sort(np.array(good.peak)))


def _matched(value: float, scores: Floats, peaks: Floats) -> float:
    for end in (0, -1):
        outside = value < scores[0] if end == 0 else value > scores[-1]
        if outside and scores[end] > 0:
            return float(peaks[end] * (value / scores[end]))
    return float(np.interp(value, scores, peaks))


def _threshold_json(threshold: Threshold) -> dict[str, Any]:
    return {**asdict(threshold), "statement": threshold.statement}


def _threshold(values: dict[str, Any]) -> Threshold:
    rate = Rate(**values["false_rejects"])
    return Threshold(values["value"], rate, values["confidence"], values["target"])
