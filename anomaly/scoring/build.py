"""Config -> the stages of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anomaly.config.schema import METHODS, Config, ImageConfig, ShapeConfig
from anomaly.datasets import Dataset, Sample, open_dataset
from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.files.writing import at_home
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import Preprocessing
from anomaly.imaging.region import DrawnMask, Polygons, Region, Shape
from anomaly.methods.base import ArrayScorer, Fitter, Scorer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anomaly.backbones.extractor import FeatureExtractor
    from anomaly.backbones.truncation import Truncated


def backbone(config: Config, device: torch.device) -> tuple[FeatureExtractor, str | None]:
    """The truncated backbone that a config names, in fp32, and the hash of its weights' file.

    Raises:
        AnomalyError: the weights or layers can't be used as configured.
    """
    from anomaly.backbones.registry import build, default_layers
    from anomaly.backbones.state import load_state, read_weights
    from anomaly.backbones.truncation import truncate

    name = config.backbone.name
    full = build(name)
    layers = config.backbone.layers or default_layers(name, full, METHODS[config.model.kind].stages)
    truncated = truncate(build(name), layers)
    _check_size(config, truncated)
    state, sha256 = read_weights(name, config.backbone.weights, config.seed)
    load_state(truncated.network, state, full, f"the weights file for backbone.name {name}")
    return truncated.extractor().to(device, "fp32"), sha256


def _check_size(config: Config, truncated: Truncated) -> None:
    """See that a network takes images of the sizes that a config gives them.

    Raises:
        ConfigError: it doesn't; the message says what it takes.
    """
    import torch

    from anomaly.backbones.extractor import check_side
    from anomaly.backbones.layer_table import takes
    from anomaly.backbones.truncation import probes

    image, extractor = config.image, truncated.extractor()
    key = next((key for key in ("crop", "resize") if getattr(image, key)), "area")
    side: int = getattr(image, key)
    height = width = side
    if key == "area":
        sizing = loading_of(config, extractor.coarsest_stride, None, None, extractor.patch).sizing
        # Whatever squares it divides its maps into, one of two neighbouring multiples won't fit.
        height = max(1, round(side / sizing.multiple)) * sizing.multiple
        width = height if image.tile else height + sizing.multiple
    else:
        check_side(f"image.{key}", side, truncated.layouts)
    with torch.device("meta"):
        if takes(truncated.network, height, width, truncated.layers):
            return
        fits = [
            s for s in probes(truncated.network) if takes(truncated.network, s, s, truncated.layers)
        ]
    best = min(fits, key=lambda fit: abs(fit - side))
    remedy = "resize" if key == "area" and not image.tile else key
    raise ConfigError(
        f"{config.backbone.name} doesn't take images of {height}×{width}, which image.{key}={side} "
        f"gives; set image.{remedy}={best}, for it takes {best}×{best}"
    )


def fitter_of(config: Config) -> Fitter[Any]:
    """What a config learns with."""
    settings = config.model.model_dump()
    limit = config.memory_limit * 1024**2
    module = import_module(METHODS[config.model.kind].module)
    made: Fitter[Any] = module.fitter(settings, seed=config.seed, memory_limit=limit)
    return made


def scorer_of(config: Config, tensors: dict[str, Tensor], device: torch.device) -> Scorer:
    """What a config's method learned and saved.

    Args:
        config: all settings.
        tensors: as `Scorer.tensors` gave them.
        device: where the scorer goes.

    Raises:
        ModelError: the tensors aren't those of the method.
    """
    settings, cache = config.model.model_dump(), _cache_folder()
    method = METHODS[config.model.kind]
    module = import_module(method.arrays or method.module)
    made: Scorer = module.scorer(tensors, settings, device=device, cache=cache)
    return made


def array_scorer_of(config: Config, tensors: dict[str, NDArray[Any]]) -> ArrayScorer:
    """What a config's method learned and saved, for an exported network: works on arrays.

    Args:
        config: all settings.
        tensors: as `Scorer.tensors` gave them.

    Raises:
        ModelError: the tensors aren't those of the method, or it has no such form.
    """
    method = METHODS[config.model.kind]
    if not method.arrays:
        raise ModelError(f"{method.title} computes with torch alone, so it can't be exported")
    made: ArrayScorer = import_module(method.arrays).scorer(tensors, config.model.model_dump())
    return made


def _cache_folder() -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/anomaly`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "anomaly"


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
