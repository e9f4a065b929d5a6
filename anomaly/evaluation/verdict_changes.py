"""What two detectors say of the same images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anomaly.datasets import Sample
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.model.build import fitter_of
from anomaly.model.cross_fitting import scores_of
from anomaly.model.feature_cache import FeatureCache
from anomaly.model.prediction import verdict
from anomaly.model.scoring import Model

log = logging.getLogger(__name__)

_AT_ONCE = 64  # images whose features are kept in a temporary file


@dataclass(frozen=True)
class Compared:
    """What two detectors say of one image.

    Attributes:
        name: of the image.
        before: the verdict of the one.
        after: of the other.
        scores: of both.
    """

    name: str
    before: str
    after: str
    scores: tuple[float, float]

    @property
    def escapes(self) -> bool:
        """It was caught, and would pass."""
        return self.before != "good" and self.after == "good"

    def __str__(self) -> str:
        before, after = self.scores
        return f"{self.name}: {self.before} -> {self.after} ({before:.4g} -> {after:.4g})"


def verdict_changes(
    both: tuple[Model, Model],
    samples: Sequence[Sample],
    scratch: Path,
    workers: int,
    progress: partial[None],
) -> Iterator[Compared]:
    """What two detectors that share their network say of images.

    Args:
        both: the detectors.
        samples: the images.
        scratch: where temporary files go.
        workers: decoding processes.
        progress: called with (done, total).

    Yields:
        One for each image that can be used; of the others a warning in the log says why.
    """
    before = both[0]
    with Decoders(min(workers, len(samples)), Task(before.loading)) as decoders:
        for start in range(0, len(samples), _AT_ONCE):
            some = samples[start : start + _AT_ONCE]
            images = {i: sample.source for i, sample in enumerate(some)}
            cache = FeatureCache(before, fitter_of(before.config), decoders, scratch)
            with closing(cache):
                features = cache.build(images, turned=False)
                found = [scores_of(detector, features, features.views) for detector in both]
            for i in sorted(found[0]):
                pair = found[0][i][0], found[1][i][0]
                first, second = (
                    verdict(score, detector.thresholds, detector.reason_to_look(features.looks[i]))
                    for detector, score in zip(both, pair, strict=True)
                )
                yield Compared(some[i].name, first, second, pair)
            for refused in features.refused:
                log.warning("skipped: %s", refused.reason)
            progress(start + len(some), len(samples))
