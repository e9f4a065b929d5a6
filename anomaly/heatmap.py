"""Anomaly map + image -> a picture for a person."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.images import Image

CONTOUR = (255, 255, 255)


def display(image: Image) -> NDArray[np.uint8]:
    """The image as a screen shows it.

    Returns:
        (H0, W0, 3) uint8 RGB; deeper images are scaled by their declared full scale.
    """
    if image.pixels.dtype == np.uint8:
        return image.pixels.astype(np.uint8, copy=False)
    scaled = image.pixels.astype(np.float32) * np.float32(255 / image.full_scale)
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def overlay(
    picture: NDArray[np.uint8], anomaly_map: NDArray[np.float32], threshold: float
) -> NDArray[np.uint8]:
    """Lay a heatmap over a picture.

    Colours have one meaning for all images of a model: nothing below three quarters of the
    threshold, full colour from 5/4 on, brightest at twice the threshold. A line follows the
    threshold.

    Args:
        picture: (H0, W0, 3) RGB.
        anomaly_map: (H0, W0) in score units; NaN where the network didn't look, shown darkened.
        threshold: the map's value where marking starts, above 0.

    Returns:
        (H0, W0, 3) RGB.
    """
    hidden = np.isnan(anomaly_map)
    level = np.nan_to_num(anomaly_map) / np.float32(max(threshold, 1e-12))
    level = level.astype(np.float32, copy=False)
    colours = cv2.applyColorMap(_bytes(level), cv2.COLORMAP_INFERNO)[..., ::-1]
    opacity = np.clip((level - 0.75) * 2, 0, 1)[..., None] * np.float32(0.65)
    mixed = picture * (1 - opacity) + colours * opacity
    mixed[hidden] *= 0.5
    result = np.ascontiguousarray(np.rint(mixed).astype(np.uint8))
    above = ((level > 1) & ~hidden).astype(np.uint8)
    lines, _ = cv2.findContours(above, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    width = max(1, round(min(picture.shape[:2]) / 300))
    cv2.drawContours(result, lines, -1, CONTOUR, width, cv2.LINE_AA)
    return result


def _bytes(level: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.clip(level * np.float32(127.5), 0, 255).astype(np.uint8)


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """A picture (H, W, 3) RGB as a PNG file's bytes."""
    # Level 1 is four times as fast as the default and costs a tenth in size.
    done, data = cv2.imencode(".png", picture[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])
    if not done:
        raise ValueError(f"a picture of shape {picture.shape} can't be encoded as PNG")
    return data.tobytes()
