"""Which patches of a batch count, by the region to look at. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anomaly.arrays import Array, like
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import NetworkInput, turned
from anomaly.imaging.region import Region, counted


def inside_of(
    batch: Sequence[NetworkInput], embeddings: Array, region: Region | None
) -> Array | None:
    """Which patches (B, h, w) of embeddings (B, h, w, D) count; None for all.

    Raises:
        DataError: none of an image's patches does.
    """
    return inside([(item.layout, item.tile, item.turn) for item in batch], embeddings, region)


def inside(
    pieces: Sequence[tuple[AnyView, tuple[int, int], int]], embeddings: Array, region: Region | None
) -> Array | None:
    """Which patches of images count, by their layouts and tiles.

    Args:
        pieces: how each image became the network's input, which tile of it this is, and how that
            was turned, see `anomaly.imaging.loading`.
        embeddings: (B, h, w, D), a tensor or an array; so is the result.
        region: what of each image counts; None for all of it.

    Returns:
        (B, h, w) bool; None for all.

    Raises:
        DataError: none of an image's patches counts.
    """
    if region is None:
        return None
    height, width = embeddings.shape[1], embeddings.shape[2]
    masks = [
        turned(
            counted(region, layout, tile, (width, height) if turn % 2 else (height, width)), turn
        )
        for layout, tile, turn in pieces
    ]
    return like(np.stack(masks), embeddings)
