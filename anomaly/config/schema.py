"""Typed settings. Every default stands here, once; an unknown key is an error, never ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True)
class Method:
    """Facts about a method that are known without importing torch.

    Attributes:
        title: the method's name in the literature.
        module: the module of its `fitter`, and of its `scorer` unless `arrays` names another.
        arrays: the module of a `scorer` that also takes NumPy arrays, for exported models; else
            empty.
        stages: number of network stages read by default, of those at strides 4, 8 and 16; the
            coarsest are taken first.
        one_grid: true if it learns each position of the image by itself, so that all images need
            one aspect and none can be cut into tiles.
        settings: keys of the section `model` that no other method reads.
        image_scores: values of `model.image_score` that no other method has.
    """

    title: str
    module: str
    arrays: str = ""
    stages: int = 2
    one_grid: bool = False
    settings: tuple[str, ...] = ()
    image_scores: tuple[str, ...] = ()


METHODS = {
    "patchcore": Method(
        "PatchCore",
        "anomaly.methods.patchcore.fitter",
        "anomaly.methods.patchcore.bank",
        settings=("coreset_ratio", "embedding", "search", "spacing_neighbours"),
        image_scores=("reweighted",),
    ),
    "padim": Method(
        "PaDiM",
        "anomaly.methods.padim",
        "anomaly.methods.padim",
        stages=3,
        one_grid=True,
        settings=("dimensions", "regularisation"),
    ),
}


def readers(key: str) -> list[str]:
    """Names of the methods that read a setting (dotted key), if not all do; empty if all do."""
    section, _, name = key.rpartition(".")
    return [kind for kind, m in METHODS.items() if section == "model" and name in m.settings]


NAMED_DIGITS = 16  # digits of a file's sha256 that stand for the file in `chosen_by`
PositiveInt = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=32, le=8192)]


class _Section(BaseModel):
    """A section of the settings, which can't be changed; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataConfig(_Section):
    """The data set: the folder `root/category`, or `root` without a category."""

    format: Literal["mvtec", "visa", "folder", "good_defect", "csv"] = "mvtec"
    """The layout of the folder."""
    root: Path | None = None
    """The folder with the images, or the CSV list; relative to the working directory."""
    category: str | None = None
    """A folder in `data.root` that holds the data set."""


class ShapeConfig(_Section):
    """A part of the image, drawn in a picture or as polygons."""

    png: Path | None = None
    """A picture of the region: every value except 0 belongs to it."""
    polygons: tuple[Annotated[tuple[tuple[float, float], ...], Field(min_length=3)], ...] = ()
    """Lists of corners [x, y], as shares of width and height."""

    @model_validator(mode="after")
    def _one_kind(self) -> ShapeConfig:
        """Check that there is either a picture or polygons, with corners from 0 to 1."""
        if (self.png is None) == (not self.polygons):
            raise ValueError("a region takes either `png` or `polygons`")
        for corner in (value for polygon in self.polygons for point in polygon for value in point):
            if not 0 <= corner <= 1:
                raise ValueError(
                    f"a polygon's corner is {corner:g}; give shares of width and height, 0 to 1"
                )
        return self


class SmallestConfig(_Section):
    """The smallest defect that counts for the image score."""

    area: Annotated[float, Field(gt=0)]
    """The area, in pixels or in mm²."""
    unit: Literal["pixels", "mm"] = "pixels"
    """The photograph's pixels, or millimetres by `image.mm_per_pixel`."""


class ImageConfig(_Section):
    """The way from an image to the network's input.

    Either `resize` (both sides, aspect not kept) and an optional centred `crop`, as in the papers,
    or, without them, `area`: the aspect is kept and the area is that of a square of this side.
    With `tile`, large images are cut into squares of that many original pixels, which overlap by
    at least an eighth, and each tile is seen at `area`.
    """

    area: Size = 256
    """Keeps the aspect, with the area of a square of this side; sides become multiples of 32."""
    resize: Size | None = None
    """Squashes images to a square of this side, as the papers do."""
    crop: Size | None = None
    """A centred crop of the resized image."""
    tile: Annotated[int, Field(ge=64, le=16384)] | None = None
    """Cuts large images into squares of this side, in original pixels."""
    align: Literal["none", "shift", "rigid"] = "none"
    """Brings the part into the pose of a training image: `shift` for shifted parts, `rigid` for
    shifted and turned parts."""
    region: ShapeConfig | None = None
    """The part of the image to inspect; unset: the whole image."""
    ignore: ShapeConfig | None = None
    """The part of the image to leave out."""
    mm_per_pixel: Annotated[float, Field(gt=0)] | None = None
    """Millimetres of a pixel, for sizes in millimetres."""
    bit_depth: Annotated[int, Field(ge=1, le=16)] | None = None
    """Bit depth of the camera in 16-bit files, e.g. 12; unset: the full range of the file."""
    max_pixels: PositiveInt = 250_000_000
    """Larger images are refused before they are decoded.

    Also refused: images with one side more than 64 times as long as the other, and files of
    more than 8 bytes for each of these pixels plus 64 MiB.
    """

    @model_validator(mode="after")
    def _sizes_fit(self) -> ImageConfig:
        """Check that `tile`, `resize` and `crop` go together."""
        if self.tile is not None and self.resize is not None:
            raise ValueError("image.tile and image.resize exclude each other: tiles use image.area")
        if self.crop is None:
            return self
        if self.resize is None:
            raise ValueError("image.crop needs image.resize: a crop is cut out of a resized image")
        if self.crop > self.resize:
            raise ValueError(
                f"image.crop is {self.crop}, larger than image.resize ({self.resize}); "
                "make it equal or smaller, or leave it out"
            )
        return self

    @property
    def overlap(self) -> int:
        """Least width in original pixels that neighbouring tiles share; 0 without tiles."""
        return (self.tile or 0) // 8


class BackboneConfig(_Section):
    """The network whose layers are hooked."""

    name: str = "wide_resnet50_2"
    """A torchvision classification network, `resnet50_v1` (stride in the first 1×1), or a timm
    network such as `timm/vit_small_patch14_dinov2`."""
    weights: str = "imagenet"
    """`imagenet`, a `.safetensors` or `.pth` file, or `random`.

    `imagenet` is torchvision's official file, from `$ANOMALY_WEIGHTS`, `weights/` or torch's
    cache, otherwise downloaded; its hash is checked. For timm it is the file of an installed
    package (`timm/tf_efficientnet_lite2` has one), otherwise that in the Hugging Face cache.
    """
    layers: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Layer paths as PyTorch prints them, or like `layer1[-1]`; unset: chosen by network and
    method."""


def _known_method(kind: str) -> str:
    """The name of a method; an unknown one is refused. Other packages may register methods."""
    if kind not in METHODS:
        raise ValueError(f"model.kind is {kind!r}: must be {' or '.join(map(repr, METHODS))}")
    return kind


class ModelConfig(_Section):
    """The method and its settings. A file may hold keys of another method, which are unused."""

    kind: Annotated[str, AfterValidator(_known_method)] = "patchcore"
    """The method: `patchcore` or `padim`."""
    image_score: Literal[
        "map_top_percent", "map_max", "map_top_relative", "top_percent", "max", "reweighted"
    ] = "map_top_percent"
    """Formula of the image score."""
    smallest_defect: SmallestConfig | None = None
    """Smaller defects don't count, however high they score. Replaces `image_score`."""
    smoothing: Annotated[float, Field(ge=0, le=100)] = 4.0
    """σ of the Gaussian that blurs the anomaly map, in network pixels."""
    halo_damping: Annotated[float, Field(ge=0, le=4)] = 0.5
    """Reduction of the glow around a defect in maps (0 = off)."""
    leave_out_suspects: bool = False
    """Leaves out training images that look unlike all others, which may be defects: images
    whose score's logarithm lies five robust standard deviations above the median."""
    turned_copies: Literal["none", "quarter_turns", "quarter_turns_and_mirrors"] = "none"
    """PatchCore: also learns turned copies of each training image, so that turned parts count as
    good. Helps most with few images."""

    coreset_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """PatchCore: share of the patches kept in the memory bank."""
    embedding: Literal["sharp", "concat"] = "sharp"
    """PatchCore: layers averaged over 3 × 3 positions and joined, with more weight on the
    centre in the finest layer (`sharp`) or without (`concat`, as published)."""
    spacing_neighbours: Annotated[int, Field(ge=0, le=1000)] = 9
    """PatchCore: number of neighbours that make rare kinds of good patches count less for the
    image score. 0: plain distances, which maps always use."""
    search: Literal["exact", "faiss", "ivf"] = "exact"
    """PatchCore: how the nearest bank vector is found."""

    dimensions: PositiveInt = 100
    """PaDiM: number of dimensions kept of the embedding. Memory grows with its square."""
    regularisation: Annotated[float, Field(gt=0)] = 0.01
    """PaDiM: added to the diagonal of each covariance."""


class CalibrationConfig(_Section):
    """The shares of good parts that may be rejected, or may need a second look.

    The reject rate is kept with 95 % confidence, the review rate on average. For their cross-fitted
    scores, the training images are split into ten parts; PaDiM without groups leaves out each image
    alone.
    """

    reject_rate: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """The share of good parts that may be rejected, kept with 95 % confidence."""
    review_rate: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The share of good parts that may need a second look, on average."""

    @model_validator(mode="after")
    def _in_order(self) -> CalibrationConfig:
        """Check that the reject rate is at most the review rate."""
        if self.reject_rate > self.review_rate:
            raise ValueError(
                f"calibration.reject_rate ({self.reject_rate:g}) is above calibration.review_rate "
                f"({self.review_rate:g}); make it equal or smaller"
            )
        return self


class Config(_Section):
    """All settings of one training."""

    name: Annotated[str, Field(pattern=r"^[^/\\\x00.][^/\\\x00]*$", max_length=100)] = "model"
    """Name of the run; unset: the config file's name."""
    data: DataConfig = DataConfig()
    image: ImageConfig = ImageConfig()
    backbone: BackboneConfig = BackboneConfig()
    model: ModelConfig = ModelConfig()
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` uses bf16 if the processor has it and a trial on training images shows that it is
    safe."""
    calibration: CalibrationConfig = CalibrationConfig()
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Images computed together: on a CPU at most 4, in exported models 2."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Same seed, machine and threads: the same model, byte for byte."""
    chosen_by: tuple[str, ...] = ()
    """Images used to choose these settings, by the first 16 digits of their files' sha256.

    `anomaly tune` writes them; `evaluate` reports test images among them.
    """

    def was_chosen_by(self, sha256: str) -> bool:
        """True if the image with this sha256 was used to choose these settings."""
        return sha256[:NAMED_DIGITS] in self.chosen_by

    @property
    def image_score_in_force(self) -> str:
        """The name of the image score that decides; `smallest_defect` replaces the formula."""
        return "smallest_defect" if self.model.smallest_defect else self.model.image_score

    @property
    def one_aspect(self) -> bool:
        """True if all images need the aspect of the training images."""
        return METHODS[self.model.kind].one_grid and self.image.resize is None

    @model_validator(mode="after")
    def _sections_go_together(self) -> Config:
        """Check settings of one section that exclude, or need, those of another."""
        kind, score = self.model.kind, f"model.image_score={self.model.image_score}"
        turned, tiled = self.model.turned_copies != "none", self.image.tile is not None
        smallest = self.model.smallest_defect
        if smallest and tiled:
            raise ValueError(
                "model.smallest_defect and image.tile exclude each other: a defect that lies "
                "on two tiles would be measured in parts; raise image.area instead"
            )
        if smallest and smallest.unit == "mm" and not self.image.mm_per_pixel:
            raise ValueError("model.smallest_defect is in mm; set image.mm_per_pixel")
        if METHODS[kind].one_grid and (turned or tiled):
            raise ValueError(
                f"{'image.tile' if tiled else 'model.turned_copies'} needs model.kind=patchcore, "
                f"because {kind} learns each position separately; change one of these"
            )
        for other, method in METHODS.items():
            if self.model.image_score in method.image_scores and kind != other:
                raise ValueError(f"{score} needs model.kind={other}; change one of these")
        return self
