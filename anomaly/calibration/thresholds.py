"""Thresholds from the scores of good images, and changes of thresholds.

The scores must come from images that the scoring model hasn't learned from. If these images and
later parts are alike (exchangeable), the false-reject rate above the k-th highest of n scores
follows Beta(k, n − k + 1) for any distribution of scores: its mean is k / (n + 1), and its
quantiles are the bounds given here (Wilks 1941; Vovk 2012, "Conditional validity of inductive
conformal predictors", proposition 2). Ties only lower the true rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration.rates import (
    CONFIDENCE,
    Floats,
    Rate,
    ScoreScale,
    binomial,
    images_needed,
    in_gap,
    independent_images,
    percent,
    rate_anywhere,
    rate_of,
    rate_showing,
    sorted_scores,
    supported_rate,
)
from anomaly.errors import DataError, some

_SLACK = 1e-9  # relative rounding error of a rate


@dataclass(frozen=True)
class Threshold:
    """A threshold and its false-reject rate.

    Attributes:
        value: a score above it is flagged.
        false_rejects: count of good calibration images above it, and the rate to expect of new
            good parts.
        target: the rate asked for; None for a threshold set by hand.
        kept: side of the promise: the `bound` keeps the target with 95 % confidence, the `mean`
            only on average.
    """

    value: float
    false_rejects: Rate
    target: float | None = None
    kept: Literal["bound", "mean"] = "bound"

    @property
    def supported(self) -> bool:
        """True if the promised rate keeps the target, or there is no target."""
        rate = self.false_rejects
        promised = rate.at_most if self.kept == "bound" else rate.expected
        # The slack lets a target pass that the images support exactly.
        return self.target is None or promised <= self.target * (1 + _SLACK)

    def raised(self, value: float, scores: ArrayLike) -> Threshold:
        """A copy at a higher value; itself if the value isn't higher.

        Count and estimate are those of the good scores (n,); the upper bounds stay and still hold.
        """
        if value <= self.value:
            return self
        good = sorted_scores(scores)
        above = int((good > value).sum())
        expected = (above + 1) / (len(good) + 1)
        rate = replace(self.false_rejects, count=above, expected=expected, low=0.0)
        return replace(self, value=value, false_rejects=rate)

    @property
    def statement(self) -> str:
        """The expected false-reject rate, its bound, and what an unsupported target needs."""
        rate = self.false_rejects
        statement = (
            f"flags about {percent(rate.expected)} of good parts, at most "
            f"{percent(rate.at_most)} (95 % confidence, {rate.images} good images)"
        )
        if self.target is None or self.supported:
            return statement
        if self.kept == "bound":
            lacking = images_needed(self.target) - rate.images
            if lacking <= 0:  # there are enough images, but in too few groups: a caution says so
                return statement
            return f"{statement}; to promise {percent(self.target)}, add {lacking} good images"
        needed = math.ceil(1 / self.target * (1 - _SLACK)) - 1
        return f"{statement}; {percent(self.target)} on average needs {needed} good images"


def threshold_for_false_reject_rate(
    scores: ArrayLike, target: float, groups: int | None = None
) -> Threshold:
    """The lowest threshold that rejects at most `target` of good parts, with 95 % confidence.

    It lies in a gap above the order statistic that the bound belongs to, see `in_gap`; a higher
    threshold keeps the bound, too. If there are too few images to guarantee the target, it lies
    just above their highest score, the strictest place that needs no guess about unseen scores;
    then `supported` is False, and the bounds give the rate that is guaranteed.

    Args:
        scores: (n,) finite scores of good images, higher is more anomalous.
        target: in (0, 1).
        groups: number of groups that the images come from, see `rate_of`.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite, or the target is out of range.
    """
    good = _checked(scores, target)
    # c images above keep the bound if a true rate of `target` would show c or fewer with a chance
    # of at most 5 %.
    units = independent_images(len(good), groups)
    chances = np.cumsum(binomial(units, target))[:-1]
    fitting = int(np.searchsorted(chances, 1 - CONFIDENCE, side="right"))
    above = (fitting - 1) * len(good) // units
    return _above(good, above, target, "bound", groups)


def threshold_for_expected_rate(
    scores: ArrayLike, target: float, groups: int | None = None
) -> Threshold:
    """The lowest threshold that flags at most `target` of good parts on average.

    The mean is over sets of as many images; this set's own rate isn't guaranteed, and the bounds
    say how far off it may be. It lies in a gap, takes the same arguments and raises the same errors
    as `threshold_for_false_reject_rate`, but groups count in the bounds only.
    """
    good = _checked(scores, target)
    fitting = math.floor(target * (len(good) + 1) * (1 + _SLACK))
    return _above(good, fitting - 1, target, "mean", groups)


def _checked(scores: ArrayLike, target: float) -> Floats:
    """The scores (n,) in rising order, after a check of the target."""
    if not 0 < target < 1:
        raise ValueError(f"target must lie between 0 and 1, not {target}")
    return sorted_scores(scores)


def _above(
    good: Floats, above: int, target: float, kept: Literal["bound", "mean"], groups: int | None
) -> Threshold:
    """The threshold in a gap below the `above` (at least 0) highest of sorted scores."""
    value = in_gap(float(good[len(good) - 1 - max(above, 0)]), good)
    flagged = int((good > value).sum())  # a gap higher up flags fewer
    rate = rate_of(flagged, len(good), (flagged + 1) / (len(good) + 1), groups=groups)
    return Threshold(value, rate, target, kept)


def threshold_at(value: float, scores: ArrayLike, groups: int | None = None) -> Threshold:
    """A threshold with its false-reject rate; the bounds hold even if these scores chose it.

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
    good = sorted_scores(scores)
    above = int((good > value).sum())
    rate = rate_anywhere(above, len(good), (above + 1) / (len(good) + 1), groups)
    return Threshold(value, rate)


_HIGHEST = 5  # good images that `raised_by` leaves out one after the other
_LEAST_DROP = 0.1  # share by which one has to lower the reject threshold to be reported
_ASSUMES = "valid only for images like these: same lot, lamp and camera"
# A reject threshold that rises by less than this factor is neither reported nor doubted: from few
# images, its interval depends on one or two gaps between scores.
_RISE = 1.1
_IF_GOOD = (
    "The rates hold for parts like the images that remain; if parts like those left out are good "
    "and occur again, more good parts will be flagged"
)


# Name, image score, peak and sha256 of an image.
Row: TypeAlias = tuple[str, float, float, str]


@dataclass(frozen=True)
class GoodScores:
    """Scores of n good images by models that haven't learned from them.

    Attributes:
        names: the images' names.
        image: the images' scores.
        peak: the highest value of each image's anomaly map.
        source: number and origin of the images, in words; begins with the number.
        groups: number of groups (lots, or parts seen more than once) that the images come from;
            None if unknown.
        left_out: names of images that a person has taken out.
        hashes: SHA-256 of each image, empty if unknown; no entries at all after training, because
            the model's manifest lists them by name.
        stood_out: number of images that training has left out as unlike all others.
    """

    names: tuple[str, ...] = field(repr=False)
    image: tuple[float, ...] = field(repr=False)
    peak: tuple[float, ...] = field(repr=False)
    source: str
    groups: int | None = None
    left_out: tuple[str, ...] = ()
    hashes: tuple[str, ...] = field(default=(), repr=False)
    stood_out: int = 0

    def rows(self) -> list[Row]:
        """A `Row` for each image; the SHA-256 is empty if unknown."""
        hashes = self.hashes or ("",) * len(self.names)
        return list(zip(self.names, self.image, self.peak, hashes, strict=True))

    def with_rows(self, rows: Sequence[Row]) -> GoodScores:
        """A copy with the images of some rows, at least one, in place of its own."""
        names, image, peak, hashes = zip(*rows, strict=True)
        return replace(
            self, names=names, image=image, peak=peak, hashes=hashes if any(hashes) else ()
        )

    def without(self, names: Sequence[str]) -> GoodScores:
        """A copy without the images of these names, which move to `left_out`.

        Raises:
            DataError: no image would remain.
        """
        places = {self.names.index(name) for name in names}
        if len(places) == len(self.names):
            raise DataError("all good images would be left out; a threshold needs some of them")
        kept = [row for i, row in enumerate(self.rows()) if i not in places]
        out = tuple(name for i, name in enumerate(self.names) if i in places)
        # The source begins with the number of images.
        source = re.sub(rf"^{len(self.names)}\b", str(len(kept)), self.source)
        return replace(self.with_rows(kept), left_out=(*self.left_out, *out), source=source)

    def joined(self, newer: GoodScores) -> GoodScores:
        """Scores of both sets of images together; `source` is left to the caller.

        An image in both counts once, with its newer score. If only one of the two knows its groups,
        all images of the other count as one group.
        """
        has_groups = self.groups is not None or newer.groups is not None
        replaced = {*newer.hashes} - {""}
        rows = [row for row in self.rows() if row[3] not in replaced]
        return replace(
            self.with_rows(rows + newer.rows()),
            groups=(self.groups or 1) + (newer.groups or 1) if has_groups else None,
            left_out=(*self.left_out, *newer.left_out),
            stood_out=self.stood_out + newer.stood_out,
        )

    @property
    def cautions(self) -> list[str]:
        """Limits of the bounds, a sentence each; empty without any."""
        cautions = [] if self.groups is None else [self._caution_of_groups(self.groups)]
        if self.stood_out:
            cautions.append(
                "left out because they look unlike all others (model.leave_out_suspects): "
                f"{self.stood_out}. {_IF_GOOD}"
            )
        if self.left_out:
            names = ", ".join(self.left_out)
            cautions.append(f"left out by hand: {len(self.left_out)} ({names}). {_IF_GOOD}")
        return cautions

    def _caution_of_groups(self, groups: int) -> str:
        """The limit that a number of groups sets to what thresholds can guarantee."""
        number = "one group" if groups == 1 else f"{groups} groups"
        if groups > 1 and self.left_out:  # a group may have lost all its images
            number = f"at most {number}"
        return (
            f"the images come from {number}. Images of one group may be alike, so the bounds count "
            f"groups; so few can't guarantee a false-reject rate below "
            f"{percent(supported_rate(groups))}"
        )


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the image score and of pixels, with the good scores behind them.

    Attributes:
        to_review: threshold above which an image isn't called good.
        to_reject: threshold above which an image is rejected; at least as high as `to_review`.
        label: origin of the thresholds: `calibrated` or `by hand`.
        good: the scores of good images that rates and bounds are computed from.

    Raises:
        ValueError: the review threshold lies above the reject threshold.
    """

    to_review: Threshold
    to_reject: Threshold
    label: str
    good: GoodScores

    def __post_init__(self) -> None:
        if self.review > self.image:
            raise ValueError(
                f"the review threshold {self.review:g} lies above the reject threshold "
                f"{self.image:g}"
            )

    @property
    def image(self) -> float:
        """An image score above this is rejected."""
        return self.to_reject.value

    @property
    def review(self) -> float:
        """An image score above this, up to `image`, is for review by a person."""
        return self.to_review.value

    @cached_property
    def pixel(self) -> float:
        """Map values above this are marked: as rare among good images as the reject threshold."""
        return _pixels_at(self.image, self.good)

    @cached_property
    def review_pixel(self) -> float:
        """Map values above this, up to `pixel`, mark places for review."""
        return min(_pixels_at(self.review, self.good), self.pixel)

    @property
    def images(self) -> int:
        """Number of good images behind the thresholds."""
        return len(self.good.image)

    def verdict(self, score: float) -> str:
        """`good` for a score up to `review`, `review` for one up to `image`, else `reject`."""
        # NaN fails both comparisons and is rejected: an image that wasn't measured mustn't pass.
        if score <= self.review:
            return "good"
        return "review" if score <= self.image else "reject"

    def calibrated(self, score: float) -> float:
        """Rarity of a score among good parts, in powers of ten; see `ScoreScale`."""
        return float(self._scale(score))

    def lines(self) -> list[str]:
        """Lines of text with the thresholds, their rates and the limits of both."""
        lines = [f"thresholds {self.label} on {self.good.source}"]
        no_review = ", no review zone" if self.review == self.image else ""
        if not no_review:
            lines.append(f"review threshold {self.review:.5g}: {self.to_review.statement}")
        lines.append(f"reject threshold {self.image:.5g}{no_review}: {self.to_reject.statement}")
        return [*lines, *self.good.cautions, _ASSUMES]

    def raised_by(self) -> list[tuple[str, float, float]]:
        """The good images that raise the reject threshold, the highest first.

        Returns:
            (name, score, reject threshold without this image and those listed before it), up to
            the last of the five highest images that lowers it by a tenth or more. Empty if none
            does, for five images or fewer, and for thresholds set by hand.
        """
        target = self.to_reject.target
        order = np.argsort(-np.array(self.good.image), kind="stable")[:_HIGHEST].tolist()
        if target is None or self.images <= len(order):
            return []
        highest: list[tuple[str, float, float]] = []
        listed, before = 0, self.image
        for count, i in enumerate(order, 1):
            rest = np.delete(np.array(self.good.image), order[:count])
            value = threshold_for_false_reject_rate(rest, target, groups=self.good.groups).value
            highest.append((self.good.names[i], self.good.image[i], value))
            if value <= before - _LEAST_DROP * abs(before):
                listed = count
            before = value
        return highest[:listed]

    def raised_by_lines(self) -> list[str]:
        """A line for each image of `raised_by`: its score, and the threshold without it."""
        lines = []
        for above, (name, score, value) in enumerate(self.raised_by()):
            images = f"it and the {above} above" if above else "it"
            lines.append(
                f"{name} scores {score:.5g}; without {images} the reject threshold would be "
                f"{value:.5g} instead of {self.image:.5g}"
            )
        return lines

    @cached_property
    def reject_up_to(self) -> float:
        """Upper end of the reject threshold's 95 % interval; at least the threshold.

        The share of good parts above the threshold follows a Beta distribution. The upper end is
        the score that the lower bound of that share exceeds; above the highest good score it comes
        from the tail of `ScoreScale`.
        """
        above = sum(score > self.image for score in self.good.image)
        if above == self.images:
            return self.image
        units = independent_images(self.images, self.good.groups)
        share = rate_showing(above * units // self.images + 1, units, (1 - CONFIDENCE) / 2)
        return max(self.image, self._scale.score_of(share))

    def to_json(self) -> dict[str, Any]:
        """The thresholds as plain values, without the good scores."""
        return {
            "label": self.label,
            "source": self.good.source,
            "assumes": _ASSUMES,
            **{
                name: {**asdict(threshold), "statement": threshold.statement}
                for name, threshold in (("review", self.to_review), ("reject", self.to_reject))
            },
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
        good: finite scores of good images.
        review_rate: share of good parts that may be called anything but good, on average. A look
            at a good part costs little, and a guaranteed rate would leave small sets without a
            review zone, where doubt is greatest.
        reject_rate: share of good parts that may be rejected; at most `review_rate`.
        newest: scores of the latest images; the reject threshold rises until it keeps its rate on
            these images alone, too.

    Raises:
        DataError: no scores.
        ValueError: rates out of range or in the wrong order, or a score isn't finite.
    """
    if reject_rate > review_rate:
        raise ValueError(
            f"the reject rate ({reject_rate}) is above the review rate ({review_rate}); make it "
            "lower or equal"
        )
    review = threshold_for_expected_rate(good.image, review_rate, good.groups)
    reject = threshold_for_false_reject_rate(good.image, reject_rate, good.groups)
    if len(newest):
        least = threshold_for_false_reject_rate(newest, reject_rate).value
        reject = reject.raised(least, good.image)
    return Thresholds(review, reject, "calibrated", good)


def thresholds_by_hand(good: GoodScores, review: float, reject: float) -> Thresholds:
    """Thresholds set by hand, with their false-reject rates.

    Raises:
        ValueError: the review threshold lies above the reject threshold.
    """
    to_review = threshold_at(review, good.image, good.groups)
    to_reject = threshold_at(reject, good.image, good.groups)
    return Thresholds(to_review, to_reject, "by hand", good)


def _pixels_at(value: float, good: GoodScores) -> float:
    """The anomaly map's value that is as rare among good images as an image score.

    The k-th highest image score corresponds to the k-th highest peak of an anomaly map; between
    two scores the value is linear, outside them proportional. If the image score is the map's peak,
    both are equal.
    """
    scores, peaks = np.sort(np.array(good.image)), np.sort(np.array(good.peak))
    peak, nearest = np.interp(value, scores, peaks), np.clip(value, scores[0], scores[-1])
    # Between the scores the factor is 1; beyond them the nearest score's peak grows with the value.
    return float(peak * (value / nearest) if nearest > 0 else peak)


@dataclass(frozen=True, eq=False)
class ThresholdChange:
    """A change from the present thresholds to new ones."""

    before: Thresholds
    after: Thresholds

    @property
    def is_doubtful(self) -> bool:
        """True if a calibrated reject threshold rises by over a tenth, and more than by chance.

        Defects among the good images raise it; all defects like them would then pass.
        """
        chance = max(self.before.reject_up_to, _RISE * self.before.image)
        return self.after.label != "by hand" and self.after.image > chance

    def lines(self) -> list[str]:
        """At most one line, with the thresholds before and after; none if nothing changes."""
        if self.after == self.before:
            return []
        return [
            f"review threshold {self.before.review:.4g} -> {self.after.review:.4g}, "
            f"reject threshold {self.before.image:.4g} -> {self.after.image:.4g}"
        ]

    @property
    def caution(self) -> str:
        """A warning if the reject threshold rises by more than a tenth; empty otherwise."""
        if self.after.image <= _RISE * self.before.image:
            return ""
        good = self.after.good
        rows = sorted(zip(good.image, good.names, strict=True), reverse=True)
        above = [f"{name}: {score:.4g}" for score, name in rows if score > self.before.image]
        look = (
            f"Rejected before: {len(above)} of {self.after.images} images ({some(above)}). "
            "Look at them: if they are defects, defects like them will pass"
            if above
            else "No image scored above the earlier threshold"
        )
        chance = f" (by chance up to {self.before.reject_up_to:.4g})" if self.is_doubtful else ""
        return (
            f"the reject threshold rises from {self.before.image:.4g} to "
            f"{self.after.image:.4g}{chance}; images that score between these are no longer "
            f"rejected. {look}"
        )
