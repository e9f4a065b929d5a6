"""Patch scores -> the anomaly map in an image's own pixels, and its defects. Imports no torch.

A patch's receptive field is many times the patch's size, so a small defect raises the scores of all
patches around it: a halo, which `without_halo` damps before the map is made.

Bilinear up-sampling, Gaussian smoothing and the way back through resize and crop are all linear
and act on rows and columns apart. Together they are one small matrix for each axis, so a map is
`rows @ scores @ columns.T`: exact, without padding artefacts, and a strip of it costs no more.

Blending overlapping tiles is linear and acts on each axis apart as well: the matrix of an axis cut
into pieces is the sum of the pieces' matrices, each fading out where the next one takes over.

Patches that don't count (NaN) take no part: each pixel is a weighted mean of the patches that
count, so nothing bleeds in from outside a region and the region's rim isn't dimmed.

A defect's extent follows from the map itself, whatever the threshold: `SourceMap.level`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.arrays import Array, module_of
from anomaly.imaging.geometry import Axis, AxisView, Region, View, interpolated, patch_size
from anomaly.runtime import one_blas_thread

# A pixel is NaN if the patches that count have less weight than this: the blur hardly reaches it.
LEAST_WEIGHT = 1e-4
# A defect ends where the map has fallen to this share of the way from the image's usual value to
# the peak within `_REACH` patches; fitted to the widths and heights of ground-truth masks.
_EXTENT = 0.6
_REACH = 2
_HELD_PIXELS = 8_000_000  # a larger map isn't kept, but made a strip at a time
_PIXELS_SHOWN = 2  # pixels of a heatmap for each pixel of the network's input, on each axis


@dataclass(frozen=True, eq=False)
class SourceMap:
    """Anomaly map of one image in its own pixels, computed at each call.

    Attributes:
        scores: patch scores (h, w); with tiles, of their mosaic. NaN doesn't count.
        view: geometry from the image to the network's input.
        smoothing: standard deviation of the Gaussian in network pixels; 0 for none.
        halo_damping: exponent γ that lowers a patch beside a higher one, see `without_halo`.
        region: region of the image that counts; None for the whole image.
        values: the whole map (H0, W0); None to compute it at each call.
    """

    scores: NDArray[np.float32]
    view: View
    smoothing: float
    halo_damping: float
    region: Region | None
    values: NDArray[np.float32] | None = None

    def __call__(self, strip: slice | None = None) -> NDArray[np.float32]:
        """The map, or some of its rows: a large image's whole map may not fit into memory.

        Args:
            strip: rows of the map; None for all.

        Returns:
            (H0, W0) or (rows, W0) float32; NaN where a crop hid the image from the network, far
            from patches that count, and outside the region.
        """
        if self.values is not None:
            return self.values if strip is None else self.values[strip]
        pose = self.view.pose
        if pose is None:
            return self._in_part(strip or slice(None))
        return pose.to_image(self._whole, strip or slice(None))

    @cached_property
    def _whole(self) -> NDArray[np.float32]:
        """The whole map in the part's coordinates."""
        # Rows of a turned part come from anywhere in this map, so each strip needs all of it.
        return self._in_part(slice(None))

    def _in_part(self, strip: slice) -> NDArray[np.float32]:
        """Rows of the map in the part's coordinates; without a pose, they are the image's."""
        values = source_map(self._shown, self.view, self.smoothing, strip)
        if self.region is not None:
            values[~self.region.inside(self.view.source, strip)] = np.nan
        return values

    def held(self) -> SourceMap:
        """The same map with its values kept, to be read several times; a huge map is not kept."""
        height, width = self.view.source
        if self.values is not None or height * width > _HELD_PIXELS:
            return self
        return replace(self, values=self())

    def shrunk(self) -> SourceMap:
        """The map of the image reduced to about twice the network's input, for a heatmap.

        A smaller image keeps its size, and so does an image that is cut into tiles.
        """
        view = self.view.shrunk(_PIXELS_SHOWN)
        if view is self.view:
            return self
        return replace(self, view=view, values=None)

    def level(self, threshold: float) -> SourceMap:
        """Least map value at each pixel for the pixel to belong to a defect, as a map.

        The map blurs a sharp defect, so its extent is measured like that of any blurred peak:
        where the map has fallen by a given share of the way from the peak to the image's usual
        value. Both are values of the map at the patches' centres: the peak is the highest of 5 × 5
        patches, at least the threshold; the usual value is the median, at most the threshold.

        Args:
            threshold: least peak of a defect, in score units.
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
        """Patch scores (h, w) without halos."""
        shown: NDArray[np.float32] = without_halo(self.scores, self.halo_damping, self._tiles)
        return shown


def without_halo(scores: Array, damping: float, tiles: tuple[int, int] = (1, 1)) -> Array:
    """Patch scores, lowered beside higher ones: s · (s / highest of 3 × 3)^γ.

    A patch that no neighbour exceeds keeps its score.

    Args:
        scores: (…, h, w), at least 0, a tensor or a numpy array; NaN doesn't count.
        damping: γ; 0 for none.
        tiles: number of tiles (rows, columns) whose grids make up h and w. Patches of different
            tiles aren't compared: tiles overlap, so such patches aren't neighbours in the image.

    Returns:
        Damped scores (…, h, w), of the kind of `scores`.
    """
    if damping == 0:
        return scores
    highest = _highest_around(scores, tiles).clip(np.finfo(np.float32).tiny)
    return scores * (scores / highest) ** damping


def _highest_around(scores: Array, tiles: tuple[int, int], reach: int = 1) -> Array:
    """Highest score (…, h, w) within `reach` rows and columns of each patch, in its tile."""
    *lead, height, width = scores.shape
    rows, columns = tiles
    by_tile = scores.reshape(*lead, rows, height // rows, columns, width // columns)
    for _ in range(reach):
        by_tile = _highest_beside(_highest_beside(by_tile, -3), -1)
    return by_tile.reshape(scores.shape)


def _highest_beside(scores: Array, axis: int) -> Array:
    """Highest of each value and its two neighbours along an axis; NaN doesn't count."""
    fmax, along = module_of(scores).fmax, scores.swapaxes(axis, 0)
    highest = along + 0  # a copy, of an array or a tensor
    highest[1:] = fmax(highest[1:], along[:-1])
    highest[:-1] = fmax(highest[:-1], along[1:])
    return highest.swapaxes(0, axis)


def _one_pixel_a_patch(view: View, grid: tuple[int, ...]) -> View:
    """View of an image with one pixel for each patch, at the patch's centre, tile by tile.

    `grid` is (h, w) of the patches; with tiles, of their mosaic.
    """
    axes = []
    for tiles, count in zip(view.axes, grid, strict=True):
        n = count // len(tiles)  # patches of one tile
        axes.append(tuple(AxisView(n, t.size, 0, t.size, i * n) for i, t in enumerate(tiles)))
    return View(axes[0], axes[1])


def source_map(
    scores: NDArray[np.float32], view: View, smoothing: float, strip: slice | None = None
) -> NDArray[np.float32]:
    """Anomaly map of one image in its own pixels.

    `scores`, `view` and `smoothing` are those of a `SourceMap`; `strip` is the rows of the image to
    compute, None for all.

    Returns:
        (H0, W0) or (rows, W0) float32 in score units; NaN where a crop hid the image from the
        network, and where no nearby patch counts.
    """
    strip = strip or slice(None)
    missing = np.isnan(scores)
    with one_blas_thread():
        summed = _resampled(np.where(missing, 0, scores), view, smoothing, strip)
        if not missing.any():
            return summed
        weights = _resampled((~missing).astype(np.float32), view, smoothing, strip)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(weights > LEAST_WEIGHT, summed / weights, np.nan).astype(np.float32)


@lru_cache(maxsize=64)
def upsampling_matrix(patches: int, size: int, smoothing: float) -> NDArray[np.float32]:
    """Matrix (size, patches) from an axis of the patch grid to an axis of the network map.

    Its rows sum to 1; `smoothing` is the standard deviation of the Gaussian in network pixels.
    """
    centres = np.arange(size, dtype=np.float64) + 0.5
    bilinear = interpolated(centres * (patches / size), np.eye(patches))
    return _smoothed(bilinear, smoothing).astype(np.float32)


def _smoothed(rows: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """A matrix (size, n) whose columns are smoothed by a Gaussian, mirrored at the ends.

    The border and the kernel's end at 4σ are those of SciPy's `gaussian_filter`.
    """
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return rows
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    mirrored = np.pad(rows, ((radius, radius), (0, 0)), mode="symmetric")
    shifted = (mirrored[start : start + len(rows)] for start in range(len(kernel)))
    return np.asarray(sum(weight * part for weight, part in zip(kernel, shifted, strict=True)))


# Images of one size share a pair of matrices.
@lru_cache(maxsize=4)
def _blocks(
    patches: int, pieces: Axis, smoothing: float
) -> tuple[tuple[AxisView, slice, NDArray[np.float32]], ...]:
    """The matrix (source, patches) of an axis as a block for each piece; overlapping blocks add up.

    The whole matrix of a long image in tiles would take gigabytes, nearly all of them zeros.

    Returns:
        For each piece its view, the columns of its patches, and the block (source, patches of the
        piece) with NaN rows where a crop hides the image.
    """
    count = patches // len(pieces)  # of each piece
    blocks = []
    for number, (axis, share) in enumerate(zip(pieces, _shares(pieces), strict=True)):
        positions = axis.to_network(np.arange(axis.start, axis.stop, dtype=np.float64) + 0.5)
        smooth = upsampling_matrix(count, axis.size, smoothing).astype(np.float64)
        block = (share[:, None] * interpolated(positions, smooth)).astype(np.float32)
        visible = axis.visible()
        block[: visible.start - axis.start] = np.nan
        block[visible.stop - axis.start :] = np.nan
        blocks.append((axis, slice(number * count, (number + 1) * count), block))
    return tuple(blocks)


def map_matrix(patches: int, axis: AxisView, smoothing: float) -> NDArray[np.float32]:
    """Matrix (source, patches) from an axis of the patch grid to one of an untiled image's map.

    Its rows sum to 1; they are NaN where a crop hides the image.
    """
    ((_, _, block),) = _blocks(patches, (axis,), smoothing)
    return block


def _resampled(
    values: NDArray[np.float32], view: View, smoothing: float, strip: slice
) -> NDArray[np.float32]:
    """Patch values (h, w) in a strip of original pixels: row matrix @ values @ column matrix.T."""
    rows = _blocks(values.shape[0], view.rows, smoothing)
    columns = _blocks(values.shape[1], view.columns, smoothing)
    if view.whole:  # the usual case, and the fastest: nothing is added up
        ((_, _, down),), ((_, _, across),) = rows, columns
        return np.asarray(down[strip] @ values @ across.T)
    start, stop, _ = strip.indices(view.source[0])
    wide = np.zeros((max(0, stop - start), values.shape[1]), np.float32)
    for axis, patches, block in rows:
        first, last = max(start, axis.start), min(stop, axis.stop)
        if first < last:
            shown = block[first - axis.start : last - axis.start]
            wide[first - start : last - start] += shown @ values[patches]
    result = np.zeros((len(wide), view.source[1]), np.float32)
    for axis, patches, block in columns:
        result[:, axis.start : axis.stop] += wide[:, patches] @ block.T
    return result


def _shares(pieces: Axis) -> list[NDArray[np.float64]]:
    """Weights (source,) of each piece in its original pixels; they fade linearly and sum to 1.

    Args:
        pieces: one axis of a view, whose tiles overlap.
    """
    total = np.zeros(pieces[-1].stop)
    overlaps = [0, *(left.stop - right.start for left, right in pairwise(pieces)), 0]
    fades = []
    for piece, before, behind in zip(pieces, overlaps[:-1], overlaps[1:], strict=True):
        from_start, fade = np.arange(piece.source) + 0.5, np.ones(piece.source)
        if before > 0:
            fade = np.minimum(fade, from_start / before)
        if behind > 0:
            fade = np.minimum(fade, from_start[::-1] / behind)
        total[piece.start : piece.stop] += fade
        fades.append(fade)
    return [f / total[p.start : p.stop] for f, p in zip(fades, pieces, strict=True)]


MARKED, FAINT = 255, 1  # values of `outlined_areas`
_STRIP_PIXELS = 8_000_000  # pixels of a map that are computed or drawn at once
_NEAR_HIGHEST = 0.9  # share of the peak to outline if a rejected image reaches no threshold
_LEAST = 1e-12  # least threshold, so that a map of zeros is never marked


@dataclass(frozen=True)
class MarkedRegion:
    """One connected part of a predicted mask, in original pixels.

    Attributes:
        x: first column of the bounding box.
        y: first row of the bounding box.
        width: width of the bounding box.
        height: height of the bounding box.
        area: area in pixels.
        peak_score: highest value of the anomaly map in the region, in score units.
        peak_x: column of the highest value.
        peak_y: row of the highest value.
        width_uncertainty: width of a patch, to 0.01: the box may be off by it.
        height_uncertainty: height of a patch, likewise.
        length: longer side of the narrowest rotated box around the region, to 0.01.
        thickness: shorter side of that box, to 0.01.
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
    """Strips of rows of an image (H0, W0), each small enough for its map to fit into memory."""
    rows = max(1, _STRIP_PIXELS // size[1])
    for top in range(0, size[0], rows):
        yield slice(top, min(top + rows, size[0]))


def predicted_mask(anomaly_map: SourceMap, threshold: float) -> NDArray[np.uint8]:
    """Mask (H0, W0) of the defects: 255, else 0; each reaches down to `SourceMap.level`.

    Args:
        anomaly_map: the anomaly map; NaN isn't marked.
        threshold: value that a defect's peak exceeds, in score units.
    """
    return _masks(anomaly_map, [threshold])[0]


def highest(anomaly_map: SourceMap) -> float:
    """Highest value of a map, at least 0; NaN doesn't count."""
    rows = strips(anomaly_map.view.source)
    return max(float(np.fmax.reduce(anomaly_map(s), axis=None, initial=0)) for s in rows)


def _masks(anomaly_map: SourceMap, thresholds: Sequence[float]) -> list[NDArray[np.uint8]]:
    """Predicted masks (H0, W0) of thresholds, 0 or 255; they share the strips."""
    masks = [np.zeros(anomaly_map.view.source, np.uint8) for _ in thresholds]
    peak, reached = highest(anomaly_map), []
    for mask, threshold in zip(masks, thresholds, strict=True):
        if threshold < peak:  # else nothing is marked, and the level needn't be computed
            reached.append((mask, threshold, anomaly_map.level(threshold)))
    for strip in strips(anomaly_map.view.source) if reached else ():
        values = anomaly_map(strip)
        for mask, threshold, level in reached:
            if (values > level.scores.min()).any():  # else nothing can be above the level
                # 1 for the extent of a defect, 2 for its peak.
                mask[strip] = np.where(values > level(strip), 1 + (values > threshold), 0)
    for mask, _, _ in reached:
        _keep_with_peaks(mask)
    return masks


def _keep_with_peaks(mask: NDArray[np.uint8]) -> None:
    """Set a mask's 8-connected parts to 255 if they hold a 2, else to 0, in place."""
    left, top, width, height = cv2.boundingRect(mask)
    box = mask[top : top + height, left : left + width]
    count, labels = cv2.connectedComponents(box, connectivity=8)
    has_peak = np.zeros(count, np.uint8)
    has_peak[labels[box == 2]] = 255
    box[...] = has_peak[labels]


def outlined_areas(
    anomaly_map: SourceMap, threshold: float, review: float | None = None, *, rejected: bool = False
) -> NDArray[np.uint8]:
    """Areas that a heatmap outlines.

    Args:
        anomaly_map: the anomaly map.
        threshold: least peak of a marked defect, in score units.
        review: least peak of an area with a fainter outline, a lower value; None for none.
        rejected: the image is rejected. Its score may combine many patches, none of which reaches
            a threshold; then the area around the peak gets the fainter outline.

    Returns:
        (H0, W0) uint8: `MARKED` in the predicted mask, `FAINT` in areas with the fainter outline,
        else 0.
    """
    threshold = max(threshold, _LEAST)
    lowest = threshold if review is None else min(review, threshold)
    if rejected and (peak := highest(anomaly_map)) <= lowest:
        lowest = _NEAR_HIGHEST * peak
    limits = list(dict.fromkeys((threshold, max(lowest, _LEAST))))  # without duplicates
    areas = np.zeros(anomaly_map.view.source, np.uint8)
    for limit, mask in zip(limits, _masks(anomaly_map, limits), strict=True):
        areas |= mask & np.uint8(MARKED if limit == threshold else FAINT)
    return areas


def marked_regions(mask: NDArray[np.uint8], anomaly_map: SourceMap) -> tuple[MarkedRegion, ...]:
    """8-connected regions of a map's predicted mask (H0, W0), the highest peak first."""
    rows = np.flatnonzero(mask.any(axis=1))
    if not len(rows):
        return ()
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    count, labelled, boxes, _ = cv2.connectedComponentsWithStats(mask[top:bottom], connectivity=8)
    labels = np.asarray(labelled, np.int32)
    peaks, places = _peaks(labels, top, anomaly_map, count)
    patch_height, patch_width = patch_size(anomaly_map.view, anomaly_map.scores.shape)
    uncertainties = round(patch_width, 2), round(patch_height, 2)
    regions = []
    # Region 0 is the background.
    _, *facts = zip(boxes.tolist(), peaks.tolist(), places.tolist(), strict=True)
    for label, ((x, y, width, height, area), peak, (row, column)) in enumerate(facts, 1):
        sides = _box_sides(labels[y : y + height, x : x + width] == label)
        box = x, top + y, width, height
        regions.append(MarkedRegion(*box, area, peak, column, row, *uncertainties, *sides))
    return tuple(sorted(regions, key=lambda r: (-r.peak_score, r.y, r.x)))


def _box_sides(region: NDArray[np.bool_]) -> tuple[float, float]:
    """Longer and shorter side of the narrowest rotated box around a region (H, W), in pixels."""
    lines, _ = cv2.findContours(region.view(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    sides = cv2.minAreaRect(np.vstack(lines))[1]  # of the pixels' centres, so 1 is added
    return round(max(sides) + 1, 2), round(min(sides) + 1, 2)


def _peaks(
    labels: NDArray[np.int32], top: int, anomaly_map: SourceMap, count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Highest map value of each region, and its first pixel with that value.

    Args:
        labels: number (H, W0) of each pixel's region, in some rows of the map; 0 is background.
        top: first of these rows.
        anomaly_map: the whole map.
        count: number of regions, background included.

    Returns:
        Peaks (count,), and their places (count, 2) as row and column of the whole map.
    """
    peaks = np.full(count, -np.inf, np.float32)
    places = np.zeros((count, 2), np.int64)
    for strip in strips((len(labels), labels.shape[1])):
        row, column = np.nonzero(labels[strip])
        label = labels[strip][row, column]
        score = anomaly_map(slice(top + strip.start, top + strip.stop))[row, column]
        higher = peaks.copy()
        np.maximum.at(higher, label, score)
        # A place changes only if this strip raises the peak: of equal peaks the uppermost stays.
        at = np.flatnonzero((score == higher[label]) & (higher > peaks)[label])
        changed, first = np.unique(label[at], return_index=True)
        places[changed, 0] = row[at[first]] + top + strip.start
        places[changed, 1] = column[at[first]]
        peaks = higher
    return peaks, places
