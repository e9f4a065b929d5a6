"""Thresholds from good images alone: how many good parts they will reject, and how sure that is.

Pure statistics of scores; nothing here knows a model or sees a test split.
"""

from anomaly.calibration.costs import Choice, Costs, cheapest_threshold, recall_at
from anomaly.calibration.model_thresholds import (
    Thresholds,
    thresholds_by_cost,
    thresholds_by_hand,
    thresholds_from,
)
from anomaly.calibration.rates import (
    Rate,
    ScoreScale,
    images_needed,
    rate_of,
    supported_rate,
)
from anomaly.calibration.scores import GoodScores
from anomaly.calibration.thresholds import (
    Calibration,
    Threshold,
    calibrate,
    threshold_at,
    threshold_for_expected_rate,
    threshold_for_false_reject_rate,
    verdict,
)

__all__ = [
    "Calibration",
    "Choice",
    "Costs",
    "GoodScores",
    "Rate",
    "ScoreScale",
    "Threshold",
    "Thresholds",
    "calibrate",
    "cheapest_threshold",
    "images_needed",
    "rate_of",
    "recall_at",
    "supported_rate",
    "threshold_at",
    "threshold_for_expected_rate",
    "threshold_for_false_reject_rate",
    "thresholds_by_cost",
    "thresholds_by_hand",
    "thresholds_from",
    "verdict",
]
