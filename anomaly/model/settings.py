"""Settings as others need them: where to look, and as plain values. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.config.schema import Config, ImageConfig, ShapeConfig
from anomaly.datasets import Dataset, Sample, open_dataset
from anomaly.errors import DataError
from anomaly.files.writing import at_home
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import Preprocessing
from anomaly.imaging.region import DrawnMask, Polygons, Region, Shape

# What most networks shrink an image by in all: every layer's grid is then an even number of the
# next one's, and images of many aspects share so few sizes that batches are full.
_LEAST_MULTIPLE = 32
# Pictures in a model folder that say where to look, by the setting that they come from.
MASKS = {"region": "region.png", "ignore": "ignore.png"}


_TURNS = {
    "none": (),
    "quarter_turns": (1, 2, 3),
    "quarter_turns_and_mirrors": (1, 2, 3, 4, 5, 6, 7),
}


def turns_of(config: Config) -> tuple[int, ...]:
    """The ways in which training images are learned beside the one they have.

    See `anomaly.imaging.loading.turned`.
    """
    return _TURNS[config.model.turned_copies]


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
            return DrawnMask(read(folder / at_home(config.png)))
        return Polygons(config.polygons, config.unit == "relative")

    look, ignore = shape(image.region), shape(image.ignore)
    return None if look is None and ignore is None else Region(look, ignore)


def loading_of(
    config: Config,
    coarsest_stride: int,
    region: Region | None,
    aspect: float | None,
    patch: int | None = None,
) -> Preprocessing:
    """How a config turns files into network inputs.

    Args:
        config: all settings.
        coarsest_stride: the largest of the hooked layers'.
        region: what of each image counts; None for all of it.
        aspect: H/W that images have to have; None for any.
        patch: side of the patches that the network cuts images into; None for any size.
    """
    multiple = max(coarsest_stride, _LEAST_MULTIPLE)
    if patch and multiple % patch:
        multiple = patch
    image = config.image
    sizing = Sizing(
        image.resize,
        image.crop,
        image.area,
        multiple,
        aspect,
        image.tile,
        image.overlap_in_force,
    )
    return Preprocessing(sizing, image.bit_depth, image.max_pixels, region)


def images_meant(
    data: Dataset | Config | Iterable[Sample], mask_above: int
) -> tuple[list[Sample], str, int]:
    """The test images that are meant by a data set, by the config that names it, or themselves.

    Args:
        data: what was given.
        mask_above: mask values above this are defect, where no config says so.

    Returns:
        The images, their folder for people, and above which value their masks are defect.

    Raises:
        DataError: the data set that the config names can't be opened, or something else was given.
    """
    if isinstance(data, Config):
        where, mask_above = data.data, data.data.mask_above
        data = open_dataset(where.format, where.root, where.category)
    if isinstance(data, Dataset):
        return list(data.test), str(data.folder), mask_above
    samples: list[Any] = [data] if isinstance(data, str | PathLike) else list(data)
    if not all(isinstance(sample, Sample) for sample in samples):
        raise DataError(
            "what to test with has to say which images are defective: give "
            "anomaly.open_dataset(format, folder), samples, or a Config"
        )
    return samples, "", mask_above


def portable(config: Config) -> dict[str, Any]:
    """A config as plain values, without what belongs to one machine or one place."""
    values = config.model_dump(mode="json")
    del values["data"]["root"]
    if config.backbone.weights not in ("imagenet", "random"):
        values["backbone"]["weights"] = Path(config.backbone.weights).name
    for part, name in MASKS.items():
        if values["image"][part] and values["image"][part]["png"]:
            values["image"][part]["png"] = name
    return values


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of `portable` one by one, with dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Which settings of an earlier run aren't those of this one; empty where all are."""
    return "; ".join(
        f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    )


def as_of_today(values: Any) -> Any:
    """Saved settings as they are written today."""
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict):
        return values
    # What there wasn't yet, or could be left open, meant this.
    model = {"halo_damping": 0.0, "border_damping": 0.0, "spacing_neighbours": 0, **model}
    if model.get("image_score", "") is None:
        model["image_score"] = "map_max"
    return {**values, "model": model}


def has_two_banks(values: Any) -> bool:
    """Whether saved settings are of a PatchCore model with two memory banks, as some had."""
    model = values.get("model") if isinstance(values, dict) else None
    return isinstance(model, dict) and model.get("embedding") == "levels"
