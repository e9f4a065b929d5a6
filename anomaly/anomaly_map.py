"""Patch scores -> anomaly map, at the network's size or in the original image's pixels.

Bilinear up-sampling, Gaussian smoothing and the way back through resize and crop are all linear
and act on rows and columns apart. Together they are one small matrix for each axis, so a map is
`rows @ scores @ columns.T`: exact, without padding artefacts, and any strip of it can be had alone.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.geometry import AxisView, View


def network_map(scores: Tensor, size: tuple[int, int], smoothing: float) -> Tensor:
    """Anomaly maps at the size of the network's input.

    Args:
        scores: patch scores (B, h, w).
        size: (H, W).
        smoothing: standard deviation of the Gaussian in network pixels; 0 for none.

    Returns:
        (B, H, W) float32, in score units, on the device of `scores`.
    """
    rows = torch.from_numpy(_upsample_and_smooth(scores.shape[1], size[0], smoothing))
    columns = torch.from_numpy(_upsample_and_smooth(scores.shape[2], size[1], smoothing))
    return rows.to(scores) @ scores @ columns.to(scores).T


def source_map(
    scores: NDArray[np.float32], view: View, smoothing: float, strip: slice | None = None
) -> NDArray[np.float32]:
    """The anomaly map of one image in its own pixels.

    Args:
        scores: patch scores (h, w).
        view: how the image was turned into the network's input.
        smoothing: standard deviation of the Gaussian in network pixels; 0 for none.
        strip: only these rows of the original image.

    Returns:
        (H0, W0) float32 in score units; NaN where a crop hid the image from the network.
    """
    rows = _source_operator(scores.shape[0], view.rows, smoothing)
    columns = _source_operator(scores.shape[1], view.columns, smoothing)
    if strip is not None:
        rows = rows[strip]
    return np.asarray(rows @ scores @ columns.T, np.float32)


def image_scores(scores: Tensor, maps: Tensor, how: str) -> Tensor:
    """One score for each image.

    Args:
        scores: patch scores (B, h, w).
        maps: network maps (B, H, W).
        how: `max` of the patch scores before any blur, `top_percent` for the mean of the highest
            1 % of them (at least one), or `map_max` for the maximum of the blurred map.

    Returns:
        (B,) float32.
    """
    if how == "map_max":
        return maps.flatten(1).amax(1)
    flat = scores.flatten(1)
    if how == "top_percent":
        count = max(1, round(flat.shape[1] / 100))
        return flat.topk(count, dim=1).values.mean(1)
    return flat.amax(1)


@lru_cache(maxsize=64)
def _upsample_and_smooth(patches: int, size: int, smoothing: float) -> NDArray[np.float32]:
    centres = np.arange(size, dtype=np.float64) + 0.5
    bilinear = _interpolation(centres * (patches / size), patches)
    return (_gaussian(size, smoothing) @ bilinear).astype(np.float32)


@lru_cache(maxsize=64)
def _source_operator(patches: int, axis: AxisView, smoothing: float) -> NDArray[np.float32]:
    """(source, patches): rows outside the crop are NaN."""
    positions = axis.to_network(np.arange(axis.source, dtype=np.float64) + 0.5)
    operator = _interpolation(positions, axis.size) @ _upsample_and_smooth(
        patches, axis.size, smoothing
    ).astype(np.float64)
    hidden = np.ones(axis.source, dtype=bool)
    hidden[axis.visible()] = False
    operator[hidden] = np.nan
    return operator.astype(np.float32)


def _interpolation(positions: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Linear interpolation between `count` samples at k + 0.5, constant beyond the outer ones.

    Returns:
        (len(positions), count), rows sum to 1.
    """
    place = np.clip(positions - 0.5, 0, count - 1)
    low = np.minimum(place.astype(np.int64), max(count - 2, 0))
    matrix = np.zeros((len(positions), count))
    every = np.arange(len(positions))
    matrix[every, low] = 1 - (place - low)
    matrix[every, np.minimum(low + 1, count - 1)] += place - low
    return matrix


def _gaussian(size: int, sigma: float) -> NDArray[np.float64]:
    """Gaussian smoothing along one axis, mirrored at the borders (SciPy's `reflect`).

    The kernel ends at 4σ, like SciPy's.

    Returns:
        (size, size), rows sum to 1.
    """
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return np.eye(size)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    kernel /= kernel.sum()
    matrix = np.zeros((size, size))
    every = np.arange(size)
    for offset, weight in zip(offsets, kernel, strict=True):
        mirrored = (every + offset) % (2 * size)
        mirrored = np.where(mirrored < size, mirrored, 2 * size - 1 - mirrored)
        np.add.at(matrix, (every, mirrored), weight)
    return matrix
