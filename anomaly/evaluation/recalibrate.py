"""Other thresholds for a trained model, from good images that it has not learned from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

from anomaly.calibration import (
    GoodScores,
    ThresholdChange,
    Thresholds,
    thresholds_by_hand,
    thresholds_from,
)
from anomaly.datasets import Sample, check_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import DataError, some
from anomaly.evaluation.price import DEFECTS, evaluated_on, fresh, known_parts, price, samples_of
from anomaly.evaluation.splits import content_hash, recorded
from anomaly.imaging.array_input import ArrayFormat, ImageLike, is_one
from anomaly.imaging.read import Image
from anomaly.methods.base import Progress
from anomaly.scoring.pipeline import Model
from anomaly.scoring.scored import Scored, score
from anomaly.storage.thresholds import change

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutScores:
    """Images that the model hasn't learned from, with their scores and peaks.

    Attributes:
        scored: all of them; some can't be used.
    """

    scored: Sequence[Scored]

    @property
    def images(self) -> list[Scored]:
        """Those that have a score."""
        return [one for one in self.scored if one.score is not None]

    @property
    def refused(self) -> list[str]:
        """Reasons for which others can't be used."""
        return [one.reason for one in self.scored if one.score is None]

    def named_hashes(self) -> dict[str, str]:
        """sha256 of each image that was scored, by its path."""
        return {str(image.sample.path): image.sha256 for image in self.images}

    def good_scores(self) -> GoodScores:
        """What thresholds are found with, where all of these images are good.

        Those with a reason for review say nothing of thresholds: they are left out, and a warning
        in the log names some.

        Raises:
            DataError: they are all like that.
        """
        kept = [one for one in self.scored if one.score is not None and not one.reason]
        outliers = [f"{one.sample.path}: {one.reason}" for one in self.images if one.reason]
        if not kept:
            raise DataError(
                f"all {len(outliers)} good images would be flagged whatever their score "
                f"({self.images[0].reason}), so they can't set thresholds; if parts look like that "
                "from now on, let the model learn them (anomaly update)"
            )
        if outliers:
            log.warning(
                "%d good images would be flagged whatever their score, so they can't set "
                "thresholds; left out: %s",
                len(outliers),
                some(outliers, "; "),
            )
        return GoodScores(
            tuple(_names([image.sample.path for image in kept])),
            tuple(image.score for image in kept if image.score is not None),
            tuple(image.peak for image in kept),
            f"{len(kept)} good images that the model hasn't learned from",
            hashes=tuple(image.sha256 for image in kept),
        )


def score_held_out(
    detector: Model,
    samples: Sequence[Sample],
    *,
    workers: int = 2,
    progress: Progress = lambda done, total: None,
) -> HeldOutScores:
    """Score images that thresholds may hang on, as `fresh` finds them.

    Args:
        detector: trained.
        samples: the images.
        workers: decoding processes.
        progress: called with (images done, all of them).

    Raises:
        DataError: none can be used.
    """
    held = HeldOutScores(score(detector, samples, workers=workers, peaks=True, progress=progress))
    if not held.images:
        raise DataError(f"none of {len(samples)} images can be used: {'; '.join(held.refused[:3])}")
    return held


def _names(paths: Sequence[Path]) -> list[str]:
    """Images' names: those of their files, with as many folders as it takes to tell them apart."""
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    places = [path.absolute() for path in paths]
    common = Path(os.path.commonpath([place.parent for place in places]))
    return [place.relative_to(common).as_posix() for place in places]


def recalibrated(
    detector: Model,
    good: str | Path | Iterable[ImageLike] | None,
    array_format: ArrayFormat,
    *,
    reject_rate: float | None,
    review_rate: float | None,
    threshold: float | None,
    review_threshold: float | None,
    force: bool,
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
            raise DataError("review_threshold needs threshold; give both")
        wanted = detector.rates(review_rate, reject_rate)
    elif reject_rate is not None or review_rate is not None:
        raise DataError("thresholds are either set by hand or found by rates; give one of these")
    else:
        check_by_hand(threshold, review_threshold)
    unseen = None
    known = known_parts([detector], evaluated_on(detector))
    if good is not None:
        images = samples_of(sources(good, array_format))
        unseen = score_held_out(detector, fresh(detector, images, "good images", known))
        for reason in unseen.refused:
            log.warning("skipped: %s", reason)
    scores = unseen.good_scores() if unseen else known_scores(detector, known[DEFECTS])
    if threshold is None:
        limits = thresholds_from(scores, *wanted)
    else:
        limits = by_hand(scores, threshold, review_threshold)
    after = replace(detector, thresholds=limits, model_id="", folder=None)
    cost = price(detector, after, known)
    for line in cost.lines():
        log.info(line)
    doubts = [cost.refusal]
    if detector.thresholds is None:
        for line in limits.lines():
            log.info(line)
        for line in limits.raised_lines():
            log.warning(line)
    else:
        moved = ThresholdChange(detector.thresholds, limits)
        for line in moved.lines():
            log.info(line)
        if moved.is_doubtful and not force:
            doubts.append(f"{moved.caution}; leave out images that aren't good")
        elif moved.caution:
            log.warning(moved.caution)
    if (doubt := "; ".join(filter(None, doubts))) and not force:
        raise DataError(f"{doubt}, or give force=True")
    asked = {name: value for name, value in asked.items() if value is not None}
    hashes = {"good": unseen.named_hashes()} if unseen else {}
    made = change(asked, detector.thresholds, limits, hashes) | {"model_before": detector.model_id}
    return replace(after, changes=(*detector.changes, made))


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


def known_scores(
    detector: Model, known: Iterable[Sample], without: Sequence[str] = ()
) -> GoodScores:
    """The scores of good images that a detector came with; what was left out counts again.

    Args:
        detector: has thresholds, or none.
        known: defects, which don't count.
        without: names of images to leave out.

    Raises:
        DataError: it knows no scores, or no image has such a name.
    """
    if detector.thresholds is None:
        raise DataError("the model has no scores of good images; give some good images")
    before = detector.thresholds.good
    bad = {*map(content_hash, known), *recorded(detector, "defects")} - {""}
    rows = [*before.rows(), *((out.name, 0.0, 0.0, out.sha256) for out in before.left_out)]
    found = [name for name, _, _, sha256 in rows if sha256 in bad]
    now = before.without([*without, *found])
    if found:
        log.warning("left out, known as defects: %s", some(found))
    if back := {out.name for out in before.left_out} - {out.name for out in now.left_out}:
        log.warning("left out before, counted now: %s", ", ".join(sorted(back)))
    return now


def sources(
    images: str | Path | Iterable[ImageLike], array_format: ArrayFormat, what: str = "good images"
) -> list[Path | Image]:
    """Images as a program names them: a folder, or a collection.

    Args:
        images: what it names; a single image is one of them.
        array_format: how arrays are to be taken.
        what: the images are, for messages; by that it is seen whether folders are called defects.

    Raises:
        DataError: there are none.
        ImageError: one can't be used; says which and why.
    """
    if isinstance(images, str | Path):
        paths = find_inputs([Path(images)], option=what).paths
        check_inputs([Path(images)], paths, defects=what == "defects")
        return list(paths)
    given = [images] if is_one(images) else list(images)
    files = [Path(image) for image in given if isinstance(image, str | os.PathLike)]
    check_inputs(files, files, defects=what == "defects")
    if not given:
        raise DataError(f"no {what} were given")
    return [array_format.source(image, index) for index, image in enumerate(given)]
