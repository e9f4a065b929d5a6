"""Patches of good images -> a detector and its thresholds, without those that stand out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anomaly.calibration import GoodScores, thresholds_from
from anomaly.datasets import Sample
from anomaly.model.cross_fitting import Scoring, cross_fit
from anomaly.model.feature_cache import CachedFeatures
from anomaly.model.scoring import Model
from anomaly.model.suspects import Suspect, Suspects, standing_out
from anomaly.scorers.base import Fitter, Progress, Scorer

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DetectorFit:
    """What came of the patches.

    Attributes:
        detector: with thresholds, where they were wanted.
        images: the indices of those learned from, ascending.
        suspects: those that look least like the others, the worst first.
        stand_out: scores of those that stand out, by name, the worst first; all copies of one.
    """

    detector: Model
    images: tuple[int, ...]
    suspects: tuple[Suspect, ...]
    stand_out: dict[str, float]


def fit_detector(
    detector_of: Callable[[Scorer], Model],
    patches: CachedFeatures,
    fitter: Fitter[Any],
    samples: Sequence[Sample],
    *,
    calibrate: bool,
    score: Scoring | None = None,
    fitted: Callable[[], None],
    selecting: Progress,
    calibrating: Progress,
) -> DetectorFit:
    """Fit a scorer, find the thresholds, and look for images that stand out from all others.

    Where `model.leave_out_suspects` says so, what stands out is left out, and both are done again.

    Args:
        detector_of: makes a detector without thresholds of a scorer.
        patches: of all samples.
        fitter: of the scorer.
        samples: good images.
        calibrate: whether to find thresholds.
        score: see `cross_fit`.
        fitted: called once the first scorer is there.
        selecting: called with (done, total) while the scorer is fitted.
        calibrating: called with (images scored, all of them).
    """
    detector = detector_of(fitter.fit(patches, selecting))
    fitted()
    images, suspects = tuple(sorted(patches.hashes)), Suspects(patches.views)
    log.debug("%d patches of %d images learned", patches.count, len(images))
    pictures = patches.pictures()
    _warn_of_copies(pictures)
    leave_out = detector.config.model.leave_out_suspects
    if not (calibrate or leave_out):
        return DetectorFit(detector, images, (), {})

    def scored(
        some: CachedFeatures, used: Collection[int], suspects: Suspects | None
    ) -> GoodScores:
        return cross_fit(
            detector,
            some,
            fitter,
            {i: samples[i].name for i in used},
            pictures,
            folds=detector.config.calibration.folds,
            groups={i: group for i in used if (group := samples[i].group)},
            suspects=suspects,
            score=score,
            progress=calibrating,
        )

    good = scored(patches, images, suspects)
    scores = standing_out(good)
    odd = {pictures[i]: s for i in images if (s := scores.get(samples[i].name)) is not None}
    # One score of a picture stands for all copies, which are to be named as well.
    copies = sorted((i for i in images if pictures[i] in odd), key=lambda i: -odd[pictures[i]])
    stand_out = {samples[i].name: odd[pictures[i]] for i in copies}
    if leave_out and stand_out:
        images = tuple(i for i in images if pictures[i] not in odd)
        rest = patches.only(frozenset(images))
        detector = detector_of(fitter.fit(rest, selecting))
        good = replace(scored(rest, images, None), stood_out=len(stand_out))
    if calibrate:
        rates = detector.config.calibration
        thresholds = thresholds_from(good, rates.review_rate, rates.reject_rate)
        detector = replace(detector, thresholds=thresholds)
    return DetectorFit(detector, images, suspects.worst(), stand_out)


def _warn_of_copies(pictures: Mapping[int, str]) -> None:
    different = len(set(pictures.values()))
    if copies := len(pictures) - different:
        log.warning(
            "%d of %d training images are copies of others; different ones: %d. Each counts once "
            "for the thresholds, and copies teach nothing: photograph more parts in their place",
            copies,
            len(pictures),
            different,
        )
