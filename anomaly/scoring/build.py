"""Config -> stages of a model: backbone, fitter, scorer and preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.config.schema import METHODS, Config, ImageConfig, ShapeConfig
from anomaly.errors import ConfigError, ModelError
from anomaly.files.writing import at_home
from anomaly.imaging.alignment import Reference
from anomaly.imaging.arrays import Array
from anomaly.imaging.geometry import DrawnMask, Polygons, Region, Shape, Sizing
from anomaly.imaging.loading import Preprocessing
from anomaly.imaging.pool import read_one
from anomaly.imaging.read import Decoding, read_mask
from anomaly.methods.base import Fitter, Scorer

if TYPE_CHECKING:
    import torch

    from anomaly.backbones.extractor import FeatureExtractor, Normalisation


def backbone(config: Config, device: torch.device) -> tuple[FeatureExtractor, str | None]:
    """The truncated backbone of a config, in fp32, and the SHA-256 of its weights file.

    None instead of the SHA-256 for random weights.

    Raises:
        AnomalyError: the weights, layers or image size can't be used as configured.
    """
    from anomaly.backbones.layers import default_layers, truncate
    from anomaly.backbones.networks import build, load_state, read_weights

    name = config.backbone.name
    full = build(name)
    layers = config.backbone.layers or default_layers(name, full, METHODS[config.model.kind].stages)
    extractor = truncate(build(name), layers)
    _check_size(config, extractor)
    state, sha256 = read_weights(name, config.backbone.weights, config.seed)
    load_state(extractor.network, state, full, f"the weights file for backbone.name {name}")
    return extractor.to(device, "fp32"), sha256


def _check_size(config: Config, extractor: FeatureExtractor) -> None:
    """Check that the network takes images of the config's size.

    Raises:
        ConfigError: the network doesn't take them; the message names a size that it takes.
    """
    from anomaly.backbones.layers import probes, takes_size

    image, patch, network = config.image, extractor.patch, extractor.network
    # A crop decides the size of the network's input, else `resize`, else `area`.
    key = next((key for key in ("crop", "resize") if getattr(image, key)), "area")
    side: int = getattr(image, key)
    height = width = side
    if key == "area":
        sizing = loading_of(config, extractor, None, None).sizing
        # Images of free aspect have sides of any multiple. A network that divides its maps into
        # windows refuses at least one of two neighbouring multiples, so both are tried.
        height = max(1, round(side / sizing.multiple)) * sizing.multiple
        width = height if image.tile else height + sizing.multiple
    elif patch and side % patch:
        low = side // patch * patch
        raise ConfigError(
            f"image.{key} is {side}, but the network cuts images into patches of {patch} pixels; "
            f"choose {f'{low} or ' if low else ''}{low + patch}"
        )
    if takes_size(network, height, width, extractor.layers):
        return
    fits = [s for s in probes(network) if takes_size(network, s, s, extractor.layers)]
    best = min(fits, key=lambda fit: abs(fit - side))
    remedy = "resize" if key == "area" and not image.tile else key
    raise ConfigError(
        f"{config.backbone.name} doesn't take images of {height}×{width}, which image.{key}={side} "
        f"gives; set image.{remedy}={best}, for it takes {best}×{best}"
    )


def fitter_of(config: Config) -> Fitter[Any]:
    """The fitter of the config's method, with the method's settings."""
    module = import_module(METHODS[config.model.kind].module)
    fitter: Fitter[Any] = module.fitter(config.model.model_dump(), seed=config.seed)
    return fitter


def scorer_of(config: Config, tensors: Mapping[str, Array]) -> Scorer:
    """The scorer of a saved model.

    Args:
        config: all settings.
        tensors: result of `Scorer.tensors`; arrays for the scorer of an exported model.

    Raises:
        ModelError: the tensors don't belong to the config's method, or they are arrays and the
            method needs torch.
    """
    method = METHODS[config.model.kind]
    if not method.arrays and any(isinstance(value, np.ndarray) for value in tensors.values()):
        raise ModelError(f"{method.title} computes with torch alone, so it can't be exported")
    module = import_module(method.arrays or method.module)
    scorer: Scorer = module.scorer(tensors, config.model.model_dump())
    return scorer


# The total stride of most networks. Sizes that are multiples of it halve exactly from layer to
# layer, and images of many aspects share few sizes, so batches are full.
_LEAST_MULTIPLE = 32
# Mask pictures in a model folder, by the setting of `image` that names them.
MASKS = {"region": "region.png", "ignore": "ignore.png"}


_TURNS = {
    "none": (),
    "quarter_turns": (1, 2, 3),
    "quarter_turns_and_mirrors": (1, 2, 3, 4, 5, 6, 7),
}


def turns_of(config: Config) -> tuple[int, ...]:
    """Turns (1 to 7, see `anomaly.imaging.loading.turned`) of further copies to learn from."""
    return _TURNS[config.model.turned_copies]


def region_of(image: ImageConfig, folder: Path) -> Region | None:
    """The region of a config; None for the whole image.

    Args:
        image: the settings of `image`.
        folder: folder that paths of mask pictures are relative to.

    Raises:
        ImageError: a mask picture can't be read.
    """

    def shape(config: ShapeConfig | None) -> Shape | None:
        """The shape of a setting, read from its picture or made of its polygons."""
        if config is None:
            return None
        if config.png is not None:
            path = folder / at_home(config.png)
            return DrawnMask(read_one(read_mask, path, about=path))
        return Polygons(config.polygons)

    look, ignore = shape(image.region), shape(image.ignore)
    return None if look is None and ignore is None else Region(look, ignore)


def smallest_area(config: Config) -> float:
    """Area of the smallest defect that counts, in the photograph's pixels; 0 for any size."""
    smallest = config.model.smallest_defect
    if smallest is None:
        return 0.0
    scale = config.image.mm_per_pixel if smallest.unit == "mm" else None
    return smallest.area / (scale or 1) ** 2


def decoding_of(image: ImageConfig) -> Decoding:
    """The config's limit of pixels and bit depth for decoding files."""
    return Decoding(image.max_pixels, image.bit_depth)


def loading_of(
    config: Config,
    extractor: FeatureExtractor,
    region: Region | None,
    aspect: float | None,
    reference: Reference | None = None,
) -> Preprocessing:
    """Preprocessing from files to network inputs.

    Args:
        config: the settings of `image` are read.
        extractor: the network, whose strides and patches image sizes must fit.
        region: region of each image that counts; None for the whole image.
        aspect: H/W that images must have; None for any.
        reference: reference image that parts are aligned with; None for `image.align: none`.
    """
    image, patch = config.image, extractor.patch
    multiple = max(*extractor.strides, _LEAST_MULTIPLE)
    if patch and multiple % patch:  # a transformer with patches of 14 pixels
        multiple = patch
    sizing = Sizing(
        image.resize, image.crop, image.area, multiple, aspect, image.tile, image.overlap
    )
    return Preprocessing(sizing, decoding_of(image), region, reference)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageStages:
    """The stages from an image file to feature maps.

    Attributes:
        config: all settings, with the precision in use; `config.data` isn't read.
        extractor: the truncated backbone on its device.
        normalise: normalisation of the backbone's input.
        device: device of the network and the scorer.
        region: region of each image that counts; None for the whole image.
        aspect: H/W that images must have; None for any.
        reference: reference image that parts are aligned with; None without alignment.
    """

    config: Config
    extractor: FeatureExtractor
    normalise: Normalisation
    device: torch.device
    region: Region | None = None
    aspect: float | None = None
    reference: Reference | None = None

    @cached_property
    def loading(self) -> Preprocessing:
        """Preprocessing from files to network inputs."""
        return loading_of(self.config, self.extractor, self.region, self.aspect, self.reference)


def to_dict(config: Config) -> dict[str, Any]:
    """A config as plain values, without paths of this machine."""
    values = config.model_dump(mode="json")
    del values["data"]["root"]
    if not config.chosen_by:
        del values["chosen_by"]
    if config.backbone.weights not in ("imagenet", "random"):
        values["backbone"]["weights"] = Path(config.backbone.weights).name
    for part, name in MASKS.items():
        if values["image"][part] and values["image"][part]["png"]:
            values["image"][part]["png"] = name
    return values
