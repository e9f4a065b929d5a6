"""Where an anomaly map is above its threshold: predicted mask, regions. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

_STRIP_PIXELS = 8_000_000

AnomalyMap = Callable[[slice], NDArray[np.float32]]


@dataclass(frozen=True)
class MarkedRegion:
    """One connected part of a predicted mask, in original pixels.

    Attributes:
        x: the bounding box's first column.
        y: its first row.
        width: of the bounding box.
        height: of it.
        area: how many pixels are marked.
        peak_score: the highest value of the anomaly map in it.
        peak_x: where that is.
        peak_y: where that is.
    """

    x: int
    y: int
    width: int
    height: int
    area: int
    peak_score: float
    peak_x: int
    peak_y: int


def strips(size: tuple[int, int]) -> Iterator[slice]:
    """Rows of an image of (H0, W0) pixels, so many at once that a strip's map is small."""
    rows = max(1, _STRIP_PIXELS // size[1])
    for top in range(0, size[0], rows):
        yield slice(top, min(top + rows, size[0]))


def predicted_mask(
    anomaly_map: AnomalyMap, size: tuple[int, int], threshold: float
) -> NDArray[np.uint8]:
    """Mark the pixels above a threshold.

    Args:
        anomaly_map: gives some rows of the map, (rows, W0); NaN isn't marked.
        size: (H0, W0) of the image.
        threshold: in score units.

    Returns:
        (H0, W0): 255 where marked, else 0.
    """
    mask = np.empty(size, np.uint8)
    for strip in strips(size):
        mask[strip] = np.where(anomaly_map(strip) > threshold, 255, 0)
    return mask


def marked_regions(mask: NDArray[np.uint8], anomaly_map: AnomalyMap) -> tuple[MarkedRegion, ...]:
    """The 8-connected regions of a predicted mask, the one with the highest peak first.

    Args:
        mask: (H0, W0) uint8, 0 where nothing is marked.
        anomaly_map: gives some rows of the map that was marked, (rows, W0), in score units.
    """
    rows = np.flatnonzero(mask.any(axis=1))
    if not len(rows):
        return ()
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    count, found, boxes, _ = cv2.connectedComponentsWithStats(mask[top:bottom], connectivity=8)
    labels = np.asarray(found, np.int32)
    peaks, places = _peaks(labels, top, anomaly_map, mask.shape, count)
    regions = [
        MarkedRegion(x, top + y, width, height, area, float(peak), int(column), int(row))
        for (x, y, width, height, area), peak, (row, column) in zip(
            boxes.tolist()[1:], peaks[1:], places[1:], strict=True
        )
    ]
    return tuple(sorted(regions, key=lambda r: (-r.peak_score, r.y, r.x)))


def _peaks(
    labels: NDArray[np.int32],
    top: int,
    anomaly_map: AnomalyMap,
    size: tuple[int, ...],
    count: int,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Each label's highest score, and its first row and column; label 0 is the background."""
    peaks = np.full(count, -np.inf, np.float32)
    places = np.zeros((count, 2), np.int64)
    for strip in strips((size[0], size[1])):
        start, stop = max(strip.start, top), min(strip.stop, top + len(labels))
        if start >= stop:
            continue
        row, column = np.nonzero(labels[start - top : stop - top])
        label = labels[row + start - top, column]
        score = anomaly_map(slice(start, stop))[row, column]
        higher = peaks.copy()
        np.maximum.at(higher, label, score)
        at = np.flatnonzero((score == higher[label]) & (higher > peaks)[label])
        changed, first = np.unique(label[at], return_index=True)
        places[changed, 0] = row[at[first]] + start
        places[changed, 1] = column[at[first]]
        peaks = higher
    return peaks, places
