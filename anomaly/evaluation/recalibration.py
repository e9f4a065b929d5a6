"""Other thresholds for a trained detector, from images that it hasn't learned from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anomaly import __version__
from anomaly.calibration import GoodScores, Thresholds, thresholds_by_hand, thresholds_from
from anomaly.datasets import check_good_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError, ImageError
from anomaly.evaluation.held_out import HeldOutScores, score_held_out
from anomaly.evaluation.test_split import tested_hashes
from anomaly.imaging.given import Given, ImageLike
from anomaly.imaging.image import Image, described
from anomaly.model.detector import AnomalyDetector

log = logging.getLogger(__name__)


def recalibrated(
    detector: AnomalyDetector,
    good: str | Path | Iterable[ImageLike] | None,
    given: Given,
    *,
    reject_rate: float | None,
    review_rate: float | None,
    threshold: float | None,
    review_threshold: float | None,
) -> AnomalyDetector:
    """A detector with other thresholds; see `AnomalyDetector.calibrate`."""
    asked = {
        "reject_rate": reject_rate,
        "review_rate": review_rate,
        "threshold": threshold,
        "review_threshold": review_threshold,
    }
    scored = {} if good is None else {"good": _scored(detector, good, given)}
    scores = scored["good"].good_scores() if scored else _known_scores(detector)
    if threshold is not None:
        if reject_rate is not None or review_rate is not None:
            raise DataError("thresholds are set by hand or found by rates, not both")
        limits = by_hand(scores, threshold, review_threshold)
    elif review_threshold is not None:
        raise DataError("review_threshold needs threshold, where rejection begins")
    else:
        limits = thresholds_from(scores, *rates(detector, review_rate, reject_rate))
    asked = {name: value for name, value in asked.items() if value is not None}
    made = change(asked, detector.thresholds, limits, scored) | {"model_before": detector.model_id}
    changes = (*detector.changes, made)
    return replace(detector, thresholds=limits, model_id="", folder=None, changes=changes)


def change(
    asked: Mapping[str, Any],
    before: Thresholds | None,
    after: Thresholds,
    scored: Mapping[str, HeldOutScores],
    found: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a model's history says of other thresholds, but for the model's ids.

    Args:
        asked: what was asked for, by option.
        before: the thresholds that the model had.
        after: those that it has now.
        scored: the images that were given for them, by what they show.
        found: how many of the defects among them are found.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "software_version": __version__,
        "asked": dict(asked),
        "before": None if before is None else before.to_json(),
        "after": after.to_json(),
        "images": {
            name: dict(zip(map(str, images.paths), images.hashes, strict=True))
            for name, images in scored.items()
        },
        "left_out": {name: score for _, name, score, _ in after.good.left_out},
        "defects_found": found,
    }


def by_hand(good: GoodScores, reject: float, review: float | None) -> Thresholds:
    """Thresholds that somebody has chosen; without one of review, nothing is for review.

    Raises:
        DataError: review lies above rejection, or one isn't a number of 0 or more.
    """
    chosen = reject if review is None else review
    for name, value in (("threshold", reject), ("review threshold", chosen)):
        if not 0 <= value < float("inf"):
            raise DataError(f"the {name} is {value:g}; it must be a number of 0 or more")
    if chosen > reject:
        raise DataError(f"the review threshold {chosen:g} lies above the threshold {reject:g}")
    return thresholds_by_hand(good, chosen, reject)


def rates(
    detector: AnomalyDetector, review_rate: float | None, reject_rate: float | None
) -> tuple[float, float]:
    """Rates of review and of rejection: those given, else the thresholds', else the config's.

    Raises:
        DataError: both are given and contradict each other, or one isn't between 0 and 1.
    """
    for name, value in (("review", review_rate), ("false-reject", reject_rate)):
        if value is not None and not 0 < value < 1:
            raise DataError(f"the {name} rate is {value:g}; it must be between 0 and 1 (0.01: 1 %)")
    config, now = detector.config.calibration, detector.thresholds
    review = (now and now.calibration.review.target) or config.review_rate
    reject = (now and now.calibration.reject.target) or config.reject_rate
    review, reject = review_rate or review, reject_rate or reject
    if reject <= review:
        return review, reject
    if review_rate is not None and reject_rate is not None:
        raise DataError(
            f"the false-reject rate {reject:g} is above the review rate {review:g}; what is "
            "rejected is never called good"
        )
    # Only one was given: the other gives way.
    return (review, review) if review_rate is not None else (reject, reject)


def _known_scores(detector: AnomalyDetector) -> GoodScores:
    if detector.thresholds is None:
        raise DataError("the model knows no scores of good images; give some good images")
    return detector.thresholds.good


def _scored(
    detector: AnomalyDetector, good: str | Path | Iterable[ImageLike], given: Given
) -> HeldOutScores:
    unseen = score_held_out(
        detector,
        _sources(good, given),
        learned=frozenset(detector.manifest["training_images"].values()),
        tested=_tested(detector),
    )
    if unseen.learned:
        log.warning("the model has learned from %d of the good images; left out", unseen.learned)
    if unseen.repeated:
        log.warning("%d good images are copies of others; left out", unseen.repeated)
    for reason in unseen.refused:
        log.warning("skipped: %s", reason)
    return unseen


def _sources(good: str | Path | Iterable[ImageLike], given: Given) -> list[Path | Image]:
    if isinstance(good, str | Path):
        paths = find_inputs([Path(good)], option="good images").paths
        check_good_inputs([Path(good)], paths)
        return list(paths)
    found: list[Path | Image] = []
    for index, image in enumerate(good):
        try:
            found.append(given.source(image))
        except ImageError as error:
            raise ImageError(f"{described(index)}: {error}", error.status) from None
    return found


def _tested(detector: AnomalyDetector) -> frozenset[str]:
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
