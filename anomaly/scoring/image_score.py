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

# Layout of an image, tile (row, column) and turn (0 to 7, see `anomaly.imaging.loading.turned`).
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
    # Pixels that the blur reaches from no patch that counts have weight 0; 0 / 0 has no gradient.
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
        top: number of values in the highest 1 %; None to count the values first.

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
        if len(set(counts)) == 1:  # the usual case, and one step for a GPU
            return _highest(flat, counts[0]).mean(1)
        best = [_highest(row, count) for row, count in zip(flat, counts, strict=True)]
        return xp.stack([b.mean() for b in best])
    return xp.amax(flat, 1)


def levels_of_areas(maps: Array, areas: Sequence[int]) -> Array:
    """The highest level (B,) at which a region of an area stands in each map.

    Args:
        maps: (B, H, W); NaN doesn't count.
        areas: the area for each map, in its pixels.
    """
    # numpy finds the pixel; reading the map there keeps a tensor's gradient.
    values = as_numpy(maps.detach() if hasattr(maps, "detach") else maps)
    places = [place_of_level(*pair) for pair in zip(values, areas, strict=True)]
    levels = maps.reshape(len(maps), -1)[list(range(len(places))), places]
    xp = module_of(maps)
    return xp.where(xp.isnan(levels), -math.inf, levels)


def place_of_level(values: NDArray[np.float32], area: int) -> int:
    """The flat index of a pixel at the highest level at which a region of an area stands.

    The pixels at or above a level form 8-connected regions. The larger the area, the lower the
    highest level with such a region; for an area of 1 it is the map's highest value. It is the
    maximum of the map's area opening: smaller peaks don't count, however high.

    Args:
        values: (H, W); NaN and -inf don't count.
        area: least area in pixels; at most that of the largest region that counts is required.

    Returns:
        0 where no pixel counts.
    """
    counted = np.where(np.isnan(values), np.float32(-np.inf), values)
    levels = np.sort(counted[counted > -np.inf])[::-1]
    if not len(levels):
        return 0
    area = min(area, _largest(counted > -np.inf))
    # `area` pixels lie at or above levels[area - 1] at the highest. A lower level's largest region
    # is no smaller, so the levels can be halved.
    place = bisect_left(levels, area, area - 1, key=lambda level: _largest(counted >= level))
    return int(np.flatnonzero(counted == levels[place])[0])


def _largest(mask: NDArray[np.bool_]) -> int:
    """Pixels of the largest 8-connected region of a mask."""
    _, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    return int(np.bincount(np.asarray(labels).ravel())[1:].max(initial=0))


def area_on_map(area: float, layout: View) -> int:
    """An area of the photograph, converted to pixels of the network's map; at least 1."""
    for pieces in layout.axes:
        area *= pieces[0].resized / pieces[0].source
    return max(1, round(area))


def _medians(scores: Array) -> Array:
    """Medians (B,) of patch scores (B, h, w), the lower middle value; NaN doesn't count.

    It is 1 where no patch counts, so that it can be divided by.
    """
    xp, flat = module_of(scores), scores.reshape(scores.shape[0], -1)
    counts = (~xp.isnan(flat)).sum(1)
    flat = xp.where(xp.isnan(flat), math.inf, flat)
    ordered = flat.sort(1).values if xp is not np else np.sort(flat, 1)
    middle = (counts - 1).clip(0) // 2
    rows, columns = xp.arange(flat.shape[0]), middle
    return xp.where(counts > 0, ordered[rows, columns], 1.0)


def _highest(values: Array, count: int) -> Array:
    """The highest `count` values along the last axis, in any order."""
    if isinstance(values, np.ndarray):
        rest = values.shape[-1] - count
        return np.partition(values, rest, axis=-1)[..., rest:]
    return values.topk(count).values


def pieces_of(batch: Sequence[NetworkInput]) -> list[Piece]:
    """Layout, tile and turn of each network input."""
    return [(item.layout, item.tile, item.turn) for item in batch]


def patches_inside(
    pieces: Sequence[Piece], embeddings: Array, region: Region | None
) -> Array | None:
    """The patches that count: those inside the region, and inside the photograph of a moved part.

    Args:
        pieces: layout, tile and turn of each image.
        embeddings: (B, h, w, D), a tensor or an array; so is the result.
        region: region of each image that counts; None for the whole image.

    Returns:
        (B, h, w) bool; None if all patches count.

    Raises:
        DataError: none of an image's patches counts.
    """
    if region is None and all(layout.pose is None for layout, _, _ in pieces):
        return None
    masks = []
    for layout, (row, column), turn in pieces:
        # The grid before turning: an odd turn has exchanged its height and width.
        height, width = embeddings.shape[1:3] if turn % 2 == 0 else embeddings.shape[2:0:-1]
        top, left = row * height, column * width
        whole = counted(region, layout, (height, width))
        masks.append(turned(whole[top : top + height, left : left + width], turn))
    return like(np.stack(masks), embeddings)
