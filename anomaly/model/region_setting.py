"""Settings -> where to look. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anomaly.config.schema import ImageConfig, ShapeConfig
from anomaly.imaging.region import Picture, Polygons, Region, Shape


def region_of(
    image: ImageConfig, folder: Path, read: Callable[[Path], NDArray[np.bool_]]
) -> Region | None:
    """Where a config says to look.

    Args:
        image: what it says.
        folder: where pictures are taken from.
        read: reads a picture as a mask.

    Raises:
        ImageError: a picture can't be read.
    """

    def shape(config: ShapeConfig | None) -> Shape | None:
        if config is None:
            return None
        if config.png is not None:
            return Picture(read(folder / config.png.expanduser()))
        return Polygons(config.polygons, config.unit == "relative")

    look, ignore = shape(image.region), shape(image.ignore)
    return None if look is None and ignore is None else Region(look, ignore)
