"""Other thresholds for a trained model, and what they change; the model learns nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from anomaly.calibration.rates import Rate, percent, rate_anywhere
from anomaly.calibration.thresholds import (
    GoodScores,
    Threshold,
    ThresholdChange,
    Thresholds,
    threshold_at,
    thresholds_by_hand,
    thresholds_from,
)
from anomaly.datasets.samples import Sample
from anomaly.desk.change import (
    DEFECTS,
    PRODUCTION,
    Change,
    Verdicts,
    compare,
    known_parts,
    new_images,
    verdicts_of,
)
from anomaly.errors import DataError, counted, first_of, some
from anomaly.runtime import StageProgress
from anomaly.scoring.model import Model, Scored, score
from anomaly.storage.thresholds import changes_with, earlier_thresholds, history_images

log = logging.getLogger(__name__)

_MOST_DEFECTIVE = 0.2  # largest share of production images
_LISTED = 10  # images taken as defects that a line names
_FAR = 1.5  # times the highest score of good images; a threshold above is odd


@dataclass(frozen=True)
class Wishes:
    """Wishes for other thresholds; None leaves a value to the model.

    Attributes:
        false_reject_rate: share of good parts that may be rejected.
        review_rate: share of good parts that may not be called good.
        threshold: reject above this image score.
        review_threshold: review above this image score; without it no score is for review.
        at_most_defective: the largest share of production images that may be defective.
        undo: bring the earlier thresholds back.
    """

    false_reject_rate: float | None = None
    review_rate: float | None = None
    threshold: float | None = None
    review_threshold: float | None = None
    at_most_defective: float | None = None
    undo: bool | None = None

    def check(self, *, good: bool, production: bool) -> None:
        """Refuse wishes that contradict each other, before anything is loaded.

        Args:
            good: True if good images are given.
            production: True if production images are given.

        Raises:
            DataError: the wishes contradict each other, or a value is out of range.
        """
        # Those given, by their names in messages.
        rates = {"false-reject": self.false_reject_rate, "review": self.review_rate}
        by_rate = {name: rate for name, rate in rates.items() if rate is not None}
        by_hand = {"threshold": self.threshold, "review threshold": self.review_threshold}
        values = {name: value for name, value in by_hand.items() if value is not None}
        share = self.at_most_defective
        if self.undo and (len(self.values()) > 1 or good or production):
            raise DataError("undo brings the previous thresholds back; leave other options out")
        if values and by_rate:
            raise DataError("thresholds are set by hand or found by rates; give one of these")
        if values and self.threshold is None:
            raise DataError("a review threshold needs a threshold; give both")
        for name, rate in by_rate.items():
            if not 0 < rate < 1:
                raise DataError(f"the {name} rate is {rate:g}; it must be between 0 and 1")
        if len(by_rate) == 2 and by_rate["false-reject"] > by_rate["review"]:
            raise DataError(
                f"the false-reject rate {self.false_reject_rate:g} is above the review rate "
                f"{self.review_rate:g}; what is rejected is never called good"
            )
        for name, value in values.items():
            if not isinstance(value, Real) or not 0 <= value < float("inf"):
                raise DataError(f"the {name} is {value!r}; it must be a number of 0 or more")
        if values.get("review threshold", 0) > values.get("threshold", 0):
            raise DataError("the review threshold lies above the threshold")
        if production != (share is not None):
            raise DataError(
                "--production and --at-most-defective need each other: look at the images, those "
                "that are flagged now first, and give the largest share of them that may be "
                "defective"
            )
        if production and good:
            raise DataError("thresholds come from good or production images; give one of these")
        if share is not None and not 0 <= share <= _MOST_DEFECTIVE:
            raise DataError(
                f"--at-most-defective is {percent(share)}; it must be from 0 % to "
                f"{percent(_MOST_DEFECTIVE)}. Beyond that, sort the images: give --good and "
                "--defects"
            )
        if share and values:
            raise DataError("thresholds by hand need images that are known to be good")

    def values(self) -> dict[str, Any]:
        """The wishes that somebody has given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def recalibrate(
    model: Model,
    wishes: Wishes,
    *,
    good: Sequence[Sample] = (),
    production: Sequence[Sample] = (),
    defects: Sequence[Sample] = (),
    progress: StageProgress = lambda stage, done, total: None,
) -> Change:
    """Find other thresholds, and compare verdicts before and after.

    Warnings in the log name images left out, and odd thresholds.

    Args:
        model: the trained model; it isn't changed.
        wishes: wishes, checked already.
        good: good images to find thresholds with; without any, the model's own good scores.
        production: unsorted images to find thresholds with, instead of `good`.
        defects: images of defects, compared like known defects.
        progress: called with (stage, done, total).

    Raises:
        DataError: none of the images can be used, the model has no scores, or nothing can be
            undone.
    """
    known = known_parts([model], defects)
    # Nobody has sorted production images, so their lines in the history have a name of their own.
    kind = "production" if production else "good"
    scored: list[Scored] = []
    refused: list[str] = []
    if samples := production or good:
        name = f"{kind} images"
        kept = new_images(model, samples, name, known, defects=defects, unsorted=bool(production))
        results = score(model, kept, peaks=True, progress=partial(progress, name))
        scored = [image for image in results if image.score is not None]
        refused = [image.reason for image in results if image.score is None]
        if not scored:
            raise DataError(f"none of {len(kept)} images can be used: {'; '.join(refused[:3])}")
        for reason in first_of(refused, f" of the {name}"):
            log.warning("skipped: %s", reason)
    limits, taken = _new_thresholds(model, wishes, scored, known[DEFECTS])
    verdicts = verdicts_of(model, replace(model, thresholds=limits), known, progress=progress)
    if production:  # scored already; other thresholds change no score
        compared = compare(scored, scored, (model.thresholds, limits))
        verdicts = Verdicts({**verdicts.compared, PRODUCTION: compared})
    # The record by which a later calibration or evaluation knows these images again.
    images = {kind: {str(s.sample.path): s.sha256 for s in scored}} if scored else {}
    if taken:
        images["taken as defects"] = taken
    if defects:
        images["defects"] = {str(defect.path): defect.sha256 for defect in defects}
    rates = verdicts.defects_found(limits, defects)
    changes = changes_with(model, wishes.values(), limits, images, rates)
    after = replace(model, thresholds=limits, model_id="", folder=None, changes=changes)
    notes = list(_notes(rates, [*taken]))
    doubts = [verdicts.refusal, "" if wishes.undo else _doubt_about(model.thresholds, limits)]
    return Change(model, after, verdicts, notes, [doubt for doubt in doubts if doubt], refused)


def _new_thresholds(
    model: Model, wishes: Wishes, scored: Sequence[Scored], known: Iterable[Sample]
) -> tuple[Thresholds, dict[str, str]]:
    """The thresholds that are wished for, and sha256 by name of images taken as defects.

    `scored` holds good or production images; without any, the model's own good scores count.
    """
    if wishes.undo:
        return earlier_thresholds(model), {}
    rates = model.rates(wishes.review_rate, wishes.false_reject_rate)
    if share := wishes.at_most_defective:
        learned = _known_scores(model, known)
        return thresholds_from_production(learned, _good_scores(scored), share, *rates)
    scores = _good_scores(scored) if scored else _known_scores(model, known)
    if wishes.threshold is None:  # by rates
        return thresholds_from(scores, *rates), {}
    review = wishes.threshold if wishes.review_threshold is None else wishes.review_threshold
    return thresholds_by_hand(scores, review, wishes.threshold), {}


def _notes(rates: Mapping[str, Rate], taken: Sequence[str]) -> Iterator[str]:
    """Lines for people: rates of given defects, and production images taken as defects."""
    for verdict, rate in rates.items():
        yield (
            f"of {rate.images} defects {rate.count} {verdict}: {percent(rate.expected)}, "
            f"{rate.interval} (95 % confidence)"
        )
    if taken:
        yield (
            f"taken as defects: {counted(len(taken), 'image')} with the highest scores "
            f"({some(taken, most=_LISTED)}). For exact thresholds look at the highest scores, "
            "remove the defects and give --at-most-defective 0%"
        )


def _doubt_about(before: Thresholds | None, new: Thresholds) -> str:
    """A reason for a person to agree to new thresholds first; empty without one.

    Warnings in the log name thresholds that are odd but no reason to ask.
    """
    if before is not None and new.label != before.label != "calibrated":
        log.warning("the thresholds %s are replaced by thresholds %s", before.label, new.label)
    highest = max(new.good.image)
    if new.label == "by hand" and new.image > _FAR * highest > 0:
        log.warning(
            "the threshold %.4g is %.1f times the highest score of the good images, %.4g: "
            "defects that score below the threshold will pass",
            new.image,
            new.image / highest,
            highest,
        )
    raised = new.raised_by_lines()
    for line in raised:
        log.warning(line)
    if raised:
        log.info("look at these images; name those that aren't good with --defects")
    if before is None:
        return ""
    moved = ThresholdChange(before, new)
    if moved.caution and not moved.is_doubtful:
        log.warning(moved.caution)
    return moved.caution if moved.is_doubtful else ""


def _good_scores(scored: Sequence[Scored]) -> GoodScores:
    """Scores to find thresholds with, of good images that the model hasn't learned.

    Images with a reason for review are flagged whatever their score: they are left out, and a
    warning in the log names some.

    Args:
        scored: one image or more, each with a score.

    Raises:
        DataError: all images have a reason for review.
    """
    kept = [image for image in scored if not image.reason]
    outliers = [f"{image.sample.path}: {image.reason}" for image in scored if image.reason]
    if not kept:
        raise DataError(
            f"all {len(outliers)} good images would be flagged whatever their score "
            f"({scored[0].reason}), so they can't set thresholds; if parts look like that from now "
            "on, let the model learn them (anomaly update)"
        )
    if outliers:
        log.warning(
            "%s would be flagged whatever the score and can't set thresholds; left out: %s",
            counted(len(outliers), "good image"),
            some(outliers, "; "),
        )
    # Images of one part vary together, so bounds count parts.
    groups = {image.sample.group or i for i, image in enumerate(kept)}
    return GoodScores(
        tuple(image.sample.name for image in kept),
        tuple(image.score for image in kept if image.score is not None),
        tuple(image.peak for image in kept),
        f"{len(kept)} good images that the model hasn't learned from",
        groups=len(groups) if any(image.sample.group for image in kept) else None,
        hashes=tuple(image.sha256 for image in kept),
    )


def _known_scores(model: Model, known: Iterable[Sample]) -> GoodScores:
    """The good scores that a model's thresholds were found with, without known defects.

    Raises:
        DataError: the model has no thresholds, so no scores either, or all are of defects.
    """
    if model.thresholds is None:
        raise DataError(
            "the model was trained without thresholds, so it has no scores of good images; give "
            "good images with --good"
        )
    good, learned = model.thresholds.good, model.manifest["training_images"]
    # Defects may have been found among the training images since; unreadable files have no hash.
    bad = {*(defect.sha256 for defect in known), *history_images(model, "defects")} - {""}
    rows = [(name, sha256 or learned.get(name, "")) for name, _, _, sha256 in good.rows()]
    if defects := [name for name, sha256 in rows if sha256 in bad]:
        log.warning("left out, known as defects: %s", some(defects))
        if any(name in learned for name in defects):
            log.warning("the model has still learned from these images; train again without them")
    return good.without(defects)


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
    The review threshold is put between them: half of the d highest images, or one, are left out.
    The scores of known good images have another lot's shape and don't help here (see
    benchmarks/ACCURACY.md). Only the reject threshold, for which so few images say too little,
    keeps its distance from the review threshold: their ratio is that of the known scores.

    Args:
        known: scores of known good images, such as the training images.
        production: scores of the production images, defects among them.
        at_most_defective: the largest share of production images that may be defective.
        review_rate: share of good parts that may not be called good.
        reject_rate: share of good parts that may be rejected.

    Returns:
        Thresholds with bounds that hold wherever the defects score; and the sha256, by name, of
        the images left out as defects, the highest first.

    Raises:
        DataError: the share allows for no defect among so few images.
    """
    images = len(production.image)
    defects = int(at_most_defective * images + 1e-9)  # 5 % of 40 are 2, whatever rounding does
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
    # The review threshold of the rest is sound; the reject threshold needs the known scores' ratio.
    calibrated, former = (
        thresholds_from(scores, review_rate, reject_rate) for scores in (good, known)
    )
    review, reject = calibrated.to_review, calibrated.to_reject
    if 0 < former.review < former.image:  # else no ratio is known
        reject = threshold_at(review.value * former.image / former.review, good.image)
    review, reject = (
        replace(threshold, false_rejects=_rate_with_defects(threshold, production.image, defects))
        for threshold in (review, reject)
    )
    taken = {name: sha256 for name, _, _, sha256 in reversed(rows[cut:])}
    return Thresholds(review, reject, "calibrated", good), taken


def _rate_with_defects(threshold: Threshold, scores: Sequence[float], defects: int) -> Rate:
    """The false-reject rate of a threshold, with bounds for any scores of the defects.

    Of the images above the threshold, and of all images, up to `defects` may be defective.
    """
    sure = len(scores) - defects
    above = sum(score > threshold.value for score in scores)
    most = rate_anywhere(min(above, sure), sure, threshold.false_rejects.expected)
    least = rate_anywhere(max(above - defects, 0), len(scores), 0.0)
    return replace(most, low=least.low)
