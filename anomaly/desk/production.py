"""Production images beside what thresholds promise of good parts like the training images."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from anomaly.calibration.rates import Rate, binomial, percent, rate_anywhere
from anomaly.calibration.thresholds import (
    GoodScores,
    Threshold,
    Thresholds,
    threshold_at,
    thresholds_from,
    with_pixels,
)
from anomaly.errors import DataError

LEAST_IMAGES = 20  # fewer say nothing of a rate
DEFECT_SHARE = 0.01  # of the parts on a line, where nobody says otherwise
# Of a comparison that finds a difference where there is none. Made anew with each of 2,000 parts,
# some 3 % of lines meet one: bounds of the promise are seldom so far off.
_CHANCE = 0.01
_MANY = 2000  # images from which on the chance is bounded, in no time

Comparison = Literal["as promised", "more", "fewer"]


def compare_flagged(flagged: int, images: int, promised: Rate) -> Comparison:
    """Compare the flagged share with the promise: `more`, `fewer` or `as promised`.

    A binomial test against the bounds of the promise. It may be asked again as images come.

    Args:
        flagged: images above a threshold.
        images: all of them without a reason for review.
        promised: what the threshold does to good parts.
    """
    if images < LEAST_IMAGES:
        return "as promised"
    most = promised.at_most + DEFECT_SHARE * (1 - promised.at_most)
    if _chance(flagged, images, most) < _CHANCE:
        return "more"
    if _chance(images - flagged, images, 1 - promised.low) < _CHANCE:
        return "fewer"
    return "as promised"


def _chance(count: int, images: int, rate: float) -> float:
    """The chance (for many images a bound) that so many or more images are flagged."""
    share = count / images
    if share <= rate:  # or the rate is 1
        return 1.0
    if images <= _MANY:
        return float(binomial(images, rate)[count:].sum())
    divergence = share * math.log(share / rate)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - rate))
    return math.exp(-images * divergence)  # Chernoff's bound


def flagged_line(
    flagged: int, images: int, promised: Rate, model: str = "RUN", *, all_good: bool = False
) -> str:
    """A warning if more or fewer images are flagged than promised; empty otherwise.

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
    line = f"{flagged} of {images} images flagged ({percent(flagged / images)}); "
    line += f"{percent(promised.expected)} expected, at "
    if comparison == "fewer":
        line += f"least {percent(promised.low)}. These thresholds let defects pass"
    else:
        line += f"most {percent(promised.at_most)} of good parts. "
        if not all_good:
            line += "Look at them first: if most are defects, change nothing. If most are good, "
        line += f"{'T' if all_good else 't'}hese images differ from the training images"
    command = f"anomaly calibrate --model {shlex.quote(model)} --production FOLDER"
    return f"{line}: find thresholds for images like these with {command}"


def thresholds_from_production(
    known: GoodScores,
    production: GoodScores,
    at_most_defective: float,
    review_rate: float,
    reject_rate: float,
) -> tuple[Thresholds, dict[str, str]]:
    """Thresholds from production images if some of them may be defective.

    Of n images at most d are defective, wherever they score. So the score that a share r of the
    good ones exceeds lies between those of the ranks r · (n − d) and r · (n − d) + d from above.
    The review threshold is put between them: half of the d highest images are left out. The scores
    of known good images have another lot's shape and are no help here (benchmarks/ACCURACY.md).
    Only the reject threshold, for which so few images say too little, keeps its distance from the
    review threshold: their ratio is that of the known scores.

    Args:
        known: scores of good images, of training say.
        production: scores of the production images, defects among them.
        at_most_defective: the share of these images that may be defective.
        review_rate: as for `thresholds_from`.
        reject_rate: as for `thresholds_from`.

    Returns:
        Thresholds with bounds that hold wherever the defects score; and the sha256, by name, of
        the images left out as defects, the highest first.

    Raises:
        DataError: the share allows for no defect among so few images.
    """
    images = len(production.image)
    defects = int(at_most_defective * images + 1e-9)
    if not defects:
        raise DataError(
            f"{percent(at_most_defective)} of {images} images is less than one image: give "
            f"{math.ceil(1 / at_most_defective)} or more, or --at-most-defective 0% where all of "
            "them are good"
        )
    rows = sorted(production.rows(), key=lambda row: row[1])
    cut = images - max(defects // 2, 1)
    source = f"{images} production images, at most {defects} of them defective"
    good = replace(production.with_rows(rows[:cut]), source=source)
    calibrated, former = (
        thresholds_from(scores, review_rate, reject_rate) for scores in (good, known)
    )
    review, reject = calibrated.to_review, calibrated.to_reject
    if 0 < former.review < former.image:
        reject = threshold_at(review.value * former.image / former.review, good.image)
    review, reject = (
        replace(threshold, false_rejects=_rate(threshold, production.image, defects))
        for threshold in (review, reject)
    )
    taken = {name: sha256 for name, _, _, sha256 in reversed(rows[cut:])}
    return with_pixels(review, reject, "calibrated", good), taken


def _rate(threshold: Threshold, scores: Sequence[float], defects: int) -> Rate:
    """The false-reject rate of a threshold, with bounds for any scores of the defects.

    As many good images lie above the threshold as images do, or fewer by the defects; there are as
    many good images as images, or fewer by the defects.
    """
    sure = len(scores) - defects
    above = sum(score > threshold.value for score in scores)
    most = rate_anywhere(min(above, sure), sure, threshold.false_rejects.expected)
    least = rate_anywhere(max(above - defects, 0), len(scores), 0.0)
    return replace(most, low=least.low)
