"""Detector × test split -> Evaluation. Only measures: nothing here ever sets a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anomaly.datasets import Sample, ground_truth
from anomaly.detector import AnomalyDetector, Prediction
from anomaly.errors import DataError
from anomaly.loading import Refused
from anomaly.metrics import Metrics, PixelAccumulator, image_metrics
from anomaly.scorers.base import Progress


@dataclass(frozen=True)
class Scored:
    """One test image with its score; None and a reason where it couldn't be scored."""

    sample: Sample
    image_score: float | None
    reason: str = ""


@dataclass(frozen=True)
class Evaluation:
    """How good a detector's scores are on a test split.

    Attributes:
        name: of the model.
        scored: every test image, in the data set's order.
        metrics: image and pixel figures; a None has its reason.
    """

    name: str
    scored: tuple[Scored, ...]
    metrics: Metrics

    @property
    def n_good(self) -> int:
        """Good images that were scored."""
        return sum(s.image_score is not None and not s.sample.is_defect for s in self.scored)

    @property
    def n_defect(self) -> int:
        """Defective images that were scored."""
        return sum(s.image_score is not None and s.sample.is_defect for s in self.scored)


def evaluate(
    detector: AnomalyDetector,
    samples: Sequence[Sample],
    *,
    mask_above: int = 0,
    workers: int = 2,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Score a test split and compare with the ground truth, pixels at the images' own resolution.

    Args:
        detector: trained.
        samples: good and defective images; a defective one without a mask counts for the image
            metrics only.
        mask_above: mask values above this are defect.
        workers: decoding threads.
        progress: called with (done, total).

    Raises:
        DataError: no images at all, or a mask that doesn't fit its image.
    """
    if not samples:
        raise DataError("the test split is empty: there is nothing to evaluate")
    pixels = PixelAccumulator()
    scored: dict[int, Scored] = {}
    for result in detector.predict([s.path for s in samples], workers=workers):
        sample = samples[result.index]
        if isinstance(result, Refused):
            scored[result.index] = Scored(sample, None, result.reason)
        else:
            scored[result.index] = Scored(sample, result.image_score)
            _compare_pixels(pixels, result, sample, mask_above)
        progress(len(scored), len(samples))
    rows = tuple(scored[i] for i in range(len(samples)))
    usable = [(r.image_score, r.sample.is_defect) for r in rows if r.image_score is not None]
    figures = image_metrics([score for score, _ in usable], [defect for _, defect in usable])
    return Evaluation(detector.config.name, rows, figures | pixels.result())


def _compare_pixels(
    pixels: PixelAccumulator, result: Prediction, sample: Sample, mask_above: int
) -> None:
    if sample.is_defect and sample.mask_path is None:
        return
    pixels.update(result.anomaly_map(), ground_truth(sample, result.view.source, mask_above))
