"""The highest level at which a region of a given area stands in an anomaly map. Imports no torch.

It is the maximum of the map's area opening: peaks that are smaller don't count, however high.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray


def place_of_level(values: NDArray[np.float32], area: int) -> int:
    """The flat index of a pixel at the highest level at which a region of an area stands.

    At a level, pixels at least as high form regions, which are 8-connected. So the level falls as
    the area grows; of an area of 1 it is the highest value.

    Args:
        values: (H, W); NaN and -inf don't count.
        area: in pixels. The largest region that counts is large enough.

    Returns:
        0 where no pixel counts.
    """
    counted = np.where(np.isnan(values), np.float32(-np.inf), values)
    levels = np.sort(counted[counted > -np.inf])[::-1]
    if not len(levels):
        return 0
    area = min(area, int(_sizes(counted > -np.inf)[1].max()))
    # So many pixels are needed at least. Regions are few at high levels, where looking costs least.
    low = high = area - 1
    while (large := _large(counted, levels[high], area)) is None:
        low, high = high + 1, min(2 * high + 1, len(levels) - 1)
    while low < high:
        middle = (low + high) // 2
        higher = _large(large, levels[middle], area)
        if higher is None:
            low = middle + 1
        else:
            high, large = middle, higher
    return int(np.flatnonzero(counted == levels[low])[0])


def _large(values: NDArray[np.float32], level: np.float32, area: int) -> NDArray[np.float32] | None:
    """The box around the regions of an area at a level, -inf elsewhere; None where there is none.

    Above the level, nothing else can hold a region of that area.
    """
    labels, sizes = _sizes(values >= level)
    if not (large := sizes >= area).any():
        return None
    mask = large[labels]
    left, top, width, height = cv2.boundingRect(mask.view(np.uint8))
    box = np.s_[top : top + height, left : left + width]
    return np.where(mask[box], values[box], np.float32(-np.inf))


def _sizes(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """The labels of a mask's 8-connected regions, and how many pixels each has; 0 for label 0."""
    _, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    sizes = np.bincount(np.asarray(labels).ravel())
    sizes[0] = 0
    return np.asarray(labels, np.int32), sizes
