"""Geometry of the network's input: places of its pixels in the original image, and its region.

An image reaches the network resized and perhaps cropped. A `View` records both, axis by axis, so
that each patch score is drawn over its original pixels. A `Region` tells which original pixels
count, and so which patches. Imports no torch: decoding processes use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError
from anomaly.imaging.alignment import Pose
from anomaly.imaging.read import aspect_error

# Share by which an image's aspect may differ for a method that needs one grid of all images.
ASPECT_TOLERANCE = 0.1
# Limits of the ratio of the sides, and of a side of the network's input in pixels. Network and maps
# cost the square of the longer side: an image of 1×100000 pixels, brought to the area of any other,
# would take 49 GiB.
_THINNEST = 64
_LONGEST_INPUT = 8192

Mask = NDArray[np.bool_]
Polygon = tuple[tuple[float, float], ...]

_COUNTS = 0.5  # share of a patch that must lie inside the region for the patch to count
_PICTURE_TOLERANCE = 0.02  # share by which an image's aspect may differ from its mask's
_STRIP = 1024  # rows whose masks are in memory at once


def is_strip(size: tuple[int, int]) -> bool:
    """True if an image of (H0, W0) is too thin for the network to see as a whole."""
    return max(size) > _THINNEST * min(size)


def check_shape(size: tuple[int, int]) -> None:
    """Raise a DataError for an image (H0, W0) that `is_strip`."""
    if is_strip(size):
        raise DataError(
            f"its {size[1]}×{size[0]} pixels are too thin: one side may be at most {_THINNEST} "
            "times as long as the other; set image.tile, or cut the image into pieces"
        )


@dataclass(frozen=True)
class AxisView:
    """One axis of a view: `source` pixels are resized to `resized`, then `size` are kept.

    Coordinates are continuous with pixel centres at +0.5, so that resizing is a pure scaling.

    Attributes:
        source: number of original pixels.
        resized: number of pixels after resizing, before the crop.
        offset: first pixel of the crop, in resized pixels.
        size: number of pixels that the network sees.
        start: first original pixel; other than 0 only in tiles.
    """

    source: int
    resized: int
    offset: int
    size: int
    start: int = 0

    @property
    def stop(self) -> int:
        """The original pixel behind the last one."""
        return self.start + self.source

    def to_network(self, position: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Network coordinates of original coordinates; they may lie outside [0, size]."""
        scaled = (position - self.start) * (self.resized / self.source)
        return np.asarray(scaled - self.offset, np.float64)

    def to_source(self, position: NDArray[np.float64]) -> NDArray[np.float64]:
        """Original coordinates of network coordinates."""
        return self.start + (position + self.offset) * (self.source / self.resized)

    def visible(self) -> slice:
        """Range of the original pixels whose centres the network sees."""
        inside = self.to_network(np.arange(self.start, self.stop) + 0.5)
        # A centre exactly on the crop's edge is inside at the start, outside at the end.
        kept = np.flatnonzero((inside > -1e-9) & (inside < self.size - 1e-9)) + self.start
        return slice(int(kept[0]), int(kept[-1]) + 1)


Axis: TypeAlias = tuple[AxisView, ...]


@dataclass(frozen=True)
class View:
    """Geometry from an image to the network's input: the whole image, or tiles of a large one.

    Tiles have equal size and are taken row by row; the patch grid of each is one block of the
    mosaic that stands for the whole image. With alignment, rows and columns lie in the part's
    coordinates, in which all images of one size have equal views; `pose` leads back to the image's
    own coordinates.

    Attributes:
        rows: axis of the height; several for tiles, which overlap, from top to bottom.
        columns: axis of the width; several for tiles, from left to right.
        pose: pose of the part; None without alignment.
    """

    rows: Axis
    columns: Axis
    pose: Pose | None = field(default=None, compare=False)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the network's input; with tiles, of each."""
        return self.rows[0].size, self.columns[0].size

    @property
    def source(self) -> tuple[int, int]:
        """(H0, W0) of the original image."""
        return self.rows[-1].stop, self.columns[-1].stop

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def whole(self) -> bool:
        """True for an image without tiles."""
        return len(self.rows) == len(self.columns) == 1

    def tile_at(self, row: int, column: int) -> View:
        """View of the tile in a row and a column of tiles."""
        return View((self.rows[row],), (self.columns[column],), self.pose)

    def shrunk(self, times: float) -> View:
        """View of the image reduced until one axis has `times` as many pixels as it is resized to.

        The image keeps its aspect, so the other axis has as many or more. An image that is smaller
        or cut into tiles keeps its size.
        """
        axes = self.rows[0], self.columns[0]
        share = max(times * axis.resized / axis.source for axis in axes)
        if share >= 1 or not self.whole:
            return self
        rows, columns = (replace(axis, source=round(share * axis.source)) for axis in axes)
        pose = self.pose and self.pose.shrunk((rows.source, columns.source))
        return View((rows,), (columns,), pose)


@dataclass(frozen=True)
class Sizing:
    """The rule that gives every image its view.

    Attributes:
        resize: length of both sides in pixels, aspect not kept; None keeps the aspect.
        crop: side of the centred square cut out of the resized image; None keeps all of it.
        area: side of a square in pixels; an image that keeps its aspect gets the square's area.
        multiple: stride of the coarsest hooked layer; sides are rounded to multiples of it, so that
            the layer's grid fits. Not with `resize`.
        aspect: H/W that all images must have within `ASPECT_TOLERANCE`; None for any.
        tile: side of the square tiles that a large image is cut into, in original pixels; each
            tile is seen at `area`. None sees every image as a whole.
        overlap: least overlap of neighbouring tiles, in original pixels.
    """

    resize: int | None
    crop: int | None
    area: int
    multiple: int
    aspect: float | None = None
    tile: int | None = None
    overlap: int = 0

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """(H, W) of every network input; None for tiles and for images that keep their aspects."""
        if self.tile is not None:
            return None
        if self.resize is not None:
            return self.crop or self.resize, self.crop or self.resize
        return None if self.aspect is None else self._input_size(self.aspect)

    def view(self, source: tuple[int, int]) -> View:
        """The view of an image of (H0, W0) pixels.

        Raises:
            DataError: the image is too thin, its network input would be too long, or its aspect
                is too far from `aspect`.
        """
        if self.tile is not None:
            return View(self._tiles(source[0], self.tile), self._tiles(source[1], self.tile))
        check_shape(source)
        if self.resize is None:
            height, width = sides = self._input_size(self._input_aspect(source))
            if max(sides) > _LONGEST_INPUT:
                raise DataError(
                    f"its {source[1]}×{source[0]} pixels would be {width}×{height} for the "
                    f"network, but a side may have at most {_LONGEST_INPUT}; lower image.area, or "
                    "cut the image into pieces"
                )
            axes = [AxisView(old, new, 0, new) for old, new in zip(source, sides, strict=True)]
        else:
            size = self.crop or self.resize
            offset = (self.resize - size) // 2
            axes = [AxisView(length, self.resize, offset, size) for length in source]
        return View((axes[0],), (axes[1],))

    def _input_aspect(self, source: tuple[int, int]) -> float:
        """H/W of the network's input: `aspect`, else the image's own.

        Raises:
            DataError: the image's own is off `aspect` by more than `ASPECT_TOLERANCE`.
        """
        if self.aspect is None:
            return source[0] / source[1]
        error = aspect_error(source, self.aspect)
        if error > ASPECT_TOLERANCE:
            raise DataError(
                f"its {source[1]}×{source[0]} pixels are off the training images' shape by "
                f"{error:.0%}: PaDiM takes up to {ASPECT_TOLERANCE:.0%}; crop it to their shape, "
                "or use model.kind=patchcore, which takes any"
            )
        return self.aspect

    def _input_size(self, aspect: float) -> tuple[int, int]:
        """(H, W) of the network's input for an aspect H/W."""
        root = math.sqrt(aspect)
        return self._rounded(self.area * root), self._rounded(self.area / root)

    def _rounded(self, side: float) -> int:
        """A side in pixels, rounded to a multiple of `multiple`, at least one."""
        return max(1, round(side / self.multiple)) * self.multiple

    def _tiles(self, length: int, tile: int) -> Axis:
        """Tiles along an axis of `length` pixels: as few as cover it, alike, spread evenly."""
        side = min(tile, length)  # an image that is smaller than a tile is one smaller tile
        step = tile - self.overlap
        count = 1 + max(0, math.ceil((length - tile) / step))
        starts = np.rint(np.linspace(0, length - side, count)).astype(int).tolist()
        # One scale for all images, also for those that are smaller than a tile.
        size = self._rounded(side * self.area / tile)
        return tuple(AxisView(side, size, 0, size, start) for start in starts)


def patch_size(view: View, grid: tuple[int, ...]) -> tuple[float, float]:
    """(height, width) of a patch in original pixels; `grid` is (h, w) of the image's patches."""
    height, width = (
        len(pieces) * pieces[0].size / count * pieces[0].source / pieces[0].resized
        for pieces, count in zip(view.axes, grid, strict=True)
    )
    return height, width


def render(pixels: NDArray[np.generic], full_scale: float, view: View) -> NDArray[np.float32]:
    """The network's input for an image or a tile: the only place where its pixels are resized.

    Each axis is averaged over area when it shrinks and interpolated when it grows, on its own:
    OpenCV's area mode silently becomes plain sampling as soon as either axis grows.

    Args:
        pixels: image (H0, W0, 3) RGB of any depth.
        full_scale: the pixel value that means 1.0.
        view: view of the whole image, or of one tile.

    Returns:
        (H, W, 3) float32 RGB in [0, 1].
    """
    (rows,), (columns,) = view.axes
    down, across = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    box = pixels[down, across] if view.pose is None else view.pose.to_part(pixels, down, across)
    # Area averaging of float32 keeps 16-bit detail and makes equal pictures of different depth
    # render equal; 8-bit arithmetic would round in between.
    image = box.astype(np.float32)
    # Divided, not multiplied by the reciprocal: 257 v / 65535 is then v / 255 to the last bit.
    image /= np.float32(full_scale)
    shrinks = rows.resized <= rows.source, columns.resized <= columns.source
    if all(shrinks) or not any(shrinks):
        image = _resize(image, rows.resized, columns.resized, area=shrinks[0])
    else:
        image = _resize(image, rows.resized, columns.source, area=shrinks[0])
        image = _resize(image, rows.resized, columns.resized, area=shrinks[1])
    top, left = rows.offset, columns.offset
    return np.ascontiguousarray(image[top : top + rows.size, left : left + columns.size])


def resampling_matrix(axis: AxisView) -> NDArray[np.float32]:
    """Matrix (size, source) by which `render` resizes and crops one axis of a whole image."""
    identity = np.eye(axis.source, dtype=np.float32)
    area = axis.resized <= axis.source
    return _resize(identity, axis.resized, axis.source, area=area)[axis.offset :][: axis.size]


def _resize(
    image: NDArray[np.float32], height: int, width: int, *, area: bool
) -> NDArray[np.float32]:
    """An image resized to (height, width), averaged over areas or interpolated."""
    if image.shape[:2] == (height, width):
        return image
    mode = cv2.INTER_AREA if area else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, (width, height), interpolation=mode), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Polygons:
    """Shape of one or several polygons; their union, where they overlap.

    Attributes:
        corners: corners (x, y) of each polygon, as shares of the image's width and height, (0, 0)
            at the upper left. Of a polygon that crosses itself, an area enclosed twice is outside.
    """

    corners: tuple[Polygon, ...]

    def inside(self, size: tuple[int, int], strip: slice) -> Mask:
        """Mask (rows, W0) of the pixels with centres inside, in a strip of an image (H0, W0)."""
        y = np.arange(*strip.indices(size[0])) + 0.5
        mask = np.zeros((len(y), size[1]), dtype=bool)
        for polygon in self.corners:
            points = np.asarray(polygon, dtype=np.float64) * (size[1], size[0])
            mask |= _filled(points, y, size[1])
        return mask


@dataclass(frozen=True, eq=False)
class DrawnMask:
    """Shape of a mask picture, stretched over images of its aspect.

    Attributes:
        pixels: mask (H, W), True inside.
    """

    pixels: Mask

    def inside(self, size: tuple[int, int], strip: slice) -> Mask:
        """Mask (rows, W0) of the pixels inside, in a strip of an image (H0, W0).

        Raises:
            DataError: the image has another aspect than the picture.
        """
        height, width = self.pixels.shape
        if aspect_error(size, height / width) > _PICTURE_TOLERANCE:
            raise DataError(
                f"its {size[1]}×{size[0]} pixels have another shape than the mask of "
                f"{width}×{height} that says where to look; crop the image to that shape, or draw "
                "another mask"
            )
        rows = np.arange(*strip.indices(size[0])) * height // size[0]
        columns = np.arange(size[1]) * width // size[1]
        return np.asarray(self.pixels[rows[:, None], columns])


Shape = Polygons | DrawnMask


@dataclass(frozen=True, eq=False)
class Region:
    """The part of an image that counts.

    Attributes:
        look: only pixels inside this shape count; None for all of the image.
        ignore: pixels inside this shape don't count; None for no such pixels.
    """

    look: Shape | None
    ignore: Shape | None

    def inside(self, size: tuple[int, int], strip: slice = slice(None)) -> Mask:
        """Mask (rows, W0) of the original pixels that count, in a strip of an image (H0, W0).

        Raises:
            DataError: the shapes don't fit an image of this size.
        """
        rows = len(range(*strip.indices(size[0])))
        mask = self.look.inside(size, strip) if self.look else np.ones((rows, size[1]), np.bool_)
        return mask if self.ignore is None else mask & ~self.ignore.inside(size, strip)


def patch_mask(region: Region | None, layout: View, grid: tuple[int, int]) -> Mask:
    """Mask (h, w) of an image's patches that count; with tiles, of their mosaic.

    A patch counts when at least half of its original pixels lie in the region and, with alignment,
    its middle lies in the photograph.

    Args:
        region: region of the image that counts; None for the whole image.
        layout: view of the image, with the part's pose.
        grid: (h, w) of the patches; with tiles, of one tile.

    Raises:
        DataError: the region's shapes don't fit such an image, or no patch counts.
    """
    rows, columns = (  # the patches' middles
        patch_edges(pieces, patches).mean(axis=0)
        for pieces, patches in zip(layout.axes, grid, strict=True)
    )
    mask: Mask = np.ones((len(rows), len(columns)), np.bool_)
    if region is not None:
        mask = _patches(region, layout, grid)
    pose = layout.pose
    if pose is not None:
        middles = pose.in_image(np.stack(np.meshgrid(columns, rows), axis=2))
        mask = mask & ((middles >= 0) & (middles < pose.size[::-1])).all(axis=2)
        if not mask.any():
            outside = "all of the region to look at lies outside the photograph"
            raise DataError(pose.reason or outside)
    return mask


def overhang(region: Region, layout: View) -> tuple[float, float]:
    """Pixels (across, down) by which a region reaches beyond the photograph; 0 or less if inside.

    Args:
        region: region of the part that counts.
        layout: view of the image, with the part's pose; without one, the region lies inside.
    """
    if layout.pose is None:
        return 0.0, 0.0
    ends = layout.pose.in_image(_ends(region, layout.source))
    across, down = np.maximum(-ends, ends - layout.source[::-1]).max(axis=0).tolist()
    return across, down


@lru_cache(maxsize=32)
def _ends(region: Region, size: tuple[int, int]) -> NDArray[np.float64]:
    """Centres (n, 2), as (x, y), of a region's first and last pixel in each row."""
    inside = region.inside(size)
    rows = np.flatnonzero(inside.any(axis=1))
    first, last = inside.argmax(axis=1), size[1] - 1 - inside[:, ::-1].argmax(axis=1)
    return np.concatenate([np.stack([x[rows], rows], axis=1) for x in (first, last)]) + 0.5


@lru_cache(maxsize=32)
def _patches(region: Region, layout: View, grid: tuple[int, int]) -> Mask:
    """Mask (h, w) of the patches at least half of which lies in a region.

    Raises:
        DataError: there is no such patch.
    """
    size = layout.source
    (above, below), (left, right) = (
        patch_edges(pieces, patches) for pieces, patches in zip(layout.axes, grid, strict=True)
    )
    covered = np.zeros((len(above), len(left)))
    for start in range(0, size[0], _STRIP):
        strip = slice(start, min(start + _STRIP, size[0]))
        inside = region.inside(size, strip)
        across = _sums(inside, left, right)  # (rows, w): pixels inside, by column of patches
        within = [np.clip(edge - start, 0, len(inside)) for edge in (above, below)]
        covered += _sums(across.T, *within).T
    # The tolerance lets a patch count of which exactly half is inside, despite rounding.
    counts = covered >= _COUNTS * np.outer(below - above, right - left) - 1e-6
    if not counts.any():
        raise DataError(
            f"in its {size[1]}×{size[0]} pixels, no patch lies at least half inside the region to "
            "look at; enlarge it, or raise image.area"
        )
    return counts


def patch_edges(pieces: Axis, patches: int) -> NDArray[np.float64]:
    """Starts and ends (2, n) of the patches along an axis, in original pixels.

    Args:
        pieces: one axis of a view; its tiles follow one another.
        patches: number of patches; with tiles, of each.
    """
    edges = [piece.to_source(np.linspace(0.0, piece.size, patches + 1)) for piece in pieces]
    return np.concatenate([np.stack([places[:-1], places[1:]]) for places in edges], axis=1)


def _sums(
    values: NDArray[np.generic], starts: NDArray[np.float64], stops: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Integrals (rows, n) of each row of values, over n intervals between fractional positions."""
    totals = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=totals[:, 1:])
    before, until = (interpolated(places + 0.5, totals.T) for places in (starts, stops))
    return (until - before).T


def interpolated(positions: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear interpolation (m, n) between rows (k, n), constant beyond the outer ones.

    Args:
        positions: (m,); row i lies at i + 0.5.
        rows: the rows of a matrix.
    """
    count = len(rows)
    place = np.clip(positions - 0.5, 0, count - 1)
    low = np.minimum(place.astype(np.int64), max(count - 2, 0))
    share = (place - low)[:, None]
    return np.asarray((1 - share) * rows[low] + share * rows[np.minimum(low + 1, count - 1)])


def _filled(points: NDArray[np.float64], y: NDArray[np.floating[Any]], width: int) -> Mask:
    """Mask (h, width) of the pixel centres inside a polygon of corners (N, 2), (x, y) in pixels.

    A centre is inside if it lies to the right of an odd number of the polygon's lines. The rows'
    centres lie at `y` (h,).
    """
    crossings = np.zeros((len(y), width + 1), dtype=np.uint8)
    for ends in zip(points, np.roll(points, -1, axis=0), strict=True):
        (x0, y0), (x1, y1) = sorted(ends, key=lambda point: point[1])
        crossed = np.flatnonzero((y0 <= y) & (y < y1))
        # A horizontal line crosses no row of centres; 1 only spares it a division by 0.
        x = x0 + (y[crossed] - y0) * (x1 - x0) / (y1 - y0 or 1.0)
        column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
        np.add.at(crossings, (crossed, column), 1)
    inside = np.cumsum(crossings[:, :width], axis=1, dtype=np.uint8) & 1
    return np.asarray(inside, dtype=bool)
