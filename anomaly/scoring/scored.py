"""Samples -> scored images: one way for test splits, calibration, updates and golden parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anomaly.calibration import Thresholds
from anomaly.datasets import Sample
from anomaly.imaging.loading import UnusableImage
from anomaly.maps.regions import strips
from anomaly.methods.base import Progress
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction, verdict


@dataclass(frozen=True)
class Scored:
    """One image with its score.

    Attributes:
        sample: the image.
        score: the image score; None where it couldn't be scored.
        reason: why it couldn't be scored, or isn't called good whatever its score.
        sha256: of the file's bytes.
        status: `ok`, or that of an `UnusableImage`.
        peak: the highest value of the anomaly map, where that was asked for; else NaN.
        width: of its defect in original pixels, where that is widest; None without a mask.
    """

    sample: Sample
    score: float | None
    reason: str = ""
    sha256: str = ""
    status: str = "ok"
    peak: float = math.nan
    width: float | None = None

    @classmethod
    def of(
        cls, sample: Sample, result: Prediction | UnusableImage, *, peak: bool = False
    ) -> Scored:
        """A result with the sample that it is of."""
        if isinstance(result, UnusableImage):
            return cls(sample, None, result.reason, status=result.status)
        highest = _peak(result) if peak else math.nan
        return cls(sample, result.score, result.reason, result.sha256, peak=highest)

    @property
    def outlier(self) -> bool:
        """True if the image isn't called good whatever its score."""
        return self.score is not None and bool(self.reason)

    def verdict(self, thresholds: Thresholds | None) -> str:
        """`good`, `review` or `reject`, as `infer` says; empty without a score."""
        return "" if self.score is None else verdict(self.score, thresholds, self.reason)


def score(
    model: Model,
    samples: Sequence[Sample],
    *,
    peaks: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[Scored]:
    """Score images.

    Args:
        model: trained.
        samples: the images.
        peaks: whether the highest value of each anomaly map is wanted.
        progress: called with (images done, all of them).

    Returns:
        One for each sample, in their order; those that can't be used have no score.
    """
    scored: dict[int, Scored] = {}
    sources = [sample.source for sample in samples]
    for result in model.results(sources):
        scored[result.index] = Scored.of(samples[result.index], result, peak=peaks)
        progress(len(scored), len(samples))
    return [scored[i] for i in range(len(samples))]


def _peak(result: Prediction) -> float:
    # Rows outside the region to look at are NaN all along.
    rows = strips(result.view.source)
    peaks = [np.fmax.reduce(result.source_map(strip), axis=None) for strip in rows]
    return float(np.fmax.reduce(peaks))
