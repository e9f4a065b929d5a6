"""Where each pixel of the network's input lies in the original image, and the way back.

An image reaches the network resized and perhaps cropped. A `View` remembers both, axis by axis, so
that a patch score finds its original pixels again. Imports no torch: decoding processes use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

# How far an image's aspect may be off where all need one grid.
ASPECT_TOLERANCE = 0.1


def aspect_error(size: tuple[int, int], aspect: float) -> float:
    """How far (H0, W0) is from an aspect H/W, as a share: 0.1 where one side is 10 % too long."""
    ratio = size[0] / size[1] / aspect
    return max(ratio, 1 / ratio) - 1


@dataclass(frozen=True)
class AxisView:
    """One axis of a view: `source` pixels are resized to `resized`, then `size` are kept.

    Coordinates are continuous with pixel centres at +0.5, so that resizing is a pure scaling.

    Attributes:
        source: original pixels.
        resized: pixels after resizing, before the crop.
        offset: where the crop starts, in resized pixels.
        size: what the network sees.
    """

    source: int
    resized: int
    offset: int
    size: int

    def to_network(self, position: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Original coordinates as network coordinates (may lie outside [0, size])."""
        return np.asarray(position * (self.resized / self.source) - self.offset, np.float64)

    def to_source(self, position: NDArray[np.float64]) -> NDArray[np.float64]:
        """Network coordinates as original coordinates."""
        return (position + self.offset) * (self.source / self.resized)

    def visible(self) -> slice:
        """The original pixels whose centres the network sees."""
        inside = self.to_network(np.arange(self.source) + 0.5)
        # A centre on the crop's very edge is in at its start and out at its end.
        kept = np.flatnonzero((inside > -1e-9) & (inside < self.size - 1e-9))
        return slice(int(kept[0]), int(kept[-1]) + 1)


@dataclass(frozen=True)
class View:
    """How one image is turned into the network's input: `rows` and `columns` apart."""

    rows: AxisView
    columns: AxisView

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the network's input."""
        return self.rows.size, self.columns.size

    @property
    def source(self) -> tuple[int, int]:
        """(H0, W0) of the original image."""
        return self.rows.source, self.columns.source


@dataclass(frozen=True)
class Sizing:
    """The rule that gives every image its view.

    Attributes:
        resize: both sides in pixels, aspect not kept; None keeps the aspect.
        crop: side of the centred square cut out of the resized image; None keeps all of it.
        area: side of the square whose area a kept-aspect image gets.
        multiple: kept-aspect sides are rounded to a multiple of this (the coarsest hooked stride).
    """

    resize: int | None
    crop: int | None
    area: int
    multiple: int

    def view(self, source: tuple[int, int]) -> View:
        """The view of an image of (H0, W0) pixels."""
        if self.resize is None:
            rows, columns = self._kept_aspect(source)
            return View(
                AxisView(source[0], rows, 0, rows), AxisView(source[1], columns, 0, columns)
            )
        size = self.crop or self.resize
        offset = (self.resize - size) // 2
        return View(
            AxisView(source[0], self.resize, offset, size),
            AxisView(source[1], self.resize, offset, size),
        )

    def _kept_aspect(self, source: tuple[int, int]) -> tuple[int, int]:
        root = math.sqrt(source[0] / source[1])
        return self._rounded(self.area * root), self._rounded(self.area / root)

    def _rounded(self, side: float) -> int:
        return max(1, round(side / self.multiple)) * self.multiple


def render(pixels: NDArray[np.generic], full_scale: float, view: View) -> NDArray[np.float32]:
    """The network's input for one image: the only place where pixels are resized.

    Each axis is averaged over area when it shrinks and interpolated when it grows, on its own:
    OpenCV's area mode silently becomes plain sampling as soon as either axis grows.

    Args:
        pixels: (H0, W0, 3) RGB of any depth.
        full_scale: the pixel value that means 1.0.
        view: made for an image of this size.

    Returns:
        (H, W, 3) float32 RGB in [0, 1].
    """
    rows, columns = view.rows, view.columns
    # Area averaging of float32 keeps 16-bit detail and makes equal pictures of different depth
    # render equal; 8-bit arithmetic would round in between.
    image = pixels.astype(np.float32)
    image *= np.float32(1.0 / full_scale)
    shrinks = rows.resized <= rows.source, columns.resized <= columns.source
    if all(shrinks) or not any(shrinks):
        image = _resize(image, rows.resized, columns.resized, area=shrinks[0])
    else:
        image = _resize(image, rows.resized, columns.source, area=shrinks[0])
        image = _resize(image, rows.resized, columns.resized, area=shrinks[1])
    top, left = rows.offset, columns.offset
    return np.ascontiguousarray(image[top : top + rows.size, left : left + columns.size])


def _resize(
    image: NDArray[np.float32], height: int, width: int, *, area: bool
) -> NDArray[np.float32]:
    if image.shape[:2] == (height, width):
        return image
    how = cv2.INTER_AREA if area else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, (width, height), interpolation=how), dtype=np.float32)
