"""Other thresholds for a trained detector, from images that it hasn't learned from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path

from anomaly.calibration import GoodScores, Thresholds, thresholds_by_hand, thresholds_from
from anomaly.datasets import check_good_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError, ImageError
from anomaly.evaluation.held_out import HeldOutScores, score_held_out
from anomaly.evaluation.test_split import tested_hashes
from anomaly.imaging.array_input import ArrayFormat, ImageLike, is_one
from anomaly.imaging.read import Image, described
from anomaly.model.scoring import Model
from anomaly.model.threshold_files import change

log = logging.getLogger(__name__)


def recalibrated(
    detector: Model,
    good: str | Path | Iterable[ImageLike] | None,
    given: ArrayFormat,
    *,
    reject_rate: float | None,
    review_rate: float | None,
    threshold: float | None,
    review_threshold: float | None,
) -> Model:
    """A detector with other thresholds; see `AnomalyDetector.calibrate`."""
    asked = {
        "reject_rate": reject_rate,
        "review_rate": review_rate,
        "threshold": threshold,
        "review_threshold": review_threshold,
    }
    if threshold is None:
        if review_threshold is not None:
            raise DataError("review_threshold needs threshold, where rejection begins")
        wanted = detector.rates(review_rate, reject_rate)
    elif reject_rate is not None or review_rate is not None:
        raise DataError("thresholds are set by hand or found by rates, not both")
    else:
        check_by_hand(threshold, review_threshold)
    scored = {} if good is None else {"good": _scored(detector, good, given)}
    scores = scored["good"].good_scores() if scored else known_scores(detector)
    if threshold is None:
        limits = thresholds_from(scores, *wanted)
    else:
        limits = by_hand(scores, threshold, review_threshold)
    asked = {name: value for name, value in asked.items() if value is not None}
    images = {name: one.named_hashes() for name, one in scored.items()}
    made = change(asked, detector.thresholds, limits, images) | {"model_before": detector.model_id}
    changes = (*detector.changes, made)
    return replace(detector, thresholds=limits, model_id="", folder=None, changes=changes)


def by_hand(good: GoodScores, reject: float, review: float | None) -> Thresholds:
    """Thresholds that somebody has chosen; without one of review, nothing is for review.

    Raises:
        DataError: review lies above rejection, or one isn't a number of 0 or more.
    """
    check_by_hand(reject, review)
    return thresholds_by_hand(good, reject if review is None else review, reject)


def check_by_hand(reject: float, review: float | None) -> None:
    """See that chosen thresholds can be thresholds.

    Raises:
        DataError: review lies above rejection, or one isn't a number of 0 or more.
    """
    chosen = reject if review is None else review
    for name, value in (("threshold", reject), ("review threshold", chosen)):
        if not isinstance(value, Real) or not 0 <= value < float("inf"):
            raise DataError(f"the {name} is {value!r}; it must be a number of 0 or more")
    if chosen > reject:
        raise DataError(f"the review threshold {chosen:g} lies above the threshold {reject:g}")


def known_scores(detector: Model, without: Sequence[str] = ()) -> GoodScores:
    """The scores of good images that a detector came with; what was left out counts again.

    Args:
        detector: has thresholds, or none.
        without: names of images to leave out.

    Raises:
        DataError: it knows no scores, or no image has such a name.
    """
    if detector.thresholds is None:
        raise DataError("the model knows no scores of good images; give some good images")
    before = detector.thresholds.good
    now = before.without(without)
    if back := {out.name for out in before.left_out} - {out.name for out in now.left_out}:
        log.warning("left out before, and counted again: %s", ", ".join(sorted(back)))
    return now


def _scored(
    detector: Model, good: str | Path | Iterable[ImageLike], given: ArrayFormat
) -> HeldOutScores:
    unseen = score_held_out(
        detector,
        sources(good, given),
        what="good images",
        tested=tested_of(detector),
    )
    for reason in unseen.refused:
        log.warning("skipped: %s", reason)
    return unseen


def sources(
    images: str | Path | Iterable[ImageLike], given: ArrayFormat, what: str = "good images"
) -> list[Path | Image]:
    """Images as a program names them: a folder, or a collection.

    Args:
        images: what it names; a single image is one of them.
        given: how arrays are to be taken.
        what: the images are, for messages; by that it is seen whether folders are called defects.

    Raises:
        DataError: there are none.
        ImageError: one can't be used; says which and why.
    """
    if isinstance(images, str | Path):
        paths = find_inputs([Path(images)], option=what).paths
        if what == "good images":
            check_good_inputs([Path(images)], paths)
        return list(paths)
    found: list[Path | Image] = []
    for index, image in enumerate([images] if is_one(images) else images):
        try:
            found.append(given.source(image))
        except ImageError as error:
            raise ImageError(f"{described(index)}: {error}", error.status) from None
    if not found:
        raise DataError(f"no {what} were given")
    return found


def tested_of(detector: Model) -> frozenset[str]:
    """Hashes of the test split, where the run remembers its data set and it is still there."""
    if detector.folder is None:
        return frozenset()
    try:
        return tested_hashes(detector, detector.folder, None)
    except AnomalyError as error:
        log.warning(
            "%s: make sure yourself that the good images aren't those the model is evaluated on",
            error,
        )
        return frozenset()
