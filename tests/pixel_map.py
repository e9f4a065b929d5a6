"""Anomaly maps that are given pixel by pixel."""

import numpy as np

from anomaly.imaging.geometry import AxisView, View
from anomaly.maps.anomaly_map import SourceMap


def pixel_map(values: np.ndarray) -> SourceMap:
    """A map (H0, W0) with one patch a pixel, neither blurred nor damped."""
    rows, columns = (AxisView(side, side, 0, side) for side in values.shape)
    return SourceMap(values.astype(np.float32), View((rows,), (columns,)), 0.0, 0.0, None)
