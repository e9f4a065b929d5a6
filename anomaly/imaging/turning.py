"""Turned copies of images: how pictures are turned, and where a copy's patches are in its image.

There are eight ways to lay a picture: quarter turns anticlockwise, 0 to 3, and 4 to 7, the same of
the picture mirrored left to right. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.preprocessing import Loaded, UnusableImage

_Value = TypeVar("_Value", bound=np.generic)

# Rows of patches from one way of turning to the next: more than any image has.
_ROWS = 1 << 16


def turned(picture: NDArray[_Value], turn: int) -> NDArray[_Value]:
    """A view of a picture (H, W, …), laid in another way.

    Args:
        picture: the first two axes are turned.
        turn: 0 for the picture as it is, to 7.
    """
    return np.rot90(picture[:, ::-1] if turn >= 4 else picture, turn % 4)


def with_turned(
    batches: Iterable[list[Loaded] | UnusableImage], turns: Sequence[int]
) -> Iterator[list[Loaded] | UnusableImage]:
    """Each batch, and behind it a copy of it for each of the ways to turn it; refusals pass.

    Args:
        batches: of images of one size, or of tiles.
        turns: 1 to 7 each.
    """
    for batch in batches:
        yield batch
        if not isinstance(batch, UnusableImage):
            for turn in turns:
                yield [
                    replace(item, pixels=np.ascontiguousarray(turned(item.pixels, turn)), turn=turn)
                    for item in batch
                ]


def turned_corner(row: int, column: int, turn: int) -> tuple[int, int]:
    """Row and column by which a grid's first patch is known, others for each way of turning.

    A patch's row and column tell it from all others of its image and of the image's copies. Rows
    of an image as it is begin at 0, of copies at 65,536 times their turn.

    Args:
        row: of the grid's first patch in the turned image; 0 but in tiles.
        column: of that patch.
        turn: 0 for the image as it is, to 7.
    """
    return turn * _ROWS + row, column


def turn_of(row: int) -> tuple[int, int]:
    """How the image of a patch was turned, and the patch's row in the turned image.

    Args:
        row: of a patch, counted from a `turned_corner`.
    """
    return divmod(row, _ROWS)


def upright(
    turn: int, patch: tuple[int, int], grid: tuple[int, int], tiles: tuple[int, int]
) -> tuple[int, int]:
    """Row and column in an image of a patch of its turned copy, of which each tile is turned.

    Args:
        turn: how the image was turned, 0 to 7.
        patch: row and column in the turned image, or in the mosaic of turned tiles.
        grid: (h, w) of the patches of the image as it is, all tiles together.
        tiles: rows and columns of tiles; (1, 1) for an image without them.
    """
    height, width = grid[0] // tiles[0], grid[1] // tiles[1]
    places: NDArray[np.int64] = turned(np.arange(height * width).reshape(height, width), turn)
    (down, y), (across, x) = divmod(patch[0], places.shape[0]), divmod(patch[1], places.shape[1])
    y, x = divmod(int(places[y, x]), width)
    return down * height + y, across * width + x
