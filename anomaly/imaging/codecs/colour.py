"""Samples of any colour kind -> RGB, at the depth they came in.

Alpha is composited over black. Dropping it would show the colours hidden under transparent
pixels, which encoders are free to change, so one picture saved twice would give two results.
Embedded ICC profiles and gamma are not applied: a camera's values are taken as they are.
"""

from __future__ import annotations

import cv2
import numpy as np

from anomaly.imaging.codecs.header import Pixels, damaged

_ROWS = 256  # rows multiplied at a time, which bounds the wide temporaries


def look_up(indices: Pixels, colours: Pixels) -> Pixels:
    """Replace palette indices (H, W) by colours (N, 3), both uint8; N is at most 256."""
    if indices.max() >= len(colours):
        raise damaged(f"it uses colour {indices.max()} of a palette of {len(colours)}")
    table = np.zeros((256, 1, 3), np.uint8)
    table[: len(colours), 0] = colours
    return np.asarray(cv2.LUT(grey_to_rgb(indices), table))


def bgr_to_rgb(bgr: Pixels) -> Pixels:
    """Swap red and blue in place, which for (H, W, 3) needs no second picture."""
    return np.asarray(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr))


def grey_to_rgb(grey: Pixels) -> Pixels:
    """Repeat grey (H, W) or (H, W, 1) into (H, W, 3)."""
    return np.asarray(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB))


def over_black(colours: Pixels, alpha: Pixels, full_scale: float) -> Pixels:
    """Composite colours (H, W, C) over black by straight alpha (H, W)."""
    if alpha.min() == full_scale:
        return np.ascontiguousarray(colours)
    return _scaled(colours, alpha[..., None], full_scale)


def cmyk_to_rgb(ink: Pixels, full_scale: float) -> Pixels:
    """Turn ink (H, W, 4), where 0 is no ink, into light: R = (1 - C)(1 - K), and so on."""
    top = ink.dtype.type(full_scale)
    return _scaled(top - ink[..., :3], top - ink[..., 3:], full_scale)


def _scaled(values: Pixels, weights: Pixels, full_scale: float) -> Pixels:
    """Multiply values by weights / full_scale, rounded to nearest for integers."""
    product = np.empty(values.shape, values.dtype)
    for start in range(0, len(values), _ROWS):
        rows = slice(start, start + _ROWS)
        if values.dtype.kind == "f":
            product[rows] = values[rows] * weights[rows]
        else:
            full = int(full_scale)
            wide = values[rows].astype(np.uint32) * weights[rows]
            product[rows] = (wide + full // 2) // full
    return product
