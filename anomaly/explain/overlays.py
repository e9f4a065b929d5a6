"""Numbers laid over the image that they belong to."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.explain.tiles import Picture


def glowing(picture: Picture, values: NDArray[Any]) -> Picture:
    """An image in grey, coloured where a map is high.

    Args:
        picture: (H, W, 3).
        values: (h, w) in [0, 1], brought to the picture's size.

    Returns:
        (H, W, 3).
    """
    height, width = picture.shape[:2]
    fitted = cv2.resize(np.asarray(values, np.float32), (width, height))
    unit = np.clip(fitted, 0, 1)
    levels = np.rint(unit * 255).astype(np.uint8)
    heat = cv2.cvtColor(cv2.applyColorMap(levels, cv2.COLORMAP_INFERNO), cv2.COLOR_BGR2RGB)
    grey = cv2.cvtColor(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    opacity = (0.85 * np.sqrt(unit))[..., None]
    return np.asarray(np.rint(heat * opacity + grey * 0.75 * (1 - opacity)), np.uint8)


def signed(values: NDArray[Any]) -> Picture:
    """Values around 0 as a picture around mid-grey.

    Args:
        values: (H, W, 3); stretched by the 99th percentile of their absolute values.
    """
    strongest = float(np.percentile(np.abs(values), 99)) or 1.0
    return np.asarray(np.rint(np.clip(values / strongest, -1, 1) * 127 + 128), np.uint8)
