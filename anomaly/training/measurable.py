"""Do zones and sizes go with the training images? Asked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from anomaly.config.schema import Config
from anomaly.datasets import Sample
from anomaly.errors import ConfigError, DataError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.geometry import AnyView, Sizing, patch_size
from anomaly.imaging.loading import size_of
from anomaly.imaging.region import Region
from anomaly.scoring.build import judge_of, smallest_area
from anomaly.scoring.rules import Judge

Grid = tuple[int, int]


def image_sizes(samples: Sequence[Sample], decoders: Decoders) -> list[Grid]:
    """Sizes (H0, W0) of all readable images."""
    headers = decoders.map(size_of, [s.path for s in samples if s.image is None])
    sizes = [size for size in headers if isinstance(size, tuple)]
    return sizes + [s.image.size for s in samples if s.image is not None]


def check_measurable(
    config: Config,
    sizes: Iterable[Grid],
    sizing: Sizing,
    grid_of: Callable[[Grid], Grid],
    region: Region | None,
) -> None:
    """Refuse zones outside the images and defect sizes that can't be measured.

    Args:
        config: all settings.
        sizes: (H0, W0) of the training images.
        sizing: gives each its view.
        grid_of: gives (h, w) of the patches for (H, W) of a network input.
        region: what of each image counts; None for all of it.

    Raises:
        ConfigError: a zone or a size doesn't go with an image; says which.
    """
    judge, smallest, grid_of = judge_of(config), smallest_area(config), cache(grid_of)
    for size in sorted(set(sizes)):
        try:
            view = sizing.view(size)
            counted = _patches(region, view, grid_of(view.size))
        except DataError:
            continue  # such an image is refused, with its reason, where it is read
        _check_zones(judge, view, grid_of(view.size), counted)
        _check_sizes(judge, smallest, view, counted)


def _patches(region: Region | None, view: AnyView, grid: Grid) -> NDArray[np.bool_]:
    if region is not None:
        return region.patches(view, grid)
    rows, columns = view.axes
    return np.ones((len(rows) * grid[0], len(columns) * grid[1]), np.bool_)


def _check_zones(judge: Judge, view: AnyView, grid: Grid, counted: NDArray[np.bool_]) -> None:
    rest = counted.copy()
    for zone in judge.zones:
        try:
            inside = zone.region.patches(view, grid)
        except DataError as error:
            raise ConfigError(
                f"zones.{zone.name} doesn't fit a training image; draw it anew: {error}"
            ) from None
        if not (inside & counted).any():
            raise ConfigError(
                f"zones.{zone.name} lies outside image.region or in image.ignore, where nothing "
                "counts; move it, or leave it out"
            )
        if zone.reject_rate is not None:
            rest &= ~inside
    if not rest.any():
        raise ConfigError(
            "the zones with a reject_rate cover the whole image; remove one of them, and give its "
            "rate as calibration.reject_rate, which holds outside zones"
        )


def _check_sizes(judge: Judge, smallest: float, view: AnyView, counted: NDArray[np.bool_]) -> None:
    """Refuse sizes below a patch, and a smallest defect as large as the image."""
    height, width = patch_size(view, counted.shape)
    side = min(height, width)
    least = {"area": height * width, "length": side, "thickness": side}
    wanted = [
        (f"rule {rule.name!r}: {name}", name, size)
        for rule in judge.rules
        for name, size in rule.sizes
    ]
    if smallest:
        wanted.append(("model.smallest_defect: area", "area", smallest))
        if smallest > counted.sum() * height * width / 2:
            raise ConfigError(
                f"model.smallest_defect is {smallest:.0f} pixels, more than half of what counts of "
                f"an image of {view.source[1]}×{view.source[0]} pixels; give a smaller area"
            )
    for what, name, size in wanted:
        if size < least[name] * (1 - 1e-6):
            raise ConfigError(
                f"{what} is {size:.4g} pixels, but one patch covers {height:.0f} × {width:.0f} "
                f"pixels (height × width) of an image of {view.source[1]}×{view.source[0]}, and "
                f"nothing smaller can be measured; give {math.ceil(least[name])} or more, or raise "
                "image.area"
            )
