"""How Gaussians lie in memory and in a model folder. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

import numpy as np

from anomaly.arrays import Array, as_numpy
from anomaly.errors import DataError, ModelError
from anomaly.methods.base import axis_length, check_tensors

# Rows of a band: few enough to save nearly half, enough for matrix products to be quick.
_PANEL = 64


@lru_cache(maxsize=16)
def panel_rows(dimensions: int) -> tuple[slice, ...]:
    """The rows of each panel of a `Triangle`; a panel is as wide as its last row."""
    edges = [*range(0, dimensions, _PANEL), dimensions]
    return tuple(slice(a, b) for a, b in pairwise(edges))


def position_blocks(positions: int, numbers: int, block: int) -> list[slice]:
    """Slices of the positions that work on at most `block` numbers, at `numbers` each."""
    size = max(1, block // numbers)
    return [slice(i, min(i + size, positions)) for i in range(0, positions, size)]


def check_grid(embeddings: Array, grid: tuple[int, int], *channels: int) -> None:
    """See that embeddings (B, h, w, D) are of a grid (h, w) and have one of several D.

    Raises:
        DataError: they aren't, or haven't.
    """
    height, width, found = embeddings.shape[1:]
    if (height, width) != grid:
        raise DataError(
            f"an image has {height}×{width} patches where the first training image had "
            f"{grid[0]}×{grid[1]}: PaDiM needs one shape for all images; crop them to one aspect, "
            "or use model.kind=patchcore, which takes any"
        )
    if found not in channels:
        raise DataError(
            f"embeddings have {found} channels where the training's had {channels[0]}; use the "
            "same backbone and layers"
        )


def check_gaussians(tensors: Mapping[str, Array]) -> tuple[tuple[int, int], int]:
    """See that saved tensors are those of Gaussians, one for each position.

    Args:
        tensors: by name; arrays, too.

    Returns:
        The grid (h, w), and D, the channels of the embeddings before the projection.

    Raises:
        ModelError: they aren't.
    """
    positions, dimensions = (axis_length(tensors, "mean", axis) for axis in (1, 2))
    drawn = axis_length(tensors, "projection", 1) < 0
    whitening = _low_rank if "basis" in tensors else _cholesky
    check_tensors(
        tensors,
        {
            "grid": ("int64", (2,)),
            "channels": ("int64", ()),
            "mean": ("float32", (2, -1, -1)),
            "projection": ("int64", (dimensions,)) if drawn else ("float32", (-1, dimensions)),
            **whitening(tensors, positions, dimensions),
        },
    )
    height, width = tensors["grid"].tolist()
    weights, channels = tensors["projection"], int(tensors["channels"])
    fits = len(weights) == channels if weights.ndim == 2 else _is_choice(weights, channels)
    if not fits or min(height, width) < 1 or height * width != positions:
        raise ModelError(
            f"a grid of {height}×{width} and {channels} channels don't go with the scorer's other "
            "tensors"
        )
    if (
        "basis" in tensors
        and min(float(tensors["regularisation"]), float(tensors["precision"].min())) <= 0
    ):
        raise ModelError("the scorer's tensors hold a variance that isn't above 0")
    return (height, width), channels


def _cholesky(
    _: Mapping[str, Array], positions: int, dimensions: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of what a `CholeskyWhitening` saves."""
    panels = {
        f"factor.{i}": ("int16", (positions, rows.stop - rows.start, rows.stop))
        for i, rows in enumerate(panel_rows(max(dimensions, 1)))
    }
    return {**panels, "scale": ("float32", (positions, dimensions))}


def _low_rank(
    tensors: Mapping[str, Array], positions: int, dimensions: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of what a `LowRankWhitening` saves."""
    rank = axis_length(tensors, "basis", 1)
    return {
        "basis": ("int16", (positions, rank, dimensions)),
        "scale": ("float32", (positions, rank)),
        "precision": ("float32", (positions, rank)),
        "regularisation": ("float64", ()),
    }


def _is_choice(chosen: Array, channels: int) -> bool:
    """Whether channels (d,) are some of D, in rising order."""
    return bool((np.diff(as_numpy(chosen), prepend=-1, append=channels) > 0).all())
