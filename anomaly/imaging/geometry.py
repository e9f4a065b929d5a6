"""Where each pixel of the network's input lies in the original image, and the way back.

An image reaches the network resized and perhaps cropped. A `View` remembers both, axis by axis, so
that a patch score finds its original pixels again. Imports no torch: decoding processes use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError

if TYPE_CHECKING:
    from anomaly.imaging.pose import Pose

# How far an image's aspect may be off where all need one grid.
ASPECT_TOLERANCE = 0.1
# What the network and the maps cost grows with the square of the longer side: a picture of 1×100000
# pixels, brought to the area of any other, would take 49 GiB.
THINNEST = 64
_LONGEST_INPUT = 8192


def is_strip(size: tuple[int, int]) -> bool:
    """Whether an image of (H0, W0) is too thin for the network to see as a whole."""
    return max(size) > THINNEST * min(size)


def check_shape(size: tuple[int, int]) -> None:
    """See that an image of (H0, W0) isn't a mere line.

    Raises:
        DataError: one side is more than `THINNEST` times the other.
    """
    if is_strip(size):
        raise DataError(
            f"its {size[1]}×{size[0]} pixels are too thin: one side may be {THINNEST} times as "
            "long as the other at most; set image.tile, or cut it into pieces"
        )


def aspect_error(size: tuple[int, int], aspect: float) -> float:
    """How far (H0, W0) is from an aspect H/W, as a share: 0.1 where one side is 10 % too long."""
    ratio = size[0] / size[1] / aspect
    return max(ratio, 1 / ratio) - 1


@dataclass(frozen=True)
class AxisView:
    """One axis of a view: `source` pixels are resized to `resized`, then `size` are kept.

    Coordinates are continuous with pixel centres at +0.5, so that resizing is a pure scaling.

    Attributes:
        source: original pixels that are taken.
        resized: pixels after resizing, before the crop.
        offset: where the crop starts, in resized pixels.
        size: what the network sees.
        start: the first original pixel that is taken; not 0 in tiles only.
    """

    source: int
    resized: int
    offset: int
    size: int
    start: int = 0

    @property
    def stop(self) -> int:
        """The original pixel after the last one taken."""
        return self.start + self.source

    def to_network(self, position: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Original coordinates as network coordinates (may lie outside [0, size])."""
        scaled = (position - self.start) * (self.resized / self.source)
        return np.asarray(scaled - self.offset, np.float64)

    def to_source(self, position: NDArray[np.float64]) -> NDArray[np.float64]:
        """Network coordinates as original coordinates."""
        return self.start + (position + self.offset) * (self.source / self.resized)

    def visible(self) -> slice:
        """The original pixels whose centres the network sees."""
        inside = self.to_network(np.arange(self.start, self.stop) + 0.5)
        # A centre on the crop's very edge is in at its start and out at its end.
        kept = np.flatnonzero((inside > -1e-9) & (inside < self.size - 1e-9)) + self.start
        return slice(int(kept[0]), int(kept[-1]) + 1)


@dataclass(frozen=True)
class View:
    """How one image is turned into the network's input: `rows` and `columns` apart.

    Where the part's pose was found, both are of the part's coordinates, in which all images of one
    size have equal views; the way back to the image's own is `pose`.
    """

    rows: AxisView
    columns: AxisView
    pose: Pose | None = field(default=None, compare=False)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the network's input."""
        return self.rows.size, self.columns.size

    @property
    def source(self) -> tuple[int, int]:
        """(H0, W0) of the original image."""
        return self.rows.source, self.columns.source

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Rows and columns, in one piece each."""
        return (self.rows,), (self.columns,)

    @property
    def whole(self) -> bool:
        """Whether the network sees all of the image at once."""
        return True

    def shrunk(self, times: float) -> View:
        """The view of the same image with at most so many times the network's pixels on an axis.

        The other axis has as many or more, for the image keeps its aspect, and an image that is
        smaller its size.
        """
        pair = self.rows, self.columns
        share = max(times * axis.resized / axis.source for axis in pair)
        if share >= 1:
            return self
        rows, columns = (replace(axis, source=round(share * axis.source)) for axis in pair)
        pose = self.pose and self.pose.shrunk((rows.source, columns.source))
        return View(rows, columns, pose)


@dataclass(frozen=True)
class Tiling:
    """How one large image is turned into several inputs of equal size: tiles, row by row.

    A tile's grid of patches is one block of the mosaic that stands for the whole image.

    Attributes:
        rows: the tiles' extents along the image's height, in order; neighbours overlap.
        columns: along its width.
        pose: as a view's.
    """

    rows: Axis
    columns: Axis
    pose: Pose | None = field(default=None, compare=False)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of each tile, as the network sees it."""
        return self.rows[0].size, self.columns[0].size

    @property
    def source(self) -> tuple[int, int]:
        """(H0, W0) of the original image."""
        return self.rows[-1].stop, self.columns[-1].stop

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Rows and columns, in pieces."""
        return self.rows, self.columns

    @property
    def whole(self) -> bool:
        """Whether one tile holds all of the image."""
        return len(self.rows) == len(self.columns) == 1

    def tiles(self) -> Iterator[tuple[int, int, View]]:
        """Row, column and view of each tile."""
        for i, rows in enumerate(self.rows):
            for j, columns in enumerate(self.columns):
                yield i, j, View(rows, columns, self.pose)


Axis: TypeAlias = tuple[AxisView, ...]
AnyView: TypeAlias = View | Tiling


@dataclass(frozen=True)
class Sizing:
    """The rule that gives every image its view.

    Attributes:
        resize: both sides in pixels, aspect not kept; None keeps the aspect.
        crop: side of the centred square cut out of the resized image; None keeps all of it.
        area: side of the square whose area a kept-aspect image gets.
        multiple: kept-aspect sides are rounded to a multiple of this: of the coarsest hooked
            layer's stride, so that its grid fits.
        aspect: H/W that all images have to have, give or take `ASPECT_TOLERANCE`; None for any.
        tile: side of the square tiles that a large image is cut into, in original pixels; each is
            then seen at `area`. None sees every image as a whole.
        overlap: of neighbouring tiles, at least, in original pixels.
    """

    resize: int | None
    crop: int | None
    area: int
    multiple: int
    aspect: float | None = None
    tile: int | None = None
    overlap: int = 0

    @property
    def only(self) -> tuple[int, int] | None:
        """(H, W) that every image has for the network; None where they keep their own aspects."""
        if self.tile is not None:
            return None
        if self.resize is not None:
            return self.crop or self.resize, self.crop or self.resize
        return None if self.aspect is None else self._kept_aspect(self.aspect)

    def view(self, source: tuple[int, int]) -> AnyView:
        """The view of an image of (H0, W0) pixels.

        Raises:
            DataError: it is too thin, the network's input would be too long, or its aspect isn't
                that of the others, and has to be.
        """
        if self.tile is not None:
            return Tiling(self._tiles(source[0], self.tile), self._tiles(source[1], self.tile))
        check_shape(source)
        if self.resize is None:
            rows, columns = self._kept_aspect(self._accepted(source))
            if max(rows, columns) > _LONGEST_INPUT:
                raise DataError(
                    f"its {source[1]}×{source[0]} pixels would be {columns}×{rows} for the "
                    f"network, but a side may have at most {_LONGEST_INPUT}; lower image.area, or "
                    "cut it into pieces"
                )
            return View(
                AxisView(source[0], rows, 0, rows), AxisView(source[1], columns, 0, columns)
            )
        size = self.crop or self.resize
        offset = (self.resize - size) // 2
        return View(
            AxisView(source[0], self.resize, offset, size),
            AxisView(source[1], self.resize, offset, size),
        )

    def _accepted(self, source: tuple[int, int]) -> float:
        """H/W that an image is brought to."""
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

    def _kept_aspect(self, aspect: float) -> tuple[int, int]:
        root = math.sqrt(aspect)
        return self._rounded(self.area * root), self._rounded(self.area / root)

    def _rounded(self, side: float) -> int:
        return max(1, round(side / self.multiple)) * self.multiple

    def _tiles(self, length: int, tile: int) -> Axis:
        """Tiles of one size, as few as cover an axis, spread evenly."""
        side = min(tile, length)
        step = tile - self.overlap
        count = 1 + max(0, math.ceil((length - tile) / step))
        starts = np.rint(np.linspace(0, length - side, count)).astype(int).tolist()
        # One scale for all images, also for those that are smaller than a tile.
        size = self._rounded(side * self.area / tile)
        return tuple(AxisView(side, size, 0, size, start) for start in starts)


def patch_size(view: AnyView, grid: tuple[int, ...]) -> tuple[float, float]:
    """(height, width) of a patch in original pixels.

    Args:
        view: of the image.
        grid: (h, w) of its patches, of the whole mosaic where there are tiles.
    """
    height, width = (
        len(pieces) * pieces[0].size / count * pieces[0].source / pieces[0].resized
        for pieces, count in zip(view.axes, grid, strict=True)
    )
    return height, width


def render(pixels: NDArray[np.generic], full_scale: float, view: View) -> NDArray[np.float32]:
    """The network's input for one image: the only place where pixels are resized.

    Each axis is averaged over area when it shrinks and interpolated when it grows, on its own:
    OpenCV's area mode silently becomes plain sampling as soon as either axis grows.

    Args:
        pixels: (H0, W0, 3) RGB of any depth.
        full_scale: the pixel value that means 1.0.
        view: made for an image of this size, or one of its tiles.

    Returns:
        (H, W, 3) float32 RGB in [0, 1].
    """
    rows, columns = view.rows, view.columns
    # Area averaging of float32 keeps 16-bit detail and makes equal pictures of different depth
    # render equal; 8-bit arithmetic would round in between.
    down, across = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    box = pixels[down, across] if view.pose is None else view.pose.part(pixels, down, across)
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
    """What `render` does along one axis of a whole image, as a matrix (size, source)."""
    every = np.eye(axis.source, dtype=np.float32)
    area = axis.resized <= axis.source
    return _resize(every, axis.resized, axis.source, area=area)[axis.offset :][: axis.size]


def _resize(
    image: NDArray[np.float32], height: int, width: int, *, area: bool
) -> NDArray[np.float32]:
    if image.shape[:2] == (height, width):
        return image
    how = cv2.INTER_AREA if area else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, (width, height), interpolation=how), dtype=np.float32)
