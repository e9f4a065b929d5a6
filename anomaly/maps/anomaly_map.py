"""Patch scores -> the anomaly map in an image's own pixels, and defects on it. Imports no torch.

A patch is seen through a receptive field many times its own size, so a small defect raises all
patches around it. Before the map is made, this halo is damped: `without_halo`.

Bilinear up-sampling, Gaussian smoothing and the way back through resize and crop are all linear
and act on rows and columns apart. Together they are one small matrix for each axis, so a map is
`rows @ scores @ columns.T`: exact, without padding artefacts, and any strip of it can be had alone.

Blending overlapping tiles is linear and acts on each axis apart as well: an axis cut into pieces
has the pieces' matrices side by side, each fading out where the next one takes over.

Patches that don't count (NaN) take no part: what is left is averaged over those that do, so that
nothing bleeds in from outside a region and its rim isn't dimmed.

How far a defect reaches follows from the map itself, whatever the threshold: `SourceMap.level`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.arrays import Array, module_of
from anomaly.imaging.geometry import Axis, AxisView, Region, View, patch_size
from anomaly.runtime import one_blas_thread

# Farther than the blur reaches from every patch that counts, there is nothing to show.
LEAST_WEIGHT = 1e-4
# A defect reaches down to this share of the way from the image's usual value to the highest value
# within so many patches; chosen by widths and heights of ground-truth masks.
_EXTENT = 0.6
_REACH = 2
_HELD_PIXELS = 8_000_000
_PIXELS_SHOWN = 2  # for each pixel of the network's input, on each axis


@dataclass(frozen=True, eq=False)
class SourceMap:
    """The anomaly map of one image in its own pixels, made when it is asked for.

    Attributes:
        scores: patch scores (h, w), of the whole mosaic where there are tiles; NaN doesn't count.
        view: how the image was turned into the network's input.
        smoothing: standard deviation of the Gaussian in network pixels; 0 for none.
        halo_damping: how much a patch beside a higher one is lowered, see `without_halo`.
        region: what of the image counts; None for all of it.
        values: (H0, W0), the whole map, where it is held; None makes rows each time.
    """

    scores: NDArray[np.float32]
    view: View
    smoothing: float
    halo_damping: float
    region: Region | None
    values: NDArray[np.float32] | None = None

    def __call__(self, strip: slice | None = None) -> NDArray[np.float32]:
        """The map, or some rows of it: a large image's whole map may not fit into memory.

        Returns:
            (H0, W0) float32; NaN where a crop hid the image from the network and outside the
            region to look at.
        """
        if self.values is not None:
            return self.values if strip is None else self.values[strip]
        pose = self.view.pose
        if pose is None:
            return self._in_part(strip or slice(None))
        return pose.image(self._whole, strip or slice(None))

    @cached_property
    def _whole(self) -> NDArray[np.float32]:
        return self._in_part(slice(None))

    def _in_part(self, strip: slice) -> NDArray[np.float32]:
        """Rows of the map in the part's coordinates, which are the image's where it has no pose."""
        values = source_map(self._shown, self.view, self.smoothing, strip)
        if self.region is not None:
            values[~self.region.inside(self.view.source, strip)] = np.nan
        return values

    def held(self) -> SourceMap:
        """The same map, made once for being read several times, unless it is very large."""
        height, width = self.view.source
        if self.values is not None or height * width > _HELD_PIXELS:
            return self
        return replace(self, values=self())

    def shrunk(self) -> SourceMap:
        """The map of the same image shrunk to twice what the network sees of it, for a picture.

        An image that is cut into tiles keeps its size, as a smaller one does.
        """
        view = self.view.shrunk(_PIXELS_SHOWN)
        if view is self.view:
            return self
        return replace(self, view=view, values=None)

    @property
    def patch_size(self) -> tuple[float, float]:
        """(height, width) of a patch in original pixels."""
        return patch_size(self.view, self.scores.shape)

    def level(self, threshold: float) -> SourceMap:
        """How high the map has to be at each pixel for that pixel to belong to a defect.

        A sharp defect is blurred on its way to the map, so it is measured as any blurred peak is:
        where the map has come down a given part of the way from the peak to what is usual in the
        image. Both are the map's values at the patches' centres: the highest of 5 × 5 patches,
        but the threshold at least, and the median, but the threshold at most.

        Args:
            threshold: that a defect's peak is above.

        Returns:
            The level as a map of its own.
        """
        at_centres = source_map(
            self._shown, _one_pixel_a_patch(self.view, self.scores.shape), self.smoothing
        )
        usual = min(float(np.nanmedian(at_centres)), threshold)
        peak = np.fmax(_highest_around(at_centres, self._tiles, _REACH), threshold)
        level = (usual + _EXTENT * (peak - usual)).astype(np.float32)
        return SourceMap(level, self.view, self.smoothing, 0.0, None)

    @property
    def _tiles(self) -> tuple[int, int]:
        rows, columns = self.view.axes
        return len(rows), len(columns)

    @cached_property
    def _shown(self) -> NDArray[np.float32]:
        shown: NDArray[np.float32] = without_halo(self.scores, self.halo_damping, self._tiles)
        return shown


def without_halo(scores: Array, damping: float, tiles: tuple[int, int] = (1, 1)) -> Array:
    """Patch scores, lowered beside higher ones: s · (s / highest of 3 × 3)^γ.

    A patch that is the highest among its eight neighbours keeps its score, and so does a plateau.

    Args:
        scores: (…, h, w), none negative, tensors or numpy arrays; NaN doesn't count.
        damping: γ; 0 for none.
        tiles: (rows, columns) of the tiles whose grids lie side by side in h and w. Patches of two
            tiles aren't compared, for they aren't neighbours in the image.

    Returns:
        Like `scores`.
    """
    if damping == 0:
        return scores
    highest = _highest_around(scores, tiles).clip(np.finfo(np.float32).tiny)
    damped: Array = scores * (scores / highest) ** damping
    return damped


def _highest_around(scores: Array, tiles: tuple[int, int], reach: int = 1) -> Array:
    """The highest patch (…, h, w) within so many rows and columns, of the same tile."""
    *lead, height, width = scores.shape
    rows, columns = tiles
    each = scores.reshape(*lead, rows, height // rows, columns, width // columns)
    for _ in range(reach):
        each = _highest_beside(_highest_beside(each, -3), -1)
    return each.reshape(scores.shape)


def _highest_beside(scores: Array, axis: int) -> Array:
    """The highest of each value and its two neighbours along an axis; NaN doesn't count."""
    fmax, along = module_of(scores).fmax, scores.swapaxes(axis, 0)
    highest = along + 0
    highest[1:] = fmax(highest[1:], along[:-1])
    highest[:-1] = fmax(highest[:-1], along[1:])
    return highest.swapaxes(0, axis)


def _one_pixel_a_patch(view: View, grid: tuple[int, ...]) -> View:
    """The view of an image whose pixels are the patches' centres, tile by tile."""
    rows, columns = (
        tuple(AxisView(n, piece.size, 0, piece.size, i * n) for i, piece in enumerate(pieces))
        for pieces, n in ((p, count // len(p)) for p, count in zip(view.axes, grid, strict=True))
    )
    return View(rows, columns)


def source_map(
    scores: NDArray[np.float32], view: View, smoothing: float, strip: slice | None = None
) -> NDArray[np.float32]:
    """The anomaly map of one image in its own pixels.

    Args:
        scores: patch scores (h, w), of the whole mosaic where there are tiles; NaN doesn't count.
        view: how the image was turned into the network's input.
        smoothing: standard deviation of the Gaussian in network pixels; 0 for none.
        strip: only these rows of the original image.

    Returns:
        (H0, W0) float32 in score units; NaN where a crop hid the image from the network, and where
        no patch near by counts.
    """
    rows, columns = (
        _source_operator(patches, pieces, smoothing)
        for patches, pieces in zip(scores.shape, view.axes, strict=True)
    )
    start, stop, _ = (strip or slice(None)).indices(view.source[0])
    missing = np.isnan(scores)
    with one_blas_thread():
        summed = _both_ways(rows, np.where(missing, 0, scores), columns, start, stop)
        if not missing.any():
            return summed
        weights = _both_ways(rows, (~missing).astype(np.float32), columns, start, stop)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(weights > LEAST_WEIGHT, summed / weights, np.nan).astype(np.float32)


@lru_cache(maxsize=64)
def upsample_and_smooth(patches: int, size: int, smoothing: float) -> NDArray[np.float32]:
    """One axis of a network map from one axis of the patch grid.

    Returns:
        (size, patches), rows sum to 1.
    """
    centres = np.arange(size, dtype=np.float64) + 0.5
    bilinear = _interpolated(centres * (patches / size), np.eye(patches))
    return (_gaussian(size, smoothing) @ bilinear).astype(np.float32)


@dataclass(frozen=True, eq=False)
class _Band:
    """Neighbouring rows of an axis' matrix, without the zeros on both sides of what they hold.

    Attributes:
        rows: of the matrix, original pixels.
        patches: columns of the matrix; all others are 0 in these rows.
        block: (rows, patches) float32; NaN outside a crop.
    """

    rows: slice
    patches: slice
    block: NDArray[np.float32]


# Images of one size share a pair.
@lru_cache(maxsize=4)
def _source_operator(patches: int, pieces: Axis, smoothing: float) -> tuple[_Band, ...]:
    """The matrix (source, patches) of an axis, `patches` counted over all its pieces, in bands.

    Whole, that of a long strip in tiles would take gigabytes, nearly all of it zeros.
    """
    each = patches // len(pieces)
    blocks = []
    for axis, share in zip(pieces, _shares(pieces), strict=True):
        positions = axis.to_network(np.arange(axis.start, axis.stop, dtype=np.float64) + 0.5)
        smooth = upsample_and_smooth(each, axis.size, smoothing).astype(np.float64)
        piece = _interpolated(positions, smooth)
        hidden = np.ones(axis.stop, dtype=bool)
        hidden[axis.visible()] = False
        piece[hidden[axis.start :]] = np.nan
        blocks.append((share[:, None] * piece).astype(np.float32))
    edges = sorted({edge for axis in pieces for edge in (axis.start, axis.stop)})
    bands = []
    for start, stop in pairwise(edges):
        there = [i for i, axis in enumerate(pieces) if axis.start < stop and axis.stop > start]
        parts = [blocks[i][start - pieces[i].start : stop - pieces[i].start] for i in there]
        columns = slice(there[0] * each, (there[-1] + 1) * each)
        bands.append(_Band(slice(start, stop), columns, np.hstack(parts)))
    return tuple(bands)


def map_matrix(patches: int, axis: AxisView, smoothing: float) -> NDArray[np.float32]:
    """One axis of an untiled image's anomaly map from one axis of the patch grid.

    Returns:
        (source, patches), rows sum to 1; NaN in rows that a crop hides.
    """
    (band,) = _source_operator(patches, (axis,), smoothing)
    return band.block


def _both_ways(
    rows: tuple[_Band, ...],
    values: NDArray[np.float32],
    columns: tuple[_Band, ...],
    start: int,
    stop: int,
) -> NDArray[np.float32]:
    """(rows @ values @ columns.T)[start:stop]."""
    height = max(0, stop - start)
    wide = np.empty((height, values.shape[1]), np.float32)
    for band in rows:
        here = slice(max(start, band.rows.start), min(stop, band.rows.stop))
        if here.start < here.stop:
            block = band.block[here.start - band.rows.start : here.stop - band.rows.start]
            wide[here.start - start : here.stop - start] = block @ values[band.patches]
    result = np.empty((height, columns[-1].rows.stop), np.float32)
    for band in columns:
        result[:, band.rows] = wide[:, band.patches] @ band.block.T
    return result


def _shares(pieces: Axis) -> list[NDArray[np.float64]]:
    """How much of each original pixel is each piece's; they sum to 1 and fade linearly."""
    total = np.zeros(pieces[-1].stop)
    fades = []
    for i, piece in enumerate(pieces):
        centres = np.arange(piece.start, piece.stop) + 0.5
        fade = np.ones(piece.source)
        if i > 0 and pieces[i - 1].stop > piece.start:
            fade = (centres - piece.start) / (pieces[i - 1].stop - piece.start)
        if i + 1 < len(pieces) and piece.stop > pieces[i + 1].start:
            out = (piece.stop - centres) / (piece.stop - pieces[i + 1].start)
            fade = np.minimum(fade, out)
        fade = np.minimum(fade, 1)
        total[piece.start : piece.stop] += fade
        fades.append(fade)
    return [f / total[p.start : p.stop] for f, p in zip(fades, pieces, strict=True)]


def _interpolated(
    positions: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Linear interpolation between rows of `values` at k + 0.5, constant beyond the outer ones.

    Returns:
        (len(positions), values.shape[1]).
    """
    count = len(values)
    place = np.clip(positions - 0.5, 0, count - 1)
    low = np.minimum(place.astype(np.int64), max(count - 2, 0))
    share = (place - low)[:, None]
    return np.asarray((1 - share) * values[low] + share * values[np.minimum(low + 1, count - 1)])


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
