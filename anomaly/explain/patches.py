"""Patches as crops of the image that they lie in, with the surroundings that make them readable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.explain.pictures import RgbImage, captioned, grid, shortened, stacked
from anomaly.imaging.geometry import AnyView, AxisView
from anomaly.maps.regions import MarkedRegion

MARK = (255, 64, 32)
_FLAWS = 4  # that are shown
_NUMBERED = 48
_CONTEXT = 7  # sides of the patch that a crop shows


@dataclass(frozen=True)
class Box:
    """A rectangle in an image's own pixels; bottom and right lie outside."""

    top: float
    left: float
    bottom: float
    right: float


def patch_box(view: AnyView, grid: tuple[int, int], row: int, column: int) -> Box:
    """Where a patch lies in the original image.

    Args:
        view: how the network saw the image.
        grid: (h, w) of its patch grid; with tiles, of their mosaic.
        row: of the patch.
        column: of the patch.
    """
    pieces_down, pieces_across = view.axes
    top, bottom = _edges(pieces_down, grid[0], row)
    left, right = _edges(pieces_across, grid[1], column)
    return Box(top, left, bottom, right)


def patch_centres(
    view: AnyView, grid: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where the middles of the patches' rows (h,) and columns (w,) lie in the original image.

    Args:
        view: how the network saw the image.
        grid: (h, w) of its patch grid; with tiles, of their mosaic.
    """
    rows, columns = (
        np.array([sum(_edges(pieces, count, index)) / 2 for index in range(count)])
        for pieces, count in zip(view.axes, grid, strict=True)
    )
    return rows, columns


def _edges(pieces: Sequence[AxisView], count: int, index: int) -> tuple[float, float]:
    """Where one of `count` patches along an axis of one or more pieces begins and ends."""
    each = count // len(pieces)
    piece = pieces[index // each]
    local = index % each
    start, end = piece.to_source(np.array([local, local + 1.0]) * (piece.size / each)).tolist()
    return start, end


def worst_patches(
    scores: NDArray[np.float32],
    flaws: Sequence[MarkedRegion],
    centres: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> list[tuple[int, int]]:
    """The highest patch of each of the four worst flaws.

    Args:
        scores: patch scores (h, w); NaN doesn't count.
        flaws: what is marked in the image, the worst first. Where nothing is, the highest of all
            patches is returned alone.
        centres: of the patches' rows (h,) and columns (w,), in the image's own pixels.

    Returns:
        (row, column) of each, each once.
    """
    counted = np.nan_to_num(scores, nan=-np.inf)
    found: dict[tuple[int, int], None] = {}
    for flaw in flaws[:_FLAWS]:
        rows = _within(centres[0], flaw.y, flaw.height, flaw.peak_y)
        columns = _within(centres[1], flaw.x, flaw.width, flaw.peak_x)
        best = np.unravel_index(counted[np.ix_(rows, columns)].argmax(), (len(rows), len(columns)))
        found[int(rows[best[0]]), int(columns[best[1]])] = None
    if not found:
        row, column = np.unravel_index(counted.argmax(), scores.shape)
        found[int(row), int(column)] = None
    return list(found)


def _within(centres: NDArray[np.float64], start: int, size: int, peak: int) -> NDArray[np.intp]:
    """The places of the centres inside a stretch of an axis; of the one nearest to its peak."""
    inside = np.flatnonzero((centres >= start) & (centres < start + size))
    return inside if len(inside) else np.array([np.abs(centres - peak - 0.5).argmin()])


def patch_crop(picture: RgbImage, box: Box, size: int = 150) -> RgbImage:
    """A patch and its surroundings, the patch itself outlined.

    Args:
        picture: the whole image, (H0, W0, 3).
        box: the patch.
        size: side of the result.

    Returns:
        (size, size, 3); beyond the image's border it is white.
    """
    side = max(1, round(max(box.bottom - box.top, box.right - box.left) * _CONTEXT))
    top = round((box.top + box.bottom - side) / 2)
    left = round((box.left + box.right - side) / 2)
    padded = cv2.copyMakeBorder(
        picture, side, side, side, side, cv2.BORDER_CONSTANT, value=(255, 255, 255)
    )
    crop = padded[top + side : top + 2 * side, left + side : left + 2 * side]
    how = cv2.INTER_AREA if side > size else cv2.INTER_CUBIC
    enlarged = np.asarray(cv2.resize(crop, (size, size), interpolation=how), np.uint8)
    inside = Box(box.top - top, box.left - left, box.bottom - top, box.right - left)
    return _outlined(enlarged, inside, size / side)


def marked(picture: RgbImage, boxes: Sequence[Box], longest: int = 420) -> RgbImage:
    """The whole image, small enough for a page, with numbered frames around patches.

    Args:
        picture: (H0, W0, 3).
        boxes: number 1 first.
        longest: of its sides, in the result.
    """
    height, width = picture.shape[:2]
    scale = longest / max(height, width)
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    shape = max(1, round(width * scale)), max(1, round(height * scale))
    small = np.asarray(cv2.resize(picture, shape, interpolation=how), np.uint8)
    if boxes and shape[0] < _NUMBERED:  # room for the numbers
        padding = ((0, 0), (0, _NUMBERED - shape[0]), (0, 0))
        small = np.pad(small, padding, constant_values=255)
    for number, box in enumerate(boxes, start=1):
        small = _outlined(small, box, scale)
        # Beside the frame, and inside the picture where the frame lies at its border.
        at = (
            min(round(box.right * scale) + 4, small.shape[1] - 12),
            max(round(box.top * scale) + 4, 13),
        )
        # White below the colour: readable on any image.
        for colour, thickness in (((255, 255, 255), 3), (MARK, 1)):
            cv2.putText(
                small,
                str(number),
                at,
                cv2.FONT_HERSHEY_SIMPLEX,
                0.5,
                colour,
                thickness,
                cv2.LINE_AA,
            )
    return small


def absent(text: str) -> RgbImage:
    """A grey tile (150, 150, 3) that says why there is no picture."""
    tile = np.full((150, 150, 3), 225, np.uint8)
    for i, word in enumerate(text.split(", ")):
        at = (6, 67 + 16 * i)
        cv2.putText(tile, word, at, cv2.FONT_HERSHEY_SIMPLEX, 0.38, (90, 90, 90), 1, cv2.LINE_AA)
    return tile


def comparison(rows: Sequence[Sequence[tuple[Sequence[str], RgbImage]]]) -> RgbImage:
    """A line for each patch: what was flagged, then what it was compared with.

    Args:
        rows: captions (lines of text) and square pictures of one size, the flagged patch first.

    Returns:
        (H, W, 3).
    """
    lines = []
    for row in rows:
        tiles = []
        for captions, picture in row:
            tile = picture
            for text in reversed(captions):
                tile = captioned(tile, shortened(text, picture.shape[1]))
            tiles.append(tile)
        first, rest = tiles[0], tiles[1:]
        gap = np.full((first.shape[0] + 8, 24, 3), 255, np.uint8)
        lines.append(np.hstack([grid([first], 1), gap, grid(rest, len(rest))] if rest else [first]))
    return stacked(lines)


def _outlined(picture: RgbImage, box: Box, scale: float) -> RgbImage:
    """A copy with a frame just outside the box, in pixels of the picture / `scale`."""
    result = picture.copy()
    first = round(box.left * scale) - 1, round(box.top * scale) - 1
    last = round(box.right * scale), round(box.bottom * scale)
    cv2.rectangle(result, first, last, MARK, 1)
    return result
