"""Settings tried: trained as `train` does, and what they score known images. Judges nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anomaly.calibration.thresholds import Calibration, calibrate
from anomaly.config.schema import Config
from anomaly.datasets import Sample
from anomaly.imaging.geometry import AnyView
from anomaly.methods.base import PatchBatch
from anomaly.scoring.build import fitter_of
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.pipeline import Model
from anomaly.training.cross_fitting import Suspects, is_turned, patch_pieces
from anomaly.training.feature_cache import CachedFeatures, FeatureCache
from anomaly.training.fit import (
    DetectorFit,
    StageProgress,
    Stages,
    fit_detector,
    patch_pixels_of,
    prepare,
)
from anomaly.training.tuning.judging import Scores


@dataclass(frozen=True)
class Images:
    """The images for trying settings.

    Attributes:
        train: good images to learn from.
        defects: known ones.
        good: other good images, which nothing is learned from.
    """

    train: tuple[Sample, ...]
    defects: tuple[Sample, ...] = ()
    good: tuple[Sample, ...] = ()

    @property
    def every(self) -> tuple[Sample, ...]:
        """All images, in the order of `Scores.every`."""
        return (*self.defects, *self.train, *self.good)

    @property
    def parts(self) -> int:
        """Number of parts that the known defects are on."""
        return len({sample.group or i for i, sample in enumerate(self.defects)})


@dataclass(frozen=True, eq=False)
class Trial:
    """The result of one set of settings.

    Attributes:
        config: the settings.
        thresholds: those that `train` would find.
        scores: of all images; NaN for one that can't be scored, and for a training image that
            thresholds don't stand on, a copy of another, say; infinite for one that has a reason
            for review whatever its score.
        seconds: that the trial took, by stage; scores that share them have all of them.
        image_seconds: that an image takes to be embedded and scored, without decoding.
        bank_bytes: of the model's tensors.
        patch_pixels: original pixels that one patch is high and wide, in the median.
    """

    config: Config
    thresholds: Calibration
    scores: Scores
    seconds: Mapping[str, float] = field(default_factory=dict)
    image_seconds: float = 0.0
    bank_bytes: int = 0
    patch_pixels: tuple[float, float] = (0.0, 0.0)


class Features:
    """Features of all images under the settings that make them, for trials that share them.

    Args:
        config: the settings; of `model` those count that features hang on.
        images: to learn from and to score.
        device: where the network and the scorer run.
        scratch: an existing folder for temporary files.
        progress: called with (stage, done, total).
    """

    def __init__(
        self,
        config: Config,
        images: Images,
        *,
        device: torch.device,
        scratch: Path,
        progress: StageProgress = lambda stage, done, total: None,
    ) -> None:
        self._images = images
        self._progress = progress
        started = time.perf_counter()
        self._setup = prepare(config, images.train, device)
        seen = partial(progress, "features")
        self._cache = FeatureCache(self._setup, self._setup.fitter, scratch, seen)
        try:
            learned = {i: sample.source for i, sample in enumerate(images.train)}
            self._train = self._cache.build(learned).checked()
            between = time.perf_counter()
            known = [*images.defects, *images.good]
            sources = {i: sample.source for i, sample in enumerate(known)}
            self._known = self._cache.build(sources, learned=False) if known else None
        except BaseException:
            self._cache.close()
            raise
        self._seconds = {"features": between - started, "known": time.perf_counter() - between}

    @property
    def hashes(self) -> dict[int, str]:
        """sha256 of the known images that can be used, by their places: defects, then good ones."""
        return {} if self._known is None else self._known.hashes

    def close(self) -> None:
        """Delete the temporary files."""
        self._cache.close()

    def trials(self, configs: Sequence[Config]) -> list[Trial]:
        """Train with the first settings; return the scores of all images by each of them.

        Args:
            configs: equal but in `model.image_score`: they share the patch scores, which take the
                time.
        """
        settled = {"precision": self._setup.config.precision}
        configs = [config.model_copy(update=settled) for config in configs]
        setup = replace(self._setup, config=configs[0], fitter=self._fitter(configs[0]))
        started = time.perf_counter()
        recorded = Recorder(configs)
        fit = fit_detector(
            setup,
            self._train,
            self._images.train,
            Stages(self._progress),
            calibrate=True,
            score=recorded,
        )
        thresholds = fit.detector.thresholds
        assert thresholds is not None  # they were asked for
        held_out = recorded.scores
        learned = time.perf_counter()
        scores: list[dict[int, float]] = [{} for _ in configs]
        if self._known is not None:
            scores = scores_by(fit.detector, configs, self._known, self._known.views)
            self._flag(self._known, fit, scores)
        scored = time.perf_counter()
        count = max(1, 0 if self._known is None else len(self._known.hashes))
        split = len(self._images.defects)
        self._forget_learned(scores, split)
        standing = set(thresholds.good.names)  # copies and what stands out are left out
        rates, groups = configs[0].calibration, thresholds.good.groups
        tensors = fit.detector.scorer.tensors().values()
        patches = patch_pixels_of(self._train, min(setup.extractor.strides))
        trials = []
        for config, of_good, of_known in zip(configs, held_out, scores, strict=True):
            good = [
                of_good.get(i, np.nan) if sample.name in standing else np.nan
                for i, sample in enumerate(self._images.train)
            ]
            known = [of_known.get(i, np.nan) for i in range(split + len(self._images.good))]
            trials.append(
                Trial(
                    config,
                    calibrate(
                        [score for score in good if not np.isnan(score)],
                        review_rate=rates.review_rate,
                        reject_rate=rates.reject_rate,
                        groups=groups,
                    ),
                    Scores(*map(np.array, (good, known[:split], known[split:]))),
                    self._seconds | {"learning": learned - started, "scoring": scored - learned},
                    (self._seconds["known"] + scored - learned) / count,
                    sum(t.numel() * t.element_size() for t in tensors),
                    patches,
                )
            )
        return trials

    def _forget_learned(self, scores: Sequence[dict[int, float]], split: int) -> None:
        """Leave out good images that are copies of training images: these score too low."""
        learned = set(self._train.hashes.values())
        for i, sha256 in self.hashes.items():
            if i >= split and sha256 in learned:
                for of_known in scores:
                    of_known.pop(i, None)

    def _flag(
        self, known: CachedFeatures, fit: DetectorFit, scores: Sequence[dict[int, float]]
    ) -> None:
        """Give images with a reason for review, which no score makes good, an infinite score."""
        learned = TrainingStatistics.of([self._train.statistics[i] for i in fit.images])
        detector = replace(fit.detector, training_statistics=learned)
        for i, statistics in known.statistics.items():
            if detector.review_reason(known.views[i], statistics):
                for of_known in scores:
                    of_known[i] = math.inf

    def _fitter(self, config: Config) -> Any:
        extractor = self._setup.extractor
        return fitter_of(config).prepared(sum(extractor.channels), self._setup.device)


class Recorder:
    """A `Scoring` that scores by several settings, and gives those of the first."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self._configs = configs
        self.scores: list[dict[int, float]] = [{} for _ in configs]

    def __call__(
        self,
        detector: Model,
        batches: Iterable[PatchBatch],
        views: Mapping[int, AnyView],
        *,
        suspects: Suspects | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> dict[int, tuple[float, float]]:
        """Score patches by each of the settings."""
        scores = scores_by(detector, self._configs, batches, views, progress)
        for all_of_it, more in zip(self.scores, scores, strict=True):
            all_of_it.update(more)
        return {i: (score, score) for i, score in scores[0].items()}


def scores_by(
    detector: Model,
    configs: Sequence[Config],
    batches: Iterable[PatchBatch],
    views: Mapping[int, AnyView],
    progress: Callable[[int], None] = lambda done: None,
) -> list[dict[int, float]]:
    """Image scores by settings and image; for tiles, that of the worst tile.

    Args:
        detector: what scores patches.
        configs: equal but in what image scores are made of.
        batches: the images' patches; those of turned copies aren't scored.
        views: how each image was turned into the network's input.
        progress: called with the images scored so far.
    """
    detectors = [replace(detector, config=config) for config in configs]
    found: list[dict[int, float]] = [{} for _ in configs]
    for batch in batches:
        if is_turned(batch):
            continue
        pieces = patch_pieces(batch, views)
        patches = detector.scorer.score(batch.embeddings)
        for known, one in zip(found, detectors, strict=True):
            _, scores = one.image_scores_of(patches, batch.embeddings, pieces, batch.inside)
            for image, score in zip(batch.images, scores.tolist(), strict=True):
                known[image] = max(known.get(image, score), score)
        progress(len(found[0]))
    return found
