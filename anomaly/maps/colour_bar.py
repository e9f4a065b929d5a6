"""The heatmap's legend, and image, heatmap and legend side by side."""

from __future__ import annotations

import cv2
import numpy as np

from anomaly.maps.heatmap import OPACITY, RgbImage, colour_stops

_PAPER, _INK, _GREY = 255, (30, 30, 30), 128
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def with_colour_bar(
    picture: RgbImage,
    marked: RgbImage,
    threshold: float,
    unit: str,
    review: float | None = None,
    caption: str = "",
) -> RgbImage:
    """An image, the same with its heatmap, and the legend; both at their own resolution.

    Args:
        picture: (H0, W0, 3) RGB.
        marked: the same size, as `overlay` makes it.
        threshold: the one that `marked` was drawn with.
        unit: of the scores.
        review: as for `overlay`.
        caption: a line above them, shrunk where it is too long; none where it is empty.

    Returns:
        (H, W, 3) RGB, W a little over 2 · W0, H that of the image and its caption.
    """
    height = picture.shape[0]
    gap = np.full((height, max(2, round(height / 100)), 3), _PAPER, np.uint8)
    plate = np.hstack([picture, gap, marked, colour_bar(height, threshold, unit, review)])
    if not caption:
        return plate
    scale = max(_scale(height), 0.3)
    (width, tall), below = cv2.getTextSize(caption, _FONT, scale, 1)
    scale *= min(1, (plate.shape[1] - 8) / width)
    head = np.full((tall + below + 10, plate.shape[1], 3), _PAPER, np.uint8)
    _write(head, caption, (4, tall + 5), scale, max(1, round(height / 400)))
    return np.vstack([head, plate])


def colour_bar(height: int, threshold: float, unit: str, review: float | None = None) -> RgbImage:
    """What the colours mean, on a mid-grey ground: scores from 0 to twice the threshold.

    Scores are given as they are, and in multiples of the threshold.

    Args:
        height: in pixels.
        threshold: the anomaly map's value where marking starts, which isn't the image score's.
        unit: of the scores.
        review: a lower value, where the fainter line runs; None where there is none.

    Returns:
        (height, about 0.4 · height, 3) RGB.
    """
    size = height / 400
    scale, thickness = _scale(height), max(1, round(size))
    margin, bar, left = round(34 * size), round(26 * size), round(43 * size)
    labels = _labels(threshold, review, few=height < 200)
    sizes = [cv2.getTextSize(text, _FONT, scale, thickness)[0] for text in (unit, *labels.values())]
    line = round(1.4 * max(tall for _, tall in sizes))
    width = left + max(wide for wide, _ in sizes) + round(14 * size) + 24
    sheet = np.full((height, width, 3), _PAPER, np.uint8)
    length = height - 2 * margin
    sheet[margin : margin + length, margin // 2 : margin // 2 + bar] = _gradient(length)[:, None]
    lowest = 0
    for times, text in labels.items():  # from the top
        y = margin + round((1 - times / 2) * (length - 1))
        cv2.line(sheet, (left, y), (left + round(5 * size), y), _INK, thickness)
        lowest = max(y + round(4 * size), lowest + line)  # two thresholds may be close together
        _write(sheet, text, (left + round(9 * size), lowest), scale, thickness)
        if text.endswith(("marked", "review")):
            cv2.line(sheet, (margin // 2, y), (left - 1, y), (255, 255, 255), thickness)
    _write(sheet, unit, (margin // 2, round(20 * size)), scale, thickness)
    return sheet


def _labels(threshold: float, review: float | None, *, few: bool) -> dict[float, str]:
    """What stands beside the bar, by multiples of the threshold, the highest first."""
    names = {0.0: "", 1.0: " marked", 2.0: ""}
    if review is not None and review < threshold:
        names[review / threshold] = " review"
    if not few:
        names[1.25] = ""
        if all(abs(at - 0.75) > 0.1 for at in names):
            names[0.75] = ""
    return {
        at: (f"{at * threshold:.3g} = {at:.3g}x" if at else "0") + names[at]
        for at in sorted(names, reverse=True)
    }


def _scale(height: int) -> float:
    return max(0.45 * height / 400, 0.2)


def _gradient(length: int) -> RgbImage:
    """(length, 3): the colours as they look over mid-grey, the highest score first."""
    stops = np.array(colour_stops(256), dtype=np.float64)[::-1]
    opacity = stops[:, 3:] * OPACITY
    seen = stops[:, :3] * opacity + _GREY * (1 - opacity)
    rows = np.linspace(0, len(seen) - 1, length).astype(int)
    return np.asarray(np.rint(seen[rows]), np.uint8)


def _write(sheet: RgbImage, text: str, at: tuple[int, int], scale: float, thickness: int) -> None:
    cv2.putText(sheet, text, at, _FONT, scale, _INK, thickness, cv2.LINE_AA)
