"""Detector × test split -> Evaluation. Only measures: nothing here ever sets a threshold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.thresholds import Thresholds
from anomaly.datasets import Sample, ground_truth
from anomaly.datasets.samples import contradiction, maybe_turned
from anomaly.errors import DataError, ImageError, some
from anomaly.evaluation.metrics import (
    Confusion,
    Metrics,
    PixelAccumulator,
    confusion,
    image_intervals,
    image_metrics,
    metrics_by_type,
)
from anomaly.evaluation.splits import threshold_images
from anomaly.imaging.loading import UnusableImage, picture_of
from anomaly.imaging.pool import read_one
from anomaly.runtime import Progress
from anomaly.scoring.model import Model
from anomaly.scoring.prediction import Prediction, Scored

log = logging.getLogger(__name__)

Map = NDArray[np.float32]
Mask = NDArray[np.bool_]
# What else to do with an image while it is at hand: (prediction, sample, anomaly map, mask). The
# mask is None for a defective image without one.
Visit = Callable[[Prediction, Sample, Map, Mask | None], None]


@dataclass(frozen=True)
class Evaluation:
    """How good a detector's scores are on a test split.

    Attributes:
        name: of the model.
        scored: every test image, in the data set's order.
        metrics: image and pixel figures; a None has its reason.
        intervals: of the image figures, by name, each with at least 95 % confidence.
        by_type: each type of defect's figures against all good images.
        thresholds: the model's own; None where it has none.
        n_threshold_images: how many of the images the thresholds were chosen with.
        n_settings_images: how many of them the settings were chosen with, see `anomaly.tune`.
    """

    name: str
    scored: tuple[Scored, ...]
    metrics: Metrics
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    by_type: dict[str, Metrics] = field(default_factory=dict)
    thresholds: Thresholds | None = None
    n_threshold_images: int = 0
    n_settings_images: int = 0

    @property
    def usable(self) -> list[tuple[Scored, float]]:
        """The images that have a score, with it."""
        return [(row, row.score) for row in self.scored if row.score is not None]

    @property
    def n_good(self) -> int:
        """Good images that were scored."""
        return len(self.usable) - self.n_defect

    @property
    def n_defect(self) -> int:
        """Defective images that were scored."""
        return sum(row.sample.is_defect for row, _ in self.usable)

    @property
    def verdicts(self) -> Confusion | None:
        """What the model's own thresholds did; None where it has none."""
        if self.thresholds is None:
            return None
        rows = [row for row, _ in self.usable]
        return confusion(
            [row.verdict(self.thresholds) for row in rows],
            [row.sample.is_defect for row in rows],
            [row.sample.defect_type for row in rows],
        )


def score_test_split(
    detector: Model,
    samples: Sequence[Sample],
    *,
    progress: Progress = lambda done, total: None,
    visit: Visit = lambda prediction, sample, anomaly_map, mask: None,
) -> Evaluation:
    """Score a test split and compare with the ground truth, pixels at the images' own resolution.

    Args:
        detector: trained.
        samples: good and defective images; a defective one without a mask, or whose mask marks
            nothing, counts for the image metrics only.
        progress: called with (done, total).
        visit: called with every scored image; nothing of it is kept here.

    Raises:
        DataError: no images at all, one picture as good and as a defect, or a mask that contradicts
            its image. An image whose mask can't be read is left out like one that can't be read
            itself.
    """
    if not samples:
        raise DataError("the test split is empty: there is nothing to evaluate")
    pixels = PixelAccumulator()
    scored: dict[int, Scored] = {}
    first: dict[str, Sample] = {}  # that shows a picture
    good = {sha256: name for name, sha256 in detector.manifest.get("training_images", {}).items()}
    for result in detector.results([s.source for s in samples], keep_images=True):
        sample = samples[result.index]
        try:
            if isinstance(result, UnusableImage):
                raise ImageError(result.reason, result.status)
            assert result.image is not None
            same = first.setdefault(picture_of(result.image), sample)
            if contrary := contradiction(same, sample) or _learned(sample, result.sha256, good):
                raise contrary
            mask = _mask(sample, result.view.source)
        except ImageError as error:
            scored[result.index] = Scored(sample, None, str(error), status=error.status)
        else:
            if mask is not None and sample.is_defect and not mask.any():
                mask = None  # or it would count as a good image's
            width = None if mask is None or not sample.is_defect else width_of(mask)
            scored[result.index] = replace(Scored.of(sample, result), width=width)
            anomaly_map = result.anomaly_map
            if mask is not None:
                pixels.update(anomaly_map, mask)
                if doubt := maybe_turned(sample, result.image):
                    log.warning("%s", doubt)
            visit(result, sample, anomaly_map, mask)
        progress(len(scored), len(samples))
    rows = tuple(scored[i] for i in range(len(samples)))
    defects = [row for row in rows if row.sample.is_defect and row.score is not None]
    unmarked = [str(row.sample.path) for row in defects if row.width is None]
    if 0 < len(unmarked) < len(defects):
        log.warning(
            "%d of %d defects have no mask, or one that marks nothing (%s); they count in image "
            "figures, not in pixel figures",
            len(unmarked),
            len(defects),
            some(unmarked),
        )
    return _evaluation(detector, rows, pixels.result())


def _evaluation(detector: Model, rows: tuple[Scored, ...], of_pixels: Metrics) -> Evaluation:
    """The figures of scored images."""
    known = [(r.score, r.sample) for r in rows if r.score is not None]
    scores, labels = [score for score, _ in known], [s.is_defect for _, s in known]
    chosen_with = threshold_images(detector)
    return Evaluation(
        detector.config.name,
        rows,
        image_metrics(scores, labels) | of_pixels,
        image_intervals(scores, labels),
        metrics_by_type(scores, labels, [s.defect_type for _, s in known]),
        detector.thresholds,
        sum(row.sha256 in chosen_with for row in rows),
        sum(detector.config.has_chosen(row.sha256) for row in rows),
    )


def width_of(mask: Mask) -> float:
    """The width of a defect where it is widest, in pixels of its mask (H, W)."""
    return 2 * float(cv2.distanceTransform(mask.astype(np.uint8), cv2.DIST_L2, 3).max())


def _learned(sample: Sample, sha256: str, good: Mapping[str, str]) -> DataError | None:
    """The error of a defect that was learned as good.

    Args:
        sample: to test with.
        sha256: of its file.
        good: names of the images that were learned from, by theirs.
    """
    if not sample.is_defect or sha256 not in good:
        return None
    return DataError(
        f"{sample.path} is labelled as a defect ({sample.defect_type}), but the model has learned "
        f"it as good ({good[sha256]}); look at it. If it is a defect, remove it from the training "
        "images and train again; if it is good, remove it from the defects"
    )


def _mask(sample: Sample, size: tuple[int, int]) -> Mask | None:
    if sample.mask_path is None:
        return None if sample.is_defect else ground_truth(sample, size)
    try:
        mask = read_one(ground_truth, sample, size, about=sample.mask_path)
    except ImageError as error:
        reason = f"{sample.path} is left out, because its mask can't be used: {error}"
        raise ImageError(reason, error.status) from None
    return np.asarray(mask, bool)
