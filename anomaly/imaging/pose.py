"""Where a part lies in an image: the way to the part's coordinates, and back. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray


class Motion(NamedTuple):
    """A turn about a picture's middle, then a shift: from the part's coordinates to the image's.

    Attributes:
        turn: in radians, clockwise.
        x: in pixels, to the right.
        y: in pixels, down.
    """

    turn: float
    x: float
    y: float

    def after(self, first: Motion) -> Motion:
        """The motion that another one and then this one make."""
        cos, sin = math.cos(self.turn), math.sin(self.turn)
        x, y = cos * first.x - sin * first.y, sin * first.x + cos * first.y
        return Motion(wrapped(self.turn + first.turn), x + self.x, y + self.y)

    def inverse(self) -> Motion:
        """The way back."""
        back = Motion(-self.turn, 0.0, 0.0).after(Motion(0.0, -self.x, -self.y))
        return Motion(-self.turn, back.x, back.y)

    def matrix(self, size: tuple[int, int]) -> NDArray[np.float64]:
        """(2, 3) between the indices of pixels of pictures of (H, W), as OpenCV takes it."""
        cos, sin = math.cos(self.turn), math.sin(self.turn)
        x, y = (size[1] - 1) / 2, (size[0] - 1) / 2
        turned = np.array([[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]])
        turned[:, 2] += self.x, self.y
        return turned


@dataclass(frozen=True)
class Pose:
    """Where a part lies in an image.

    Attributes:
        motion: from the part's coordinates to the image's, in original pixels.
        size: (H0, W0) of the image.
        correlation: of the part with the reference, 1 where they are equal.
        reason: why the image isn't called good whatever its score; empty where nothing speaks
            against it.
    """

    motion: Motion
    size: tuple[int, int]
    correlation: float = 1.0
    reason: str = ""

    def part(self, pixels: NDArray[Any], rows: slice, columns: slice) -> NDArray[Any]:
        """Some rows and columns of the image in the part's coordinates.

        What lies outside the image is filled with its border.

        Args:
            pixels: (H0, W0, 3) of the image.
            rows: from where to where, in original pixels.
            columns: as well.
        """
        return cut(pixels, self.motion, rows, columns, cv2.INTER_CUBIC, cv2.BORDER_REPLICATE)

    def shrunk(self, size: tuple[int, int]) -> Pose:
        """The pose in the same image shrunk to (H, W)."""
        height, width = (new / old for new, old in zip(size, self.size, strict=True))
        turn, x, y = self.motion
        return replace(self, motion=Motion(turn, x * width, y * height), size=size)

    def covers(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether points of the part (h, w) lie in the image.

        Args:
            x: of the columns (w,), in original pixels from the corner of the part's frame.
            y: of the rows (h,).
        """
        points = self.in_image(np.stack(np.meshgrid(x, y), axis=2))
        return np.asarray(((points >= 0) & (points < self.size[::-1])).all(axis=2))

    def in_image(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points (…, 2) of the part, x and y from its frame's corner, in the image."""
        return _at(self.motion, self.size, points)

    def in_part(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points (…, 2) of the image, x and y from its corner, in the part's coordinates."""
        return _at(self.motion.inverse(), self.size, points)

    def image(self, values: NDArray[np.float32], strip: slice) -> NDArray[np.float32]:
        """Values in the part's coordinates, in some rows of the image.

        Args:
            values: (H0, W0); NaN counts as unknown.
            strip: the rows.

        Returns:
            (rows, W0); NaN where nothing is known.
        """
        known = np.isfinite(values).astype(np.float32)
        rows = slice(*strip.indices(self.size[0])[:2])
        weighted, weights = (
            cut(v, self.motion.inverse(), rows, slice(0, self.size[1]))
            for v in (np.where(known > 0, values, 0), known)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(weights >= 0.5, weighted / weights, np.nan).astype(np.float32)


def _at(motion: Motion, size: tuple[int, int], points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where a motion of pictures of (H, W) takes points (…, 2), x and y from the corner."""
    matrix = motion.matrix(size)
    return np.asarray((points - 0.5) @ matrix[:, :2].T + matrix[:, 2] + 0.5)


def cut(
    values: NDArray[Any],
    motion: Motion,
    rows: slice,
    columns: slice,
    interpolation: int = cv2.INTER_LINEAR,
    border: int = cv2.BORDER_CONSTANT,
) -> NDArray[Any]:
    """The pixels at rows and columns of a moved picture, of one of another size than those."""
    matrix = motion.matrix(values.shape[:2])
    matrix[:, 2] += matrix[:, :2] @ (columns.start, rows.start)
    size = columns.stop - columns.start, rows.stop - rows.start
    how = interpolation | cv2.WARP_INVERSE_MAP
    return np.asarray(cv2.warpAffine(values, matrix, size, flags=how, borderMode=border))


def wrapped(turn: float) -> float:
    """A turn between -π and π."""
    return math.remainder(turn, math.tau)
