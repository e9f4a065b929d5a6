"""Defects on an anomaly map: predicted mask, outlines, regions. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.maps.anomaly_map import SourceMap

MARKED, FAINT = 255, 1
_STRIP_PIXELS = 8_000_000
_NEAR_HIGHEST = 0.9  # of the highest place of a rejected image that reaches no line
_LEAST = 1e-12  # a map of zeros is never marked

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
        width_uncertainty: a patch's width in original pixels: the width is about as uncertain.
        height_uncertainty: likewise.
        length: the longer side of the narrowest box around it, turned as it may be.
        thickness: that box's shorter side.
    """

    x: int
    y: int
    width: int
    height: int
    area: int
    peak_score: float
    peak_x: int
    peak_y: int
    width_uncertainty: float
    height_uncertainty: float
    length: float
    thickness: float


def strips(size: tuple[int, int]) -> Iterator[slice]:
    """Rows of an image of (H0, W0) pixels, so many at once that a strip's map is small."""
    rows = max(1, _STRIP_PIXELS // size[1])
    for top in range(0, size[0], rows):
        yield slice(top, min(top + rows, size[0]))


def predicted_mask(anomaly_map: SourceMap, threshold: float) -> NDArray[np.uint8]:
    """Mark the defects: each reaches from its peak down to `SourceMap.level`.

    Args:
        anomaly_map: the anomaly map; NaN isn't marked.
        threshold: that a defect's peak is above, in score units.

    Returns:
        (H0, W0): 255 where marked, else 0.
    """
    if highest(anomaly_map) <= threshold:
        return np.zeros(anomaly_map.view.source, np.uint8)
    (mask,) = _masks(anomaly_map, [threshold])
    return mask


def highest(anomaly_map: SourceMap) -> float:
    """A map's highest value; 0 where nothing is higher."""
    rows = strips(anomaly_map.view.source)
    return max(float(np.fmax.reduce(anomaly_map(s), axis=None, initial=0)) for s in rows)


def _masks(anomaly_map: SourceMap, thresholds: Sequence[float]) -> list[NDArray[np.uint8]]:
    """The predicted mask of each threshold, from one pass over the map."""
    levels = [anomaly_map.level(threshold) for threshold in thresholds]
    masks = [np.zeros(anomaly_map.view.source, np.uint8) for _ in thresholds]
    for strip in strips(anomaly_map.view.source):
        values = anomaly_map(strip)
        for mask, level, threshold in zip(masks, levels, thresholds, strict=True):
            if (values > level.scores.min()).any():  # else the strip's level needn't be made
                mask[strip] = np.where(values > level(strip), 1 + (values > threshold), 0)
    for mask in masks:
        _keep_with_peaks(mask)
    return masks


def _keep_with_peaks(mask: NDArray[np.uint8]) -> None:
    """Turn a mask of 1, and 2 above the threshold, into 255 in the parts that hold a 2, else 0."""
    left, top, width, height = cv2.boundingRect(mask)
    box = mask[top : top + height, left : left + width]
    count, labels = cv2.connectedComponents(box, connectivity=8)
    has_peak = np.zeros(count, np.uint8)
    has_peak[labels[box == 2]] = 255
    box[...] = has_peak[labels]


def outlined_areas(
    anomaly_map: SourceMap, threshold: float, review: float | None = None, *, rejected: bool = False
) -> NDArray[np.uint8]:
    """What a heatmap outlines.

    Args:
        anomaly_map: the anomaly map.
        threshold: that a marked defect's peak is above.
        review: a lower value, that a fainter outline's is above; None for none.
        rejected: whether the image is rejected, which hangs on all of its highest places together.
            Where none of them is outlined, the fainter line runs around the highest.

    Returns:
        (H0, W0): `MARKED` as in the predicted mask, else `FAINT` where the fainter line runs
        around, else 0.
    """
    threshold = max(threshold, _LEAST)
    peak, lowest = highest(anomaly_map), threshold if review is None else min(review, threshold)
    if rejected and peak <= lowest:
        lowest = _NEAR_HIGHEST * peak
    both = dict.fromkeys((threshold, max(lowest, _LEAST)))
    limits = [limit for limit in both if limit < peak]
    areas = np.zeros(anomaly_map.view.source, np.uint8)
    for limit, mask in zip(limits, _masks(anomaly_map, limits) if limits else (), strict=True):
        areas |= mask & np.uint8(MARKED if limit == threshold else FAINT)
    return areas


def marked_regions(mask: NDArray[np.uint8], anomaly_map: SourceMap) -> tuple[MarkedRegion, ...]:
    """The 8-connected regions of a predicted mask, the one with the highest peak first.

    Args:
        mask: (H0, W0) uint8, 0 where nothing is marked.
        anomaly_map: the map that was marked, in score units.
    """
    rows = np.flatnonzero(mask.any(axis=1))
    if not len(rows):
        return ()
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    count, labelled, boxes, _ = cv2.connectedComponentsWithStats(mask[top:bottom], connectivity=8)
    labels = np.asarray(labelled, np.int32)
    peaks, places = _peaks(labels, top, anomaly_map, mask.shape, count)
    patch_height, patch_width = (round(side, 2) for side in anomaly_map.patch_size)
    regions = [
        MarkedRegion(
            x,
            top + y,
            width,
            height,
            area,
            float(peak),
            int(column),
            int(row),
            patch_width,
            patch_height,
            *_sides(labels[y : y + height, x : x + width] == label),
        )
        for label, ((x, y, width, height, area), peak, (row, column)) in enumerate(
            zip(boxes.tolist()[1:], peaks[1:], places[1:], strict=True), 1
        )
    ]
    return tuple(sorted(regions, key=lambda r: (-r.peak_score, r.y, r.x)))


def _sides(region: NDArray[np.bool_]) -> tuple[float, float]:
    """The longer and the shorter side of the narrowest box that holds a region's pixels."""
    outlines, _ = cv2.findContours(
        region.view(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE
    )
    sides = cv2.minAreaRect(np.vstack(outlines))[1]  # of the pixels' centres
    return round(max(sides) + 1, 2), round(min(sides) + 1, 2)


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
