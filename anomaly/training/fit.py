"""Good images -> a model, its thresholds, and the images that stand out."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from anomaly.calibration import GoodScores, thresholds_from
from anomaly.config.schema import Config
from anomaly.datasets import Sample
from anomaly.errors import DataError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.read import Image
from anomaly.methods.base import Fitter, Progress, Scorer
from anomaly.scoring.image_statistics import TrainingStatistics, outliers_among
from anomaly.scoring.pipeline import Model
from anomaly.storage.save import manifest_of
from anomaly.training.cross_fitting import (
    Scoring,
    Suspect,
    Suspects,
    cross_fit,
    split,
    standing_out,
)
from anomaly.training.feature_cache import CachedFeatures, FeatureCache
from anomaly.training.setup import TrainingSetup, prepare

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


StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Training:
    """A fitted detector and what is worth knowing about how it came to be.

    Attributes:
        detector: ready to predict.
        learned: how many training images were learned from.
        refused: why a training image couldn't be used, by name.
        patches: how many patches were learned from.
        seconds: by stage.
        patch_pixels: height and width of one patch in original pixels, in the median.
        odd: training images that would be `review` for not being our part, had they not been
            learned from, by name.
        suspects: training images that look least like the others, the worst first; found on the
            way to the thresholds.
        stand_out: scores of those that stand out from all others, the worst first; see
            `anomaly.training.cross_fitting.standing_out`. With `model.leave_out_suspects` nothing
            was learned from them.
    """

    detector: Model
    learned: int
    refused: dict[str, str]
    patches: int
    seconds: dict[str, float]
    patch_pixels: tuple[float, float]
    odd: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    stand_out: Mapping[str, float]


class SharedFeatures(Protocol):
    """Features of the training images that other machines compute, keep and score."""

    @property
    def shard(self) -> int:
        """How many images a worker computes together."""

    @property
    def score(self) -> Scoring:
        """Scores images where their features are; see `cross_fit`."""

    def build(self) -> CachedFeatures:
        """Have all features computed."""

    def close(self) -> None:
        """Delete what was kept."""


SharedFeaturesOf: TypeAlias = Callable[
    [TrainingSetup, Mapping[int, Path | Image], Path, Progress], SharedFeatures
]


def train(
    config: Config,
    samples: Sequence[Sample],
    *,
    device: torch.device,
    scratch: Path,
    workers: int = 2,
    calibrate: bool = True,
    shared: SharedFeaturesOf | None = None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Training:
    """Learn what good looks like.

    The thresholds come from cross-fitted scores of the same images, see
    `anomaly.training.cross_fitting`; the detector itself learns from all of them.

    Args:
        config: all settings; `config.data` isn't read.
        samples: good images.
        device: where the network and the scorer run.
        scratch: an existing folder for temporary files.
        workers: decoding processes.
        calibrate: whether to find thresholds.
        shared: has other machines compute features and scores; all of them see `scratch`.
        progress: called with (stage, done, total).

    Raises:
        DataError: two images have one name; a model knows its training images by their names. Or
            there are too few to find thresholds with.
        AnomalyError: weights, layers or images can't be used as configured.
    """
    for name, times in Counter(sample.name for sample in samples).items():
        if times > 1:
            raise DataError(f"{times} training images have the name {name!r}; each needs its own")
    if calibrate or config.model.leave_out_suspects:  # told before anything is computed
        split(range(len(samples)), {}, config.calibration.folds)
    with Decoders(min(workers, len(samples))) as decoders:
        return _train(config, samples, decoders, device, scratch, calibrate, shared, progress)


def _train(
    config: Config,
    samples: Sequence[Sample],
    decoders: Decoders,
    device: torch.device,
    scratch: Path,
    calibrate: bool,
    shared: SharedFeaturesOf | None,
    progress: StageProgress,
) -> Training:
    clock = _Clock()
    setup = prepare(config, samples, decoders, device)
    clock.lap("backbone")

    def computed(done: int, total: int) -> None:
        progress("features", done, total)
        if done == total:
            decoders.rest()

    images = {i: sample.source for i, sample in enumerate(samples)}
    elsewhere: SharedFeatures | None = None
    with ExitStack() as opened:
        if shared is None:
            cache = FeatureCache(setup, setup.fitter, decoders, scratch, computed)
            features = opened.enter_context(closing(cache)).build(images)
        else:
            elsewhere = opened.enter_context(closing(shared(setup, images, scratch, computed)))
            features = elsewhere.build()
        features.checked()
        clock.lap("features")
        fit = fit_detector(
            setup.detector,
            features,
            setup.fitter,
            samples,
            calibrate=calibrate,
            score=None if elsewhere is None else elsewhere.score,
            fitted=lambda: clock.lap("scorer"),
            selecting=lambda done, total: progress("scorer", done, total),
            calibrating=lambda done, total: progress("calibration", done, total),
        )
        if fit.suspects:
            clock.lap("calibration")
    spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in clock.seconds.items())
    log.debug("time: %s", spent)
    shard = None if elsewhere is None else elsewhere.shard
    return _training(fit, features, samples, setup.weights_sha256, shard, clock.seconds)


def _training(
    fit: DetectorFit,
    features: CachedFeatures,
    samples: Sequence[Sample],
    weights_sha256: str | None,
    shard: int | None,
    seconds: dict[str, float],
) -> Training:
    """What came of a fit, with what is known of the images; `shard` of them went together."""
    used, detector = fit.images, fit.detector
    statistics = [features.statistics[i] for i in used]
    hashes = {samples[i].name: features.hashes[i] for i in used}
    unused = {samples[i].name: i for i in sorted({*range(len(samples))} - {*used})}
    manifest = manifest_of(detector, weights_sha256, hashes, unused)
    if shard is not None:
        manifest["made_with"]["shard_images"] = shard
    return Training(
        detector=replace(
            detector, training_statistics=TrainingStatistics.of(statistics), manifest=manifest
        ),
        learned=len(used),
        refused={samples[r.index].name: r.reason for r in features.refused},
        patches=features.only(frozenset(used)).count,
        seconds=seconds,
        patch_pixels=_patch_pixels(features, min(detector.extractor.strides)),
        odd=tuple(samples[used[place]].name for place in outliers_among(statistics)),
        suspects=fit.suspects,
        stand_out=fit.stand_out,
    )


def _patch_pixels(features: CachedFeatures, stride: int) -> tuple[float, float]:
    """Original pixels that one patch is high and wide."""
    axes = [[pieces[0] for pieces in view.axes] for view in features.views.values()]
    height, width = (
        statistics.median(stride * axis.source / axis.resized for axis in one)
        for one in zip(*axes, strict=True)
    )
    return height, width


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now
