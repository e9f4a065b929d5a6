"""Patch scores -> anomaly maps at the network's size, and image scores: tensors or numpy arrays.

`anomaly.maps.anomaly_map` makes the map in an image's own pixels, by the same matrices.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.arrays import Array, as_numpy, like, module_of
from anomaly.imaging.geometry import Region, View, counted
from anomaly.imaging.loading import NetworkInput, turned
from anomaly.maps.anomaly_map import upsample_and_smooth

# How an image became the network's input, which tile of it this is, and how that was turned, see
# `anomaly.imaging.loading`.
Piece: TypeAlias = tuple[View, tuple[int, int], int]


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
    # Beyond the blur's reach of all of them nothing counts, and 0 / 0 has no gradient.
    maps = rows @ where(inside, scores, 0.0) @ columns / where(weights > 0, weights, 1.0)
    shown = inside[:, _nearest(height, size[0])][:, :, _nearest(width, size[1])]
    return where(shown, maps, math.nan)


def _nearest(patches: int, size: int) -> list[int]:
    """The patch index of each pixel along an axis."""
    return [(2 * i + 1) * patches // (2 * size) for i in range(size)]


def image_scores(scores: Array, maps: Array, how: str, top: int | None = None) -> Array:
    """Image scores (B,) from patch scores and maps.

    Args:
        scores: patch scores (B, h, w); NaN doesn't count.
        maps: network maps (B, H, W); NaN doesn't count.
        how: `max` of the patch scores before any blur, `top_percent` for the mean of the highest
            1 % of them (at least one); `map_max` and `map_top_percent` of the blurred map's values;
            `map_top_relative` for the latter over the median of the patch scores.
        top: how many values the highest 1 % are, where it is known; None to count them.

    Returns:
        (B,) float32.
    """
    if how == "map_top_relative":
        best = image_scores(scores, maps, "map_top_percent", top)
        return best / _medians(scores).clip(float(np.finfo(np.float32).tiny))
    xp, values = module_of(scores), maps if how.startswith("map_") else scores
    flat = values.reshape(values.shape[0], -1)
    flat = xp.where(xp.isnan(flat), -math.inf, flat)
    if how.endswith("top_percent"):
        if top is not None:
            return _highest(flat, top).mean(1)
        counts = [max(1, round(n / 100)) for n in (flat > -math.inf).sum(1).tolist()]
        if len(set(counts)) == 1:  # as a rule; together they are one step for a GPU
            return _highest(flat, counts[0]).mean(1)
        best = [_highest(row, count) for row, count in zip(flat, counts, strict=True)]
        return xp.stack([b.mean() for b in best])
    return xp.amax(flat, 1)


def levels_of_areas(maps: Array, areas: Sequence[int]) -> Array:
    """The highest level (B,) at which a region of an area stands in each map.

    Args:
        maps: (B, H, W); NaN doesn't count.
        areas: of each, in its pixels.
    """
    values = as_numpy(maps.detach() if hasattr(maps, "detach") else maps)
    places = [place_of_level(*pair) for pair in zip(values, areas, strict=True)]
    levels = maps.reshape(len(maps), -1)[list(range(len(places))), places]
    xp = module_of(maps)
    return xp.where(xp.isnan(levels), -math.inf, levels)


def place_of_level(values: NDArray[np.float32], area: int) -> int:
    """The flat index of a pixel at the highest level at which a region of an area stands.

    At a level, pixels at least as high form regions, which are 8-connected. So the level falls as
    the area grows; of an area of 1 it is the highest value. The level is the maximum of the map's
    area opening: peaks that are smaller don't count, however high.

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
    area = min(area, _largest(counted > -np.inf))
    # So many pixels are needed at least; a lower level's largest region is no smaller.
    place = bisect_left(levels, area, area - 1, key=lambda level: _largest(counted >= level))
    return int(np.flatnonzero(counted == levels[place])[0])


def _largest(mask: NDArray[np.bool_]) -> int:
    """How many pixels the largest 8-connected region of a mask has."""
    _, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    return int(np.bincount(np.asarray(labels).ravel())[1:].max(initial=0))


def area_on_map(area: float, layout: View) -> int:
    """An area of the photograph in pixels of the network's map, 1 at least."""
    for pieces in layout.axes:
        area *= pieces[0].resized / pieces[0].source
    return max(1, round(area))


def _medians(scores: Array) -> Array:
    """The median (B,) of patch scores (B, h, w), the lower of two; NaN doesn't count, 1 of none."""
    xp, flat = module_of(scores), scores.reshape(scores.shape[0], -1)
    counts = (~xp.isnan(flat)).sum(1)
    flat = xp.where(xp.isnan(flat), math.inf, flat)
    ordered = flat.sort(1).values if xp is not np else np.sort(flat, 1)
    middle = (counts - 1).clip(0) // 2
    rows, columns = xp.arange(flat.shape[0]), middle
    return xp.where(counts > 0, ordered[rows, columns], 1.0)


def _highest(values: Array, count: int) -> Array:
    if isinstance(values, np.ndarray):
        rest = values.shape[-1] - count
        return np.partition(values, rest, axis=-1)[..., rest:]
    return values.topk(count).values


def pieces_of(batch: Sequence[NetworkInput]) -> list[Piece]:
    """The layouts and tiles behind network inputs."""
    return [(item.layout, item.tile, item.turn) for item in batch]


def patches_inside(
    pieces: Sequence[Piece], embeddings: Array, region: Region | None
) -> Array | None:
    """Which patches of images count, by their layouts and tiles.

    Args:
        pieces: where each comes from.
        embeddings: (B, h, w, D), a tensor or an array; so is the result.
        region: what of each image counts; None for all of it.

    Returns:
        (B, h, w) bool; None for all.

    Raises:
        DataError: none of an image's patches counts.
    """
    if region is None and all(layout.pose is None for layout, _, _ in pieces):
        return None
    masks = []
    for layout, (row, column), turn in pieces:
        height, width = embeddings.shape[1:3] if turn % 2 == 0 else embeddings.shape[2:0:-1]
        top, left = row * height, column * width
        whole = counted(region, layout, (height, width))
        masks.append(turned(whole[top : top + height, left : left + width], turn))
    return like(np.stack(masks), embeddings)
