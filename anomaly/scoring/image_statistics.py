"""Statistics of whole images: whether one shows another product, is blank or is ill lit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ModelError
from anomaly.imaging.arrays import Array, as_numpy, module_of
from anomaly.imaging.loading import NetworkInput

Floats = NDArray[np.float64]

QUIET = 0.02  # contrast, below which a ratio to it means nothing
# Brightness that differs less, all over an image, is one value and the rounding of resizing it.
BLANK = 1e-4


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics of an image as a whole, kept as sums so that tiles add up.

    Attributes:
        pixels: how many the network saw and counted.
        light: sum of their brightness, in [0, 1] each.
        light_squared: sum of its squares.
        edges: sum of the brightness's second derivative, absolute.
        patches: how many patches counted.
        embedding: (D,) sum of their embeddings, float64 or float32.
        squared: sum of the squares of all their values.
        darkest: the lowest brightness of a pixel.
        brightest: the highest.
    """

    pixels: float
    light: float
    light_squared: float
    edges: float
    patches: int
    embedding: Floats | NDArray[np.float32]
    squared: float
    darkest: float
    brightest: float

    def __add__(self, other: ImageStatistics) -> ImageStatistics:
        names = [field.name for field in fields(self)]
        total = {name: getattr(self, name) + getattr(other, name) for name in names}
        total["darkest"] = min(self.darkest, other.darkest)
        total["brightest"] = max(self.brightest, other.brightest)
        return ImageStatistics(**total)

    @property
    def blank(self) -> str:
        """A message if all pixels have one value; empty otherwise."""
        if self.brightest - self.darkest > BLANK:
            return ""
        return (
            f"all its pixels are {self.brightest:.3g} of full scale: a blank image "
            "(written while it was read, or from a camera without a picture?)"
        )

    def figures(self) -> dict[str, float]:
        """Brightness and contrast in [0, 1]; sharpness, the ratio of fine detail to contrast."""
        count = max(self.pixels, 1.0)
        mean = self.light / count
        contrast = max(self.light_squared / count - mean**2, 0.0) ** 0.5
        sharpness = self.edges / count / max(contrast, QUIET)
        return {"brightness": mean, "contrast": contrast, "sharpness": sharpness}

    def mean_embedding(self) -> Floats:
        """(D,)."""
        return np.asarray(self.embedding, np.float64) / max(self.patches, 1)

    def variance(self) -> float:
        """Mean variance of the image's patch embeddings."""
        mean = self.mean_embedding()
        mean_square = self.squared / max(self.patches, 1) / len(mean)
        return max(mean_square - float(np.mean(np.square(mean))), 0.0)


def statistics_of(
    batch: Sequence[NetworkInput], embeddings: Array, inside: Array | None
) -> list[ImageStatistics]:
    """The statistics of each image or tile of a batch.

    Args:
        batch: of images of one network size.
        embeddings: (B, h, w, D), of these images.
        inside: (B, h, w) bool, the patches that count; None for all.
    """
    masks: list[NDArray[np.bool_] | None] = [None] * len(batch)
    if inside is not None:
        embeddings = embeddings * inside[..., None]
        masks = list(as_numpy(inside))
    flat = embeddings.reshape(len(embeddings), -1, embeddings.shape[3])
    sums = as_numpy(flat.sum(1)).astype(np.float64)
    norms = module_of(flat).linalg.norm(flat.reshape(len(flat), -1), None, 1)
    squares = np.square(as_numpy(norms).astype(np.float64)).tolist()
    patches = [flat.shape[1] if mask is None else int(mask.sum()) for mask in masks]
    return [
        measure(item.pixels, total, square, count, mask)
        for item, total, square, count, mask in zip(
            batch, sums, squares, patches, masks, strict=True
        )
    ]


def measure(
    pixels: NDArray[np.float32],
    embedding: Floats,
    squared: float,
    patches: int,
    inside: NDArray[np.bool_] | None = None,
) -> ImageStatistics:
    """The statistics of one network input or tile.

    Args:
        pixels: (H, W, 3) in [0, 1].
        embedding: (D,) sum of the embeddings of the patches that count.
        squared: sum of the squares of all values of theirs.
        patches: how many those are.
        inside: (h, w), which they are; None for all.
    """
    red, green, blue = np.moveaxis(pixels, 2, 0)
    light = (red + green + blue) / np.float32(3)  # a fifth of the time that `mean` takes
    edges = np.abs(cv2.Laplacian(light, cv2.CV_32F))
    if inside is not None:
        size = (light.shape[1], light.shape[0])
        shown = cv2.resize(inside.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST) > 0
        light, edges = light[shown], edges[shown]
    return ImageStatistics(
        float(light.size),
        float(light.sum(dtype=np.float64)),
        float(np.square(light).sum(dtype=np.float64)),
        float(edges.sum(dtype=np.float64)),
        patches,
        embedding,
        squared,
        # A tile may have no pixel that counts.
        float(light.min(initial=np.inf)),
        float(light.max(initial=-np.inf)),
    )


LEAST_IMAGES = 8  # fewer don't show how much good images differ
# The training images' range is widened by the ratio of its ends at either end, and at least by
# these: factors, as exposure and focus work in factors.
_LEAST_FACTOR = {"brightness": 1.3, "contrast": 2.0, "sharpness": 2.0}
# An image of another product is more than so many times as far from the training images as the
# farthest of these is from the others. Those of 8 data sets were 2.2 and more times as far, with
# each of 3 networks, good images that weren't learned from at most 1.6 times.
FARTHER = 2.0
# And it is more than so many standard deviations of the patches within an image away: where
# training images are all alike, a defect or a later lot is soon twice as far. Other products were
# 0.4 and more away, of the defects that were twice as far two broken bottles.
LEAST_DISTANCE = 0.25
# Channels that hardly move in the training images mustn't count for everything: this share of the
# mean variance is added to that of each, and what rounding does, in spreads.
_SHRINKAGE, _ROUNDING = 0.1, 1e-3
# Training images whose mean embeddings are kept, the farthest ones: what is joined needs to know
# how far these are.
_KEPT = 16
_CAUSES = {
    ("brightness", "low"): "lens cap, lamp or exposure",
    ("brightness", "high"): "over-exposed",
    ("contrast", "low"): "nothing in view, fog or lens cap",
    ("contrast", "high"): "another lamp or product",
    ("sharpness", "low"): "out of focus or moved",
    ("sharpness", "high"): "noise, or another product",
}
_DARK = 0.002  # half a level of 255
_AT_ONCE = 64  # images whose mean embeddings are held a second time


@dataclass(frozen=True, eq=False)
class TrainingStatistics:
    """Range and spread of good images' statistics.

    Attributes:
        seen: lowest and highest brightness, contrast and sharpness of the training images.
        mean: (D,) of the training images' mean embeddings.
        variance: (D,) theirs.
        spread: standard deviation of the patches' embeddings within an image, over all values.
        farthest: (K, D) mean embeddings of the training images that are farthest from the others.
        images: that this was learned from; fewer than `LEAST_IMAGES` don't show what is far
            outside, but are kept to be joined with more.
    """

    seen: dict[str, tuple[float, float]]
    mean: Floats
    variance: Floats
    spread: float
    farthest: Floats
    images: int

    @classmethod
    def of(cls, statistics: Sequence[ImageStatistics]) -> TrainingStatistics:
        """Learn from training images, one at least."""
        figures = np.array([[*image.figures().values()] for image in statistics])
        values = dict(zip(_LEAST_FACTOR, figures.T.tolist(), strict=True))
        mean = sum(rows.sum(axis=0) for rows in _mean_embeddings(statistics)) / len(statistics)
        squares = sum(np.square(rows - mean).sum(axis=0) for rows in _mean_embeddings(statistics))
        model = cls(
            seen={name: (min(v), max(v)) for name, v in values.items()},
            mean=mean,
            variance=squares / max(len(statistics) - 1, 1),
            spread=float(np.mean([image.variance() for image in statistics])) ** 0.5 + 1e-12,
            farthest=mean[None],
            images=len(statistics),
        )
        kept = [statistics[place].mean_embedding() for place in model._farthest_of(statistics)]
        return replace(model, farthest=np.stack(kept))

    @property
    def is_reliable(self) -> bool:
        """Whether there were enough images to judge others."""
        return self.images >= LEAST_IMAGES

    def merged(self, other: TrainingStatistics) -> TrainingStatistics:
        """The statistics of the images of both together.

        Exactly, but that the farthest image is looked for among those that were the farthest of
        either.

        Args:
            other: of further images.
        """
        images, others = self.images, other.images
        count = images + others
        apart = np.square(self.mean - other.mean) * images * others / count
        squares = self.variance * (images - 1) + other.variance * (others - 1) + apart
        seen = {
            name: (min(low, other.seen[name][0]), max(high, other.seen[name][1]))
            for name, (low, high) in self.seen.items()
        }
        model = TrainingStatistics(
            seen=seen,
            mean=(self.mean * images + other.mean * others) / count,
            variance=squares / (count - 1),
            spread=((images * self.spread**2 + others * other.spread**2) / count) ** 0.5,
            farthest=np.concatenate([self.farthest, other.farthest]),
            images=count,
        )
        order = np.argsort(-model._from_others(model.farthest), kind="stable")
        return replace(model, farthest=model.farthest[order[:_KEPT]])

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest accepted brightness, contrast and sharpness."""
        accepted = {}
        for name, (low, high) in self.seen.items():
            factor = max((high + _DARK) / (low + _DARK), _LEAST_FACTOR[name])
            accepted[name] = low / factor, high * factor
        return accepted

    @cached_property
    def seen_distance(self) -> float:
        """How far the farthest training image is from the others, in standard deviations."""
        return float(self._from_others(self.farthest).max())

    def deviation(self, image: ImageStatistics, *, turned: bool = False) -> str:
        """A message if an image is far outside the training set; empty otherwise.

        Empty where it isn't, or where there were too few images to say.

        Args:
            image: as a whole.
            turned: whether parts may lie other ways than in the training images; only brightness,
                contrast and sharpness, which turning doesn't change, are compared then.
        """
        if not self.is_reliable:
            return ""
        whole = "" if turned else self._outlying_embedding(image.mean_embedding())
        return "; ".join(filter(None, (self._outlying_figure(image), whole)))

    def _outlying_figure(self, image: ImageStatistics) -> str:
        for name, value in image.figures().items():
            low, high = self.ranges[name]
            if not low <= value <= high:
                seen = "{:.3g} to {:.3g}".format(*self.seen[name])
                side = "low" if value < low else "high"
                return (
                    f"{name} {value:.3g} is far outside the training images' {seen}"
                    f" ({_CAUSES[name, side]}?)"
                )
        return ""

    def resembles(self, other: TrainingStatistics) -> bool:
        """True if other training images, seen by the same network, lie near these figures.

        Few images don't show that.
        """
        return not self.is_reliable or not self._outlying_embedding(other.mean)

    def _outlying_embedding(self, embedding: Floats) -> str:
        apart = embedding - self.mean
        away = float(self._standardised(apart, self.variance))
        in_spreads = float(_root_mean_square(apart)) / self.spread
        if away > FARTHER * self.seen_distance and in_spreads > LEAST_DISTANCE:
            return (
                f"the image as a whole lies at distance {away:.2g} from the training images, which "
                f"lie at most {self.seen_distance:.2g} from each other (another product, or turned "
                "or cropped differently?)"
            )
        return ""

    def _standardised(self, apart: Floats, variance: Floats) -> Floats:
        """The root mean square over the channels of differences (…, D) in standard deviations.

        Args:
            apart: differences.
            variance: (…, D) of the channels.
        """
        return _root_mean_square(apart / self.deviations(variance))

    def deviations(self, variance: Floats) -> Floats:
        """Standard deviations (…, D) of variances, with a lower limit."""
        least = _SHRINKAGE * variance.mean(axis=-1, keepdims=True)
        return np.asarray(np.sqrt(variance + least + np.square(_ROUNDING * self.spread)))

    def _from_others(self, rows: Floats) -> Floats:
        """How far training images' mean embeddings (N, D) are from the others' without them."""
        count = self.images
        apart = (rows - self.mean) * (count / max(count - 1, 1))  # from the others' mean
        own = np.square(rows - self.mean) * (count / max(count - 1, 1))
        left = np.maximum(self.variance * (count - 1) - own, 0) / max(count - 2, 1)
        return self._standardised(apart, left)

    def _farthest_of(self, statistics: Sequence[ImageStatistics]) -> list[int]:
        """Places of the training images that are farthest from the others, the farthest first."""
        away = np.concatenate([self._from_others(rows) for rows in _mean_embeddings(statistics)])
        return [int(place) for place in np.argsort(-away, kind="stable")[:_KEPT]]

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tensors to save, by name."""
        bounds = np.array([[*self.ranges[n], *self.seen[n]] for n in _LEAST_FACTOR])
        return {
            "bounds": bounds,
            "mean": self.mean,
            "variance": self.variance,
            "spread": np.array(self.spread),
            "farthest": self.farthest,
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, NDArray[Any]], images: int) -> TrainingStatistics:
        """The statistics stored by `tensors`, for the number of training images.

        Raises:
            ModelError: they aren't the statistics of training images.
        """
        dimensions = {"bounds": 2, "mean": 1, "variance": 1, "spread": 0, "farthest": 2}
        kinds = {name: (count, "float64") for name, count in dimensions.items()}
        if (
            {name: (value.ndim, value.dtype.name) for name, value in tensors.items()} != kinds
            or not all(np.isfinite(v).all() for v in tensors.values())
            or tensors["bounds"].shape != (len(_LEAST_FACTOR), 4)
            or tensors["variance"].shape != tensors["mean"].shape
            or tensors["farthest"].shape[1:] != tensors["mean"].shape
            or not len(tensors["farthest"])
            or (tensors["variance"] < 0).any()
            or tensors["spread"] <= 0
        ):
            raise ModelError("the statistics of the training images are damaged")
        bounds = dict(zip(_LEAST_FACTOR, tensors["bounds"].tolist(), strict=True))
        return cls(
            seen={name: (b[2], b[3]) for name, b in bounds.items()},
            mean=tensors["mean"],
            variance=tensors["variance"],
            spread=float(tensors["spread"]),
            farthest=tensors["farthest"],
            images=images,
        )


def outliers_among(statistics: Sequence[ImageStatistics]) -> list[int]:
    """Places of the images that would be far outside a training set of all the others.

    How often good parts are taken for another product, hence. Only images at an end of a range, or
    farther away than all others, can be; and blank ones always are.
    """
    blank = {place for place, image in enumerate(statistics) if image.blank}
    if len(statistics) <= LEAST_IMAGES:
        return sorted(blank)
    figures = np.array([[*image.figures().values()] for image in statistics])
    farthest = TrainingStatistics.of(statistics)._farthest_of(statistics)[0]
    candidates = {*np.argmin(figures, axis=0), *np.argmax(figures, axis=0), farthest}
    outliers = {
        place
        for place in map(int, candidates)
        if TrainingStatistics.of([*statistics[:place], *statistics[place + 1 :]]).deviation(
            statistics[place]
        )
    }
    return sorted(outliers | blank)


def _mean_embeddings(statistics: Sequence[ImageStatistics]) -> Iterator[Floats]:
    """Mean embeddings (n, D) of images, several at a time."""
    for first in range(0, len(statistics), _AT_ONCE):
        group = statistics[first : first + _AT_ONCE]
        yield np.stack([image.mean_embedding() for image in group])


def _root_mean_square(difference: Floats) -> Floats:
    """Over the last axis."""
    return np.asarray(np.sqrt(np.mean(np.square(difference), axis=-1)))
