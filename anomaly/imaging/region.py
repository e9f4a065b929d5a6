"""Where to look: which original pixels of an image count, and which patches. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError
from anomaly.imaging.geometry import AnyView, Axis, AxisView, aspect_error

Mask = NDArray[np.bool_]
Polygon = tuple[tuple[float, float], ...]

# A patch counts when at least this share of it is inside.
COUNTS = 0.5
_PICTURE_TOLERANCE = 0.02
_STRIP = 1024


@dataclass(frozen=True, eq=False)
class Polygons:
    """A shape drawn by its corners.

    Attributes:
        corners: of each polygon, (x, y) as shares of the image's width and height, (0, 0) at its
            upper left corner; what is inside an odd number of a polygon's lines is inside it, and
            polygons add up.
    """

    corners: tuple[Polygon, ...]

    def inside(self, size: tuple[int, int], strip: slice) -> Mask:
        """Mask of the pixel centres inside, in some rows of an image of (H0, W0) pixels."""
        top, bottom, _ = strip.indices(size[0])
        mask = np.zeros((bottom - top, size[1]), dtype=bool)
        for polygon in self.corners:
            points = np.asarray(polygon, dtype=np.float64) * (size[1], size[0])
            mask |= _filled(points, slice(top, bottom), size[1])
        return mask


@dataclass(frozen=True, eq=False)
class DrawnMask:
    """A shape drawn as a picture; images of another size but its aspect are covered by it, too.

    Attributes:
        pixels: (H, W), True inside.
    """

    pixels: Mask

    def inside(self, size: tuple[int, int], strip: slice) -> Mask:
        """Which pixels lie inside, in some rows of an image of (H0, W0) pixels.

        Raises:
            DataError: the image has another aspect.
        """
        height, width = self.pixels.shape
        if aspect_error(size, height / width) > _PICTURE_TOLERANCE:
            raise DataError(
                f"its {size[1]}×{size[0]} pixels have another shape than the mask of "
                f"{width}×{height} that says where to look"
            )
        rows = np.arange(*strip.indices(size[0])) * height // size[0]
        columns = np.arange(size[1]) * width // size[1]
        return np.asarray(self.pixels[rows[:, None], columns])


Shape = Polygons | DrawnMask


@dataclass(frozen=True, eq=False)
class Region:
    """What of an image counts.

    Attributes:
        look: only what is in here; None for all of the image.
        ignore: but for what is in here; None for nothing.
    """

    look: Shape | None
    ignore: Shape | None

    def inside(self, size: tuple[int, int], strip: slice = slice(None)) -> Mask:
        """Which original pixels count.

        Args:
            size: (H0, W0) of the image.
            strip: only these rows.

        Returns:
            (rows, W0).

        Raises:
            DataError: the shapes don't fit an image of this size.
        """
        top, bottom, _ = strip.indices(size[0])
        if self.look is None:
            mask = np.ones((bottom - top, size[1]), dtype=bool)
        else:
            mask = self.look.inside(size, strip)
        return mask if self.ignore is None else mask & ~self.ignore.inside(size, strip)

    def patches(self, layout: AnyView, grid: tuple[int, int]) -> Mask:
        """Which patches count: those at least half of whose original pixels do.

        Args:
            layout: how the image was turned into the network's input.
            grid: (h, w) of the network's patches; of each tile, where there are several.

        Returns:
            (h, w), of the whole mosaic where the image is tiled.

        Raises:
            DataError: the shapes don't fit such an image, or no patch counts.
        """
        return _patches(self, layout, grid)


def counted(region: Region | None, layout: AnyView, grid: tuple[int, int]) -> Mask:
    """Mask (h, w) of an image's patches that count; of the whole mosaic if it is tiled.

    Where the part was moved, a patch counts only if its middle lies in the photograph.

    Args:
        region: what of the image counts; None for all of it.
        layout: how the image was turned into the network's input.
        grid: (h, w) of the network's patches; of each tile, where there are several.

    Raises:
        DataError: none counts.
    """
    down, across = (
        np.mean(_edges(pieces, count), axis=0)
        for pieces, count in zip(layout.axes, grid, strict=True)
    )
    mask: Mask = np.ones((len(down), len(across)), np.bool_)
    if region is not None:
        mask = region.patches(layout, grid)
    pose = layout.pose
    if pose is not None:
        mask = mask & pose.covers(across, down)
        if not mask.any():
            raise DataError(
                pose.reason or "all of the region to look at lies outside the photograph"
            )
    return mask


def beyond(region: Region, layout: AnyView) -> tuple[float, float]:
    """Pixels (across, down) that a region reaches beyond the photograph; 0 or less if none.

    Args:
        region: what of the image counts.
        layout: how the image was turned into the network's input, its part's pose included.
    """
    if layout.pose is None:
        return 0.0, 0.0
    ends = layout.pose.in_image(_ends(region, layout.source))
    across, down = np.maximum(-ends, ends - layout.source[::-1]).max(axis=0).tolist()
    return across, down


@lru_cache(maxsize=32)
def _ends(region: Region, size: tuple[int, int]) -> NDArray[np.float64]:
    """X and y of the first and the last pixel of each row of a region: all others lie between."""
    inside = region.inside(size)
    rows = np.flatnonzero(inside.any(axis=1))
    first, last = inside.argmax(axis=1), size[1] - 1 - inside[:, ::-1].argmax(axis=1)
    return np.concatenate([np.stack([x[rows], rows], axis=1) for x in (first, last)]) + 0.5


@lru_cache(maxsize=32)
def _patches(region: Region, layout: AnyView, grid: tuple[int, int]) -> Mask:
    size = layout.source
    (above, below), (left, right) = (
        _edges(pieces, count) for pieces, count in zip(layout.axes, grid, strict=True)
    )
    covered = np.zeros((len(above), len(left)))
    for start in range(0, size[0], _STRIP):
        strip = slice(start, min(start + _STRIP, size[0]))
        inside = region.inside(size, strip)
        across = _sums(inside, left, right)  # (rows, w)
        within = [np.clip(edge - start, 0, len(inside)) for edge in (above, below)]
        covered += _sums(across.T, *within).T
    counts = covered >= COUNTS * np.outer(below - above, right - left) - 1e-6
    if not counts.any():
        raise DataError(
            f"in its {size[1]}×{size[0]} pixels, no patch lies at least half inside the region to "
            "look at; enlarge it, or raise image.area"
        )
    return counts


def _edges(pieces: Axis, patches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where each patch starts and ends in original pixels, piece after piece."""

    def edges(piece: AxisView) -> NDArray[np.float64]:
        return piece.to_source(np.linspace(0.0, piece.size, patches + 1))

    every = [edges(piece) for piece in pieces]
    return np.concatenate([e[:-1] for e in every]), np.concatenate([e[1:] for e in every])


def _sums(
    values: NDArray[np.generic], starts: NDArray[np.float64], stops: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Integrals of each row's values between fractional positions, (rows, len(starts))."""
    totals = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=totals[:, 1:])

    def until(positions: NDArray[np.float64]) -> NDArray[np.float64]:
        low = np.clip(positions.astype(np.int64), 0, values.shape[1] - 1)
        part = positions - low
        return np.asarray(totals[:, low] * (1 - part) + totals[:, low + 1] * part)

    return until(stops) - until(starts)


def _filled(points: NDArray[np.float64], rows: slice, width: int) -> Mask:
    """The pixels of some rows whose centres an odd number of a polygon's lines lies left of."""
    crossings = np.zeros((rows.stop - rows.start, width + 1), dtype=np.uint8)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
        if y0 == y1:
            continue
        (x0, y0), (x1, y1) = sorted(((x0, y0), (x1, y1)), key=lambda point: point[1])
        first = max(int(np.ceil(y0 - 0.5)), rows.start)
        last = min(int(np.ceil(y1 - 0.5)), rows.stop)
        if first >= last:
            continue
        y = np.arange(first, last)
        x = x0 + (y + 0.5 - y0) * (x1 - x0) / (y1 - y0)
        column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
        np.add.at(crossings, (y - rows.start, column), 1)
    inside = np.cumsum(crossings[:, :width], axis=1, dtype=np.uint8) & 1
    return np.asarray(inside, dtype=bool)
