"""Patch scores -> anomaly maps at the network's size, and image scores: tensors or numpy arrays.

`anomaly.maps.anomaly_map` makes the map in an image's own pixels, by the same matrices.
"""

from __future__ import annotations

import math

import numpy as np

from anomaly.arrays import Array, like, module_of
from anomaly.maps.anomaly_map import upsample_and_smooth


def network_map(
    scores: Array, size: tuple[int, int], smoothing: float, inside: Array | None = None
) -> Array:
    """Anomaly maps at the size of the network's input.

    Args:
        scores: patch scores (B, h, w).
        size: (H, W).
        smoothing: standard deviation of the Gaussian in network pixels; 0 for none.
        inside: (B, h, w) bool, the patches that count; None for all.

    Returns:
        (B, H, W) float32, in score units, on the device of `scores`; NaN on patches that don't
        count.
    """
    height, width = scores.shape[1:]
    rows = like(upsample_and_smooth(height, size[0], smoothing), scores)
    columns = like(upsample_and_smooth(width, size[1], smoothing), scores).T
    if inside is None:
        return rows @ scores @ columns
    where = module_of(scores).where
    weights = rows @ (inside * like(np.ones(1, np.float32), scores)) @ columns
    maps = rows @ where(inside, scores, 0.0) @ columns / weights
    shown = inside[:, _nearest(height, size[0])][:, :, _nearest(width, size[1])]
    return where(shown, maps, math.nan)


def _nearest(patches: int, size: int) -> list[int]:
    """Which patch of an axis each pixel of it lies on."""
    return [(2 * i + 1) * patches // (2 * size) for i in range(size)]


def image_scores(scores: Array, maps: Array, how: str) -> Array:
    """One score for each image.

    Args:
        scores: patch scores (B, h, w); NaN doesn't count.
        maps: network maps (B, H, W); NaN doesn't count.
        how: `max` of the patch scores before any blur, `top_percent` for the mean of the highest
            1 % of them (at least one), `map_max` and `map_top_percent` likewise of the blurred map.

    Returns:
        (B,) float32.
    """
    xp, values = module_of(scores), maps if how.startswith("map_") else scores
    flat = values.reshape(len(values), -1)
    flat = xp.where(xp.isnan(flat), -math.inf, flat)
    if how.endswith("top_percent"):
        counted = (flat > -math.inf).sum(1).tolist()
        best = [_highest(row, max(1, round(n / 100))) for row, n in zip(flat, counted, strict=True)]
        return xp.stack([b.mean() for b in best])
    return xp.amax(flat, 1)


def _highest(values: Array, count: int) -> Array:
    if isinstance(values, np.ndarray):
        return np.partition(values, len(values) - count)[len(values) - count :]
    return values.topk(count).values
