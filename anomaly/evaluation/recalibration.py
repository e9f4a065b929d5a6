"""Other thresholds for a trained model, from images it hasn't learned from and isn't judged by."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from anomaly.calibration import (
    Choice,
    Costs,
    GoodScores,
    Rate,
    Thresholds,
    recall_at,
    thresholds_by_cost,
    thresholds_by_hand,
    thresholds_from,
)
from anomaly.datasets import check_good_inputs
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, DataError
from anomaly.evaluation.test_split import tested_hashes
from anomaly.imaging.preprocessing import Refused
from anomaly.model.checkpoint import Model
from anomaly.model.detector import AnomalyDetector
from anomaly.model.prediction import Prediction
from anomaly.model.training import StageProgress
from anomaly.scorers.base import Progress

log = logging.getLogger(__name__)

_STRIP = 2048  # rows of an anomaly map at once; a large image's whole map may not fit into memory


@dataclass(frozen=True)
class Unseen:
    """Images with their scores, in the order of their files.

    Attributes:
        paths: of the images that were scored.
        image: their image scores.
        peak: the highest value of each one's anomaly map.
        hashes: sha256 of each file.
        learned: images left out because the model has learned from them.
        repeated: images left out because another one has the same bytes.
        refused: why others can't be used.
    """

    paths: tuple[Path, ...]
    image: tuple[float, ...]
    peak: tuple[float, ...]
    hashes: tuple[str, ...]
    learned: int
    repeated: int
    refused: tuple[str, ...]


def score_unseen(
    detector: AnomalyDetector,
    paths: Sequence[Path],
    *,
    learned: Collection[str],
    tested: Collection[str],
    workers: int = 2,
    progress: Progress = lambda done, total: None,
) -> Unseen:
    """Score images that thresholds may hang on.

    Args:
        detector: trained.
        paths: image files.
        learned: sha256 of the images it has learned from, whose scores say too little.
        tested: sha256 of the test split's images, which no threshold may see.
        workers: decoding processes.
        progress: called with (images done, all of them).

    Raises:
        DataError: an image belongs to the test split, or none is left.
    """
    rows: dict[int, tuple[float, float, str]] = {}
    refused: list[str] = []
    met: set[str] = set()
    known = repeated = 0
    for done, result in enumerate(detector.predict(paths, workers=workers), 1):
        progress(done, len(paths))
        if isinstance(result, Refused):
            refused.append(result.reason)
            continue
        sha256 = result.sha256
        if sha256 in tested:
            raise DataError(
                f"{paths[result.index]} belongs to the test split that the model is evaluated on, "
                "which no threshold may see; give other images"
            )
        if sha256 in learned:
            known += 1
        elif sha256 in met:
            repeated += 1
        else:
            rows[result.index] = (result.image_score, _peak(result), sha256)
        met.add(sha256)
    if not rows:
        reasons = [f"{known} the model has learned from"] if known else []
        reasons += refused[:3]
        raise DataError(f"none of {len(paths)} images can be used: {'; '.join(reasons)}")
    order = sorted(rows)
    image, peak, hashes = zip(*(rows[i] for i in order), strict=True)
    files = tuple(paths[i] for i in order)
    return Unseen(files, image, peak, hashes, known, repeated, tuple(refused))


def _peak(result: Prediction) -> float:
    height = result.view.source[0]
    strips = (slice(top, min(top + _STRIP, height)) for top in range(0, height, _STRIP))
    # Rows outside the region to look at are NaN all along.
    peaks = (np.fmax.reduce(result.anomaly_map(strip), axis=None) for strip in strips)
    return float(np.fmax.reduce(list(peaks)))


@dataclass(frozen=True)
class Wish:
    """How thresholds are to be chosen: by rates unless there are costs or they are set by hand.

    Attributes:
        review_rate: share of good parts that may not be called good; None for the model's.
        reject_rate: share of good parts that may be rejected; None for the model's.
        costs: of mistakes, to weigh by the scores of defects.
        review: the review threshold, set by hand; None for the reject threshold.
        reject: the reject threshold, set by hand.
    """

    review_rate: float | None = None
    reject_rate: float | None = None
    costs: Costs | None = None
    review: float | None = None
    reject: float | None = None


def score_given(
    model: Model,
    folder: Path,
    given: Mapping[str, Sequence[Path]],
    *,
    data_root: Path | None = None,
    workers: int = 2,
    progress: StageProgress = lambda name, done, total: None,
) -> dict[str, Unseen]:
    """Score the images that thresholds are to hang on.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.
        given: image files and folders of `good` images, of `defects`, or of both.
        data_root: the data sets' folder, where it has moved since training.
        workers: decoding processes.
        progress: called with (`good` or `defects`, images done, all of them).

    Raises:
        DataError: there are no images, the model is tested with one of them, or has learned from
            all of them.
    """
    found = {name: find_inputs(paths, option=f"--{name}").paths for name, paths in given.items()}
    check_good_inputs(given.get("good", ()), found.get("good", ()))
    tested = _tested(model, folder, data_root) if given else frozenset()
    scored: dict[str, Unseen] = {}
    for name, paths in found.items():
        scored[name] = score_unseen(
            model.detector,
            paths,
            learned=frozenset(model.manifest["training_images"].values()),
            tested=tested,
            workers=workers,
            progress=partial(progress, name),
        )
        _say_left_out(f"--{name}", scored[name])
    return scored


def good_scores(
    model: Model, folder: Path, new: Unseen | None, without: Sequence[str] = ()
) -> GoodScores:
    """The scores of good images: new ones, or those that the model came with.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.
        new: images that the model hasn't learned from; None for the scores it has.
        without: names of images to leave out; all others count (again).

    Raises:
        DataError: the model has no scores, or there is no image of such a name.
    """
    now = model.detector.thresholds
    if new is not None:
        names = tuple(path.name for path in new.paths)
        source = f"{len(names)} good images that the model hasn't learned from"
        return GoodScores(names, new.image, new.peak, source).without(without)
    if now is None:
        raise DataError(
            f"{folder} was trained with --no-calibrate and knows no scores of good images; "
            "give --good with a folder of some"
        )
    good = now.good.without(without)
    if back := {out[1] for out in now.good.left_out} - {out[1] for out in good.left_out}:
        log.warning("left out before, and counted again: %s", ", ".join(sorted(back)))
    return good


def choose(
    model: Model, good: GoodScores, defects: Unseen | None, wish: Wish
) -> tuple[Thresholds, Choice | None]:
    """The thresholds that are wished for, and what was chosen by cost, if anything.

    Raises:
        AnomalyError: the wish contradicts itself.
    """
    if wish.reject is not None:
        review = wish.reject if wish.review is None else wish.review
        if review > wish.reject:
            raise AnomalyError(
                f"--review-threshold {review:g} lies above --threshold {wish.reject:g}"
            )
        return thresholds_by_hand(good, review, wish.reject), None
    review_rate, reject_rate = _rates(model, wish)
    if wish.costs is None or defects is None:
        return thresholds_from(good, review_rate, reject_rate), None
    return thresholds_by_cost(good, defects.image, wish.costs, review_rate=review_rate)


def recalls(thresholds: Thresholds, defects: Unseen, choice: Choice | None) -> dict[str, Rate]:
    """How many defects are `rejected`, and how many are `not called good`.

    Only thresholds by rate are sure not to have been chosen by these defects.
    """
    found = {}
    for what, value in (("rejected", thresholds.image), ("not called good", thresholds.review)):
        rate = recall_at(value, defects.image, chosen=thresholds.label != "calibrated")
        if choice is not None and value == choice.threshold.value:
            rate = choice.recall
        found[what] = rate
    return found


def _say_left_out(option: str, images: Unseen) -> None:
    if images.learned:
        log.warning("%s: the model has learned from %d; left out", option, images.learned)
    if images.repeated:
        log.warning("%s: %d are copies of others; left out", option, images.repeated)
    for reason in images.refused[:5]:
        log.warning("skipped: %s", reason)
    if len(images.refused) > 5:
        log.warning("%s: skipped %d more", option, len(images.refused) - 5)


def _tested(model: Model, folder: Path, data_root: Path | None) -> frozenset[str]:
    """Hashes of the test split, where the run remembers its data set and it is still there."""
    try:
        return tested_hashes(model, folder, data_root)
    except AnomalyError as error:
        if data_root is not None:
            raise
        log.warning(
            "%s: make sure yourself that these images aren't those the model is evaluated on, or "
            "name the data set's folder with --data-root",
            error,
        )
        return frozenset()


def _rates(model: Model, wish: Wish) -> tuple[float, float]:
    """Rates of review and of rejection: those given, else the model's, else the config's."""
    config = model.detector.config.calibration
    now = model.detector.thresholds
    review = (now and now.calibration.review.target) or config.review_rate
    reject = (now and now.calibration.reject.target) or config.reject_rate
    review, reject = wish.review_rate or review, wish.reject_rate or reject
    if reject <= review:
        return review, reject
    if wish.review_rate is not None and wish.reject_rate is not None:
        raise AnomalyError(
            f"--false-reject-rate {reject:g} is above --review-rate {review:g}; what is rejected "
            "is never called good"
        )
    # Only one was given: the other gives way.
    return (review, review) if wish.review_rate is not None else (reject, reject)
