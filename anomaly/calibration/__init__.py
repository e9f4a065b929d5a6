"""Thresholds from good images alone: how many good parts they will reject, and how sure that is.

Pure statistics of scores; nothing here knows a model or sees a test split.
"""

from anomaly.calibration.model_thresholds import (
    GoodScores,
    ThresholdChange,
    Thresholds,
    thresholds_by_hand,
    thresholds_from,
)
from anomaly.calibration.thresholds import Threshold

__all__ = [
    "GoodScores",
    "Threshold",
    "ThresholdChange",
    "Thresholds",
    "thresholds_by_hand",
    "thresholds_from",
]
