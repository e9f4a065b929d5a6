"""The heatmap's legend, and image, heatmap and legend side by side."""

from __future__ import annotations

import cv2
import numpy as np

from anomaly.heatmap import OPACITY, Picture, colour_stops

_PAPER, _INK, _GREY = 255, (30, 30, 30), 128
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def side_by_side(picture: Picture, marked: Picture, threshold: float, unit: str) -> Picture:
    """An image, the same with its heatmap, and the legend; both at their own resolution.

    Args:
        picture: (H0, W0, 3) RGB.
        marked: the same size, as `overlay` makes it.
        threshold: the one that `marked` was drawn with.
        unit: of the scores.

    Returns:
        (H0, W, 3) RGB, W a little over 2 · W0.
    """
    height = picture.shape[0]
    gap = np.full((height, max(2, round(height / 100)), 3), _PAPER, np.uint8)
    return np.hstack([picture, gap, marked, colour_bar(height, threshold, unit)])


def colour_bar(height: int, threshold: float, unit: str) -> Picture:
    """What the colours mean, on a mid-grey ground: scores from 0 to twice the threshold.

    Args:
        height: in pixels.
        threshold: the anomaly map's value where marking starts.
        unit: of the scores.

    Returns:
        (height, about 0.3 · height, 3) RGB.
    """
    size = height / 400
    scale, thickness = max(0.45 * size, 0.2), max(1, round(size))
    margin, bar = round(34 * size), round(26 * size)
    (written, _), _ = cv2.getTextSize(unit, _FONT, scale, thickness)
    width = max(round(128 * size), margin + written) + 24
    sheet = np.full((height, width, 3), _PAPER, np.uint8)
    length = height - 2 * margin
    sheet[margin : margin + length, margin // 2 : margin // 2 + bar] = _gradient(length)[:, None]
    left = margin // 2 + bar
    for times, label in ((0.0, "0"), (0.75, None), (1.0, "threshold"), (1.25, None), (2.0, None)):
        y = margin + round((1 - times / 2) * (length - 1))
        cv2.line(sheet, (left, y), (left + round(5 * size), y), _INK, thickness)
        text = label if label == "0" else f"{times * threshold:.3g}"
        _write(sheet, text, (left + round(9 * size), y + round(4 * size)), scale, thickness)
        if label == "threshold":
            below = (left + round(9 * size), y + round(17 * size))
            _write(sheet, label, below, scale * 0.8, thickness)
            cv2.line(sheet, (margin // 2, y), (left - 1, y), (255, 255, 255), thickness)
    _write(sheet, unit, (margin // 2, round(20 * size)), scale, thickness)
    return sheet


def _gradient(length: int) -> Picture:
    """(length, 3): the colours as they look over mid-grey, the highest score first."""
    stops = np.array(colour_stops(256), dtype=np.float64)[::-1]
    opacity = stops[:, 3:] * OPACITY
    seen = stops[:, :3] * opacity + _GREY * (1 - opacity)
    rows = np.linspace(0, len(seen) - 1, length).astype(int)
    return np.asarray(np.rint(seen[rows]), np.uint8)


def _write(sheet: Picture, text: str, at: tuple[int, int], scale: float, thickness: int) -> None:
    cv2.putText(sheet, text, at, _FONT, scale, _INK, thickness, cv2.LINE_AA)
