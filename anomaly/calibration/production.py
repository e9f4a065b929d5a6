"""Production images beside what thresholds promise of good parts like the training images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from anomaly.calibration.model_thresholds import Thresholds, thresholds_from
from anomaly.calibration.rates import Rate, binomial, percent, rate_anywhere
from anomaly.calibration.scores import GoodScores
from anomaly.calibration.thresholds import Calibration, Threshold, threshold_for_expected_rate
from anomaly.errors import some

LEAST_IMAGES = 20  # fewer say nothing of a rate
DEFECT_SHARE = 0.01  # of the parts on a line, where nobody says otherwise
# Of a comparison that finds a difference where there is none. Made anew with each of 2,000 parts,
# some 3 % of lines meet one: bounds of the promise are seldom so far off.
_CHANCE = 0.01
_LISTED = 10  # images named

Comparison = Literal["as promised", "more", "fewer"]


def compare_flagged(flagged: int, images: int, promised: Rate) -> Comparison:
    """Whether more, or fewer, images are flagged than chance explains where parts are as promised.

    A binomial test against the bounds of the promise. It may be asked again as images come.

    Args:
        flagged: images above a threshold.
        images: all of them, but for those that are for review whatever their score.
        promised: what the threshold does to good parts.
    """
    if images < LEAST_IMAGES:
        return "as promised"
    most = promised.at_most + DEFECT_SHARE * (1 - promised.at_most)
    if most < 1 and binomial(images, most)[flagged:].sum() < _CHANCE:
        return "more"
    if promised.low > 0 and binomial(images, promised.low)[: flagged + 1].sum() < _CHANCE:
        return "fewer"
    return "as promised"


def flagged_line(
    flagged: int, images: int, promised: Rate, model: str = "RUN", *, all_good: bool = False
) -> str:
    """What `compare_flagged` finds, for people, and what to do; empty where all is as promised.

    Args:
        flagged: as there.
        images: as there.
        promised: as there.
        model: the model's folder, for the command.
        all_good: whether somebody has said that none of the images is defective.
    """
    comparison = compare_flagged(flagged, images, promised)
    if comparison == "as promised":
        return ""
    shares = f"{flagged} of {images} images flagged ({percent(flagged / images)}); "
    shares += f"{percent(promised.expected)} expected"
    why = (
        f", at most {percent(promised.at_most)} of good parts. "
        f"{'These' if all_good else 'Either many parts are defective, or these'} images differ "
        "from the training images"
        if comparison == "more"
        else f", at least {percent(promised.low)}. The thresholds are too high for these images, "
        "and defects pass that could be caught"
    )
    command = f"anomaly calibrate --model {model} --production FOLDER --at-most-defective 5%"
    return f"{shares}{why}. See: {command}"


@dataclass(frozen=True, eq=False)
class ProductionChoice:
    """Thresholds from production images of which nobody has said which are defective.

    Attributes:
        thresholds: with bounds that hold wherever the defects score.
        defects: how many of the images may be defective.
        review_range: the review threshold if so many score highest, and if none is defective.
        deciding: name and score of the images that lie between: whether they are good decides.
        left_out: name and score of images taken for defects; among the deciding ones, or above.
    """

    thresholds: Thresholds
    defects: int
    review_range: tuple[float, float]
    deciding: tuple[tuple[str, float], ...]
    left_out: tuple[tuple[str, float], ...]

    def lines(self) -> list[str]:
        """What is not known, and which images would tell, for people."""
        low, high = self.review_range
        lines = [
            f"these images alone put the review threshold at {high:.5g} if all are good, at "
            f"{low:.5g} if the highest {self.defects} are defective"
        ]
        if self.deciding:
            lines.append(f"look at what decides: {_named(self.deciding)}")
        if self.left_out:
            lines.append(f"taken for defects, and left out: {_named(self.left_out)}")
        return lines


def thresholds_from_production(
    known: GoodScores,
    production: GoodScores,
    at_most_defective: float,
    review_rate: float,
    reject_rate: float,
) -> ProductionChoice:
    """Thresholds for production images, a few of which may be defective.

    Their scores, and the known ones brought to the same median, are taken together: one hundred
    images alone say too little of a rate of 5 %. Images that score higher than all of the known
    ones are taken for defects and left out, the highest first, as many as there may be. The bounds
    of the rates hang on the production images alone and hold wherever the defects score.

    Args:
        known: scores of good images, of training say.
        production: scores of the production images, defects among them.
        at_most_defective: the share of these images that may be defective.
        review_rate: as for `thresholds_from`.
        reject_rate: as for `thresholds_from`.
    """
    defects = int(at_most_defective * len(production.image) + 1e-9)
    moved, factor = _moved(known, production, at_most_defective)
    rows = sorted(production.rows(), key=lambda row: row[1])
    sure = len(rows) - defects  # so many are good at least
    out = [row for row in rows[sure:] if row[1] > max(moved.image)]
    source = (
        f"{len(rows)} production images, at most {defects} of them defective, and on "
        f"{len(moved.image)} known good images, their scores times {factor:.3g}"
    )
    good = moved.joined(production.with_rows(rows[: len(rows) - len(out)]), source)
    found = thresholds_from(good, review_rate, reject_rate)
    review, reject = (
        replace(threshold, false_rejects=_rate(threshold, production.image, defects))
        for threshold in (found.calibration.review, found.calibration.reject)
    )
    low, high = (
        threshold_for_expected_rate([row[1] for row in some], review_rate).value
        for some in (rows[:sure], rows)
    )
    return ProductionChoice(
        replace(found, calibration=Calibration(review, reject)),
        defects,
        (low, high),
        tuple(row[:2] for row in reversed(rows) if low < row[1] <= high),
        tuple(row[:2] for row in reversed(out)),
    )


def _moved(
    known: GoodScores, production: GoodScores, at_most_defective: float
) -> tuple[GoodScores, float]:
    """Known scores times the factor that brings their median to that of production, and the factor.

    Half as many defects as there may be are taken to lie above the median. Images that production
    has, too, don't count as known, unless there are no others.
    """
    new = {*production.hashes} - {""}
    rows = [row for row in known.rows() if row[3] not in new] or known.rows()
    kept = known.with_rows(rows)
    middle = (1 - at_most_defective / 2) / 2
    pairs = (kept.image, production.image), (kept.peak, production.peak)
    image, peak = (
        float(np.quantile(scores, middle)) / median if (median := float(np.median(before))) else 1.0
        for before, scores in pairs
    )
    moved = [(name, image * score, peak * top, sha256) for name, score, top, sha256 in rows]
    return kept.with_rows(moved), image


def _rate(threshold: Threshold, scores: Sequence[float], defects: int) -> Rate:
    """What a threshold does to the good ones of images, with bounds wherever the defects score.

    As many good images lie above the threshold as images do, or fewer by the defects; there are as
    many good images as images, or fewer by the defects.
    """
    sure = len(scores) - defects
    above = sum(score > threshold.value for score in scores)
    most = rate_anywhere(min(above, sure), sure, threshold.false_rejects.expected)
    least = rate_anywhere(max(above - defects, 0), len(scores), 0.0)
    return replace(most, low=least.low)


def _named(images: Sequence[tuple[str, float]]) -> str:
    return some([f"{name}: {score:.5g}" for name, score in images], most=_LISTED)
