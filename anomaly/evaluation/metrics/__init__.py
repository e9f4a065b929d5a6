"""How good the scores are: arrays in, floats out.

A part or pixel counts as flagged when its score is *greater than* the threshold, here and
everywhere else. Metrics only measure; no threshold in use is ever taken from them.
"""

from anomaly.evaluation.metrics.curves import Curve, Metrics
from anomaly.evaluation.metrics.images import (
    Confusion,
    VerdictCounts,
    confusion,
    image_curves,
    image_intervals,
    image_metrics,
    metrics_by_type,
    recall_at_false_reject_rates,
)
from anomaly.evaluation.metrics.pixels import PixelAccumulator

__all__ = [
    "Confusion",
    "Curve",
    "Metrics",
    "PixelAccumulator",
    "VerdictCounts",
    "confusion",
    "image_curves",
    "image_intervals",
    "image_metrics",
    "metrics_by_type",
    "recall_at_false_reject_rates",
]
