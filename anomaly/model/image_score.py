"""Patch scores -> anomaly maps at the network's size, and image scores, on the scores' device.

`anomaly.maps.anomaly_map` makes the map in an image's own pixels, by the same matrices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from anomaly.maps.anomaly_map import upsample_and_smooth


def network_map(
    scores: Tensor, size: tuple[int, int], smoothing: float, inside: Tensor | None = None
) -> Tensor:
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
    rows = torch.from_numpy(upsample_and_smooth(scores.shape[1], size[0], smoothing)).to(scores)
    columns = torch.from_numpy(upsample_and_smooth(scores.shape[2], size[1], smoothing)).to(scores)
    if inside is None:
        return rows @ scores @ columns.T
    weights = rows @ inside.to(scores) @ columns.T
    maps = rows @ scores.masked_fill(~inside, 0) @ columns.T / weights
    shown = F.interpolate(inside[:, None].to(scores), size, mode="nearest-exact")[:, 0]
    return maps.masked_fill(shown < 1, math.nan)


def image_scores(scores: Tensor, maps: Tensor, how: str) -> Tensor:
    """One score for each image.

    Args:
        scores: patch scores (B, h, w); NaN doesn't count.
        maps: network maps (B, H, W); NaN doesn't count.
        how: `max` of the patch scores before any blur, `top_percent` for the mean of the highest
            1 % of them (at least one), or `map_max` for the maximum of the blurred map.

    Returns:
        (B,) float32.
    """
    flat = (maps if how == "map_max" else scores).flatten(1).nan_to_num(nan=-math.inf)
    if how == "top_percent":
        counted = (flat > -math.inf).sum(1).tolist()
        best = [row.topk(max(1, round(n / 100))) for row, n in zip(flat, counted, strict=True)]
        return torch.stack([b.values.mean() for b in best])
    return flat.amax(1)
