"""The thresholds of a model: what they are, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from anomaly.calibration.rates import ScoreScale, independent, rate_showing
from anomaly.calibration.scores import GoodScores
from anomaly.calibration.thresholds import (
    Calibration,
    Threshold,
    calibrate,
    threshold_at,
    threshold_for_false_reject_rate,
)

# Good images that are looked at one by one, and by how much leaving one out must lower the reject
# threshold for it to be worth a word.
_HIGHEST = 5
_WORTH_A_WORD = 0.1
_CONFIDENCE = 0.95
_ASSUMES = "valid only for images like these: same lot, lamp and camera"


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of an image and its pixels, with the scores behind them.

    Attributes:
        calibration: the review and the reject threshold, and what each does to good parts.
        pixel: an anomaly-map value above this is marked.
        label: how the thresholds were found: `calibrated` or `by hand`.
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
        """Map values above this, up to `pixel`, mark places for review."""
        return min(_pixels_at(self.review, self.good), self.pixel)

    @property
    def images(self) -> int:
        """Number of good images behind the thresholds."""
        return len(self.good.image)

    def verdict(self, score: float) -> str:
        """`good`, `review` or `reject`."""
        return self.calibration.verdict(score)

    def calibrated(self, score: float) -> float:
        """How rare a score is among good parts, in powers of ten; see `ScoreScale`."""
        return float(self._scale(score))

    def lines(self) -> list[str]:
        """Lines for people: the thresholds and their rates."""
        both = self.calibration
        lines = [f"thresholds {self.label} on {self.good.source}"]
        if self.review == self.image:
            lines.append(
                f"reject threshold {self.image:.5g}, no review zone: {both.reject.statement}"
            )
        else:
            lines.append(f"review threshold {self.review:.5g}: {both.review.statement}")
            lines.append(f"reject threshold {self.image:.5g}: {both.reject.statement}")
        return [*lines, *self.good.cautions, _ASSUMES]

    def raised_by(self) -> list[tuple[str, float, float]]:
        """The good images that raise the reject threshold, the highest first.

        Returns:
            (name, score, the threshold without this image and those listed before it). Up to the
            last image without which it would be lower by a tenth or more; empty where there is
            none, and for thresholds that weren't calibrated.
        """
        target = self.calibration.reject.target
        order = np.argsort(-np.array(self.good.image), kind="stable")[:_HIGHEST].tolist()
        if target is None or self.images <= len(order):
            return []
        highest: list[tuple[str, float, float]] = []
        listed, before = 0, self.image
        for count, i in enumerate(order, 1):
            rest = np.delete(np.array(self.good.image), order[:count])
            value = threshold_for_false_reject_rate(rest, target, groups=self.good.groups).value
            highest.append((self.good.names[i], self.good.image[i], value))
            if value <= before - _WORTH_A_WORD * abs(before):
                listed = count
            before = value
        return highest[:listed]

    def raised_lines(self) -> list[str]:
        """Lines for people: the images of `raised_by`."""
        return [
            f"{name} scores {score:.5g}; without it{f' and the {i} above' if i else ''} the reject "
            f"threshold would be {value:.5g} instead of {self.image:.5g}"
            for i, (name, score, value) in enumerate(self.raised_by())
        ]

    @property
    def decisive(self) -> tuple[str, float]:
        """The good image that sets the reject threshold (the next score below it), and its score.

        The lowest of all where none is below.
        """
        rows = sorted(zip(self.good.image, self.good.names, strict=True))
        score, name = next((row for row in reversed(rows) if row[0] <= self.image), rows[0])
        return name, score

    @cached_property
    def reject_up_to(self) -> float:
        """Upper end of the reject threshold's 95 % interval.

        The share of good parts above the threshold is Beta distributed; the end is the score that
        is as rare as that share may be low. Beyond the highest score that is read off the tail of
        `ScoreScale`.
        """
        above = sum(score > self.image for score in self.good.image)
        if above == self.images:
            return self.image
        units = independent(self.images, self.good.groups)
        share = rate_showing(above * units // self.images + 1, units, (1 - _CONFIDENCE) / 2)
        return max(self.image, self._scale.score_of(share))

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the scores."""
        return {
            "label": self.label,
            "source": self.good.source,
            "assumes": _ASSUMES,
            "review": _threshold_json(self.calibration.review),
            "reject": _threshold_json(self.calibration.reject),
            "pixel": self.pixel,
        }

    @cached_property
    def _scale(self) -> ScoreScale:
        return ScoreScale(self.good.image)


def thresholds_from(
    good: GoodScores, review_rate: float, reject_rate: float, newest: Sequence[float] = ()
) -> Thresholds:
    """Review, reject and pixel thresholds for given false-reject rates.

    Args:
        good: scores of good images.
        review_rate: the share that may not be called good, in the mean.
        reject_rate: the share that may be rejected.
        newest: those of the scores that parts to come may be like: the reject threshold is to keep
            its rate among these alone, too, and gives way upwards.
    """
    calibration = calibrate(
        good.image, review_rate=review_rate, reject_rate=reject_rate, groups=good.groups
    )
    if len(newest):
        least = threshold_for_false_reject_rate(newest, reject_rate).value
        calibration = replace(calibration, reject=calibration.reject.raised(least, good.image))
    return with_pixels(calibration, "calibrated", good)


def thresholds_by_hand(good: GoodScores, review: float, reject: float) -> Thresholds:
    """Thresholds set by hand, with their false-reject rates.

    Raises:
        ValueError: the review threshold lies above the reject threshold.
    """
    both = (threshold_at(value, good.image, good.groups) for value in (review, reject))
    calibration = Calibration(*both)
    return with_pixels(calibration, "by hand", good)


def with_pixels(calibration: Calibration, label: str, good: GoodScores) -> Thresholds:
    """Thresholds of images with the pixel threshold that is as rare among good images.

    The k-th highest image score becomes the k-th highest peak of a map; in between it is linear,
    and beyond both ends proportional. Where the image score is the map's peak, both are equal.
    """
    return Thresholds(calibration, _pixels_at(calibration.reject.value, good), label, good)


def _pixels_at(value: float, good: GoodScores) -> float:
    """The anomaly map's value that is as rare among good images as an image score."""
    scores, peaks = np.sort(np.array(good.image)), np.sort(np.array(good.peak))
    for end in (0, -1):
        outside = value < scores[0] if end == 0 else value > scores[-1]
        if outside and scores[end] > 0:
            return float(peaks[end] * (value / scores[end]))
    return float(np.interp(value, scores, peaks))


def _threshold_json(threshold: Threshold) -> dict[str, Any]:
    return {**asdict(threshold), "statement": threshold.statement}
