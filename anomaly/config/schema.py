"""Typed settings. Every default stands here, once; an unknown key is an error, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from anomaly.config.methods import METHODS
from anomaly.errors import ConfigError, nearest

PositiveInt = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=32, le=8192)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataConfig(_Section):
    """Where the images are.

    `root` is taken from the working directory when it isn't absolute; the data set is in
    `root/category`, or in `root` without a category. What lies there hangs on `format`, see
    `anomaly.datasets`. Mask values above `mask_above` are defect.
    """

    format: Literal[
        "mvtec", "mvtec_ad_2", "mvtec_loco", "btad", "visa", "folder", "good_defect", "csv"
    ] = "mvtec"
    root: Path | None = None
    category: str | None = None
    mask_above: Annotated[int, Field(ge=0, lt=65535)] = 0


class ShapeConfig(_Section):
    """A part of the image: a picture in which it is drawn (any value but 0), or polygons.

    Corners are (x, y), as shares of the image's width and height or in original pixels.
    """

    png: Path | None = None
    polygons: tuple[Annotated[tuple[tuple[float, float], ...], Field(min_length=3)], ...] = ()
    unit: Literal["relative", "pixels"] = "relative"

    @model_validator(mode="after")
    def _one_kind(self) -> ShapeConfig:
        if (self.png is None) == (not self.polygons):
            raise ValueError("a region takes either `png` or `polygons`")
        corners = [value for polygon in self.polygons for point in polygon for value in point]
        if any(value < 0 for value in corners):
            raise ValueError(f"a polygon's corner is {min(corners)}; corners start at 0")
        if self.unit == "relative" and any(value > 1 for value in corners):
            raise ValueError(
                f"a polygon's corner is {max(corners):g}, but relative corners end at 1; "
                "for original pixels add `unit: pixels`"
            )
        return self


class ImageConfig(_Section):
    """How an image becomes the network's input.

    Either `resize` (both sides, aspect not kept) and an optional centred `crop`, as in the papers,
    or, without them, `area`: the aspect is kept and the area is that of a square of this side.
    With `tile`, large images are cut into squares of that many original pixels, which overlap by
    at least `overlap`, and each tile is seen at `area`.
    """

    area: Size = 256
    resize: Size | None = None
    crop: Size | None = None
    tile: Annotated[int, Field(ge=64, le=16384)] | None = None
    overlap: Annotated[int, Field(ge=0)] | None = None
    region: ShapeConfig | None = None
    ignore: ShapeConfig | None = None
    mm_per_pixel: Annotated[float, Field(gt=0)] | None = None
    bit_depth: Annotated[int, Field(ge=1, le=16)] | None = None
    max_pixels: PositiveInt = 250_000_000

    @model_validator(mode="after")
    def _crop_fits(self) -> ImageConfig:
        if self.crop is not None and self.resize is None:
            raise ValueError("image.crop needs image.resize: a crop is cut out of a resized image")
        if self.crop is not None and self.resize is not None and self.crop > self.resize:
            raise ValueError(
                f"image.crop is {self.crop}, larger than image.resize ({self.resize}); "
                "make it equal or smaller, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _tiles_fit(self) -> ImageConfig:
        if self.tile is None:
            if self.overlap is not None:
                raise ValueError("image.overlap needs image.tile")
            return self
        if self.resize is not None:
            raise ValueError("image.tile and image.resize exclude each other: tiles use image.area")
        if self.overlap is not None and self.overlap > self.tile // 2:
            raise ValueError(
                f"image.overlap is {self.overlap}; it can be at most half of image.tile "
                f"({self.tile // 2})"
            )
        return self

    @property
    def overlap_in_force(self) -> int:
        """Original pixels that neighbouring tiles share: an eighth of a tile unless told."""
        if self.tile is None:
            return 0
        return self.tile // 8 if self.overlap is None else self.overlap


class BackboneConfig(_Section):
    """The network whose layers are hooked.

    `weights` is `imagenet`, `random`, or a path to a `.safetensors` or `.pth` file. `layers` are
    paths as PyTorch prints them; left out, they follow from the network's family and `model.kind`.
    """

    name: str = "wide_resnet50_2"
    weights: str = "imagenet"
    layers: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


def _known_method(kind: str) -> str:
    if kind not in METHODS:
        listed = " or ".join(repr(name) for name in METHODS)
        raise PydanticCustomError("literal_error", "must be {expected}", {"expected": listed})
    return kind


class ModelConfig(_Section):
    """What is learned from the patch embeddings. Keys of another method are allowed and unused."""

    kind: Annotated[str, AfterValidator(_known_method)] = "patchcore"
    image_score: Literal["max", "reweighted", "top_percent", "map_max"] | None = None
    smoothing: Annotated[float, Field(ge=0, le=100)] = 4.0

    coreset_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    coreset_size: PositiveInt | None = None
    embedding: Literal["concat", "adaptive"] = "concat"
    neighbours: Annotated[int, Field(ge=2, le=1000)] = 3
    search: Literal["exact", "faiss", "ivf"] = "exact"

    dimensions: PositiveInt = 100
    projection: Literal["random", "orthogonal"] = "orthogonal"
    regularisation: Annotated[float, Field(gt=0)] = 0.01


class CalibrationConfig(_Section):
    """Which share of good parts may be rejected, and which may need a second look.

    The thresholds keep both with 95 % confidence. `folds` is into how many parts the training
    images are split for their cross-fitted scores; PaDiM without groups leaves out each image
    alone.
    """

    reject_rate: Annotated[float, Field(gt=0, lt=1)] = 0.01
    review_rate: Annotated[float, Field(gt=0, lt=1)] = 0.05
    folds: Annotated[int, Field(ge=2, le=100)] = 10

    @model_validator(mode="after")
    def _in_order(self) -> CalibrationConfig:
        if self.reject_rate > self.review_rate:
            raise ValueError(
                f"calibration.reject_rate ({self.reject_rate:g}) is above calibration.review_rate "
                f"({self.review_rate:g}); what is rejected is never called good"
            )
        return self


class Config(_Section):
    """All settings of one training."""

    name: Annotated[str, Field(pattern=r"^[^/\\\x00]+$", max_length=100)] = "model"
    data: DataConfig = DataConfig()
    image: ImageConfig = ImageConfig()
    backbone: BackboneConfig = BackboneConfig()
    model: ModelConfig = ModelConfig()
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    memory_limit: Annotated[int, Field(ge=16, le=1_000_000)] = 256
    calibration: CalibrationConfig = CalibrationConfig()
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 8
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @property
    def image_score_in_force(self) -> str:
        """How image scores are made, where the config leaves it open or asks for the impossible.

        The maximum of the blurred map, which is what a heatmap shows, for every method and however
        images are sized; some image scores are one method's alone.
        """
        wanted = self.model.image_score
        everyones = ("max", "top_percent", "map_max")
        possible = wanted in everyones + METHODS[self.model.kind].image_scores
        return wanted if wanted is not None and possible else "map_max"

    @property
    def one_aspect(self) -> bool:
        """Whether all images have to have the aspect of the training images."""
        return METHODS[self.model.kind].one_grid and self.image.resize is None

    @model_validator(mode="after")
    def _tiles_share_no_grid(self) -> Config:
        method = METHODS[self.model.kind]
        if self.image.tile is not None and method.one_grid:
            raise ValueError(
                f"image.tile needs model.kind=patchcore: {method.title} learns each place of the "
                "image, and all tiles would share one"
            )
        return self


def parse_config(
    values: Mapping[str, Any], where: str, overrides: Mapping[str, str] | None = None
) -> Config:
    """Check plain values against the schema.

    Args:
        values: as read.
        where: their source, for messages.
        overrides: sources of the values that come from elsewhere, by dotted key.

    Raises:
        ConfigError: an unknown key, a wrong type or range; a line for each mistake.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{_source(error['loc'], where, overrides or {})}: {_explain(dict(error))}"
            for error in error.errors()
        ]
        raise ConfigError("\n  ".join(lines)) from None


def _source(location: tuple[Any, ...], where: str, overrides: Mapping[str, str]) -> str:
    """What a mistake is in: the overrides inside the section at fault, or that it lies in."""
    key = ".".join(map(str, location))
    at_fault = [
        source
        for name, source in overrides.items()
        if f"{name}.".startswith(f"{key}." if key else "") or f"{key}.".startswith(f"{name}.")
    ]
    return ", ".join(at_fault) or where


# What a value has to be, by pydantic's name for the mistake.
_WANTED = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text (put it in quotes)",
    "string_pattern_mismatch": "must be a name, without / and \\",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "needs at least {min_length} entries",
    "too_long": "takes at most {max_length} entries",
    "missing": "needs another entry",
    "tuple_type": "must be a list, e.g. [a, b]",
    "model_type": "must hold settings of its own: {keys}",
    "path_type": "must be a path",
}


def _explain(error: dict[str, Any]) -> str:
    location, kind = tuple(error["loc"]), error["type"]
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(str(location[-1]), _known_keys(location[:-1]))}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    wanted = _WANTED.get(kind) or _WANTED.get(kind.partition("_")[0], "can't be used")
    keys = ", ".join(_known_keys(location)) if kind == "model_type" else ""
    limits = {k: f"{v:g}" if isinstance(v, float) else v for k, v in error.get("ctx", {}).items()}
    return f"{key} is {error['input']!r}: {wanted.format(keys=keys, **limits)}"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    section: Any = Config
    for part in location:
        annotation = section.model_fields[part].annotation
        section = next(a for a in (annotation, *get_args(annotation)) if hasattr(a, "model_fields"))
    return list(section.model_fields)
