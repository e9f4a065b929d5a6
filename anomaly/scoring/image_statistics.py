"""Statistics of whole images, which tell another product, a blank image or bad light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.arrays import Array, as_numpy, module_of
from anomaly.imaging.loading import NetworkInput
from anomaly.methods.base import axis_length, check_tensors

Floats = NDArray[np.float64]

QUIET = 0.02  # lowest contrast that sharpness is divided by: below it there is only noise
# Brightness that varies less over an image is one value, apart from the rounding of resizing.
BLANK = 1e-4


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics of an image as a whole, kept as sums so that tiles add up.

    Attributes:
        pixels: number of pixels that the network saw and that count.
        light: sum of their brightness, each in [0, 1].
        light_squared: sum of the squares of their brightness.
        edges: sum of the absolute second derivative of the brightness.
        patches: number of patches that count.
        embedding: (D,) sum of their embeddings, float64 or float32.
        squared: sum of the squares of all values of these embeddings.
        darkest: the lowest brightness of a pixel.
        brightest: the highest brightness of a pixel.
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

    def __add__(self, tile: ImageStatistics) -> ImageStatistics:
        # All fields are sums but the two extremes.
        names = [field.name for field in fields(self)]
        total = {name: getattr(self, name) + getattr(tile, name) for name in names}
        total["darkest"] = min(self.darkest, tile.darkest)
        total["brightest"] = max(self.brightest, tile.brightest)
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
        """Mean brightness; its standard deviation, contrast; detail over contrast, sharpness."""
        count = max(self.pixels, 1.0)
        mean = self.light / count
        contrast = max(self.light_squared / count - mean**2, 0.0) ** 0.5
        sharpness = self.edges / count / max(contrast, QUIET)
        return {"brightness": mean, "contrast": contrast, "sharpness": sharpness}

    def mean_embedding(self) -> Floats:
        """Mean (D,) of the embeddings of the patches that count."""
        return np.asarray(self.embedding, np.float64) / max(self.patches, 1)

    def variance(self) -> float:
        """Variance of the patch embeddings within the image, averaged over the channels."""
        mean = self.mean_embedding()
        mean_square = self.squared / max(self.patches, 1) / len(mean)
        return max(mean_square - float(np.mean(np.square(mean))), 0.0)


def statistics_of(
    batch: Sequence[NetworkInput], embeddings: Array, inside: Array | None
) -> list[ImageStatistics]:
    """The statistics of each image or tile of a batch.

    Args:
        batch: B images or tiles of one network size.
        embeddings: their patch embeddings (B, h, w, D).
        inside: (B, h, w) bool, the patches that count; None for all.
    """
    masks: list[NDArray[np.bool_] | None] = [None] * len(batch)
    if inside is not None:
        embeddings = embeddings * inside[..., None]
        masks = list(as_numpy(inside))
    flat = embeddings.reshape(len(embeddings), -1, embeddings.shape[3])
    sums = as_numpy(flat.sum(1)).astype(np.float64)
    # Squared norms, because no tensor of squares is made for a norm.
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
        squared: sum of the squares of all values of these embeddings.
        patches: number of patches that count.
        inside: (h, w) bool, the patches that count; None for all.
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
# Either end of the training images' range is moved outwards by the ratio of its ends, and at least
# by these factors: exposure and focus multiply, they don't add.
_LEAST_FACTOR = {"brightness": 1.3, "contrast": 2.0, "sharpness": 2.0}
# An image of another product lies more than so many times as far from the training images as the
# farthest of these lies from the others. Measured with 8 data sets and 3 networks: other products
# lie at least 2.2 times as far, good images of the same product at most 1.6 times.
FARTHER = 2.0
# It also lies more than so many standard deviations of the patches within an image away: where all
# training images are alike, a defect or a later lot is soon twice as far. Other products lie at
# least 0.4 away; of the defects that lie twice as far, only two broken bottles do.
LEAST_DISTANCE = 0.25
# Channels that hardly vary over the training images would outweigh all others, so this share of the
# mean variance is added to each channel's, and the square of so many spreads for rounding.
_SHRINKAGE, _ROUNDING = 0.1, 1e-3
# Number of the farthest training images whose mean embeddings are kept: after a merge their
# distances are computed again, since the mean has moved.
_KEPT = 16
_CAUSES = {
    ("brightness", "low"): "lens cap, lamp or exposure",
    ("brightness", "high"): "over-exposed",
    ("contrast", "low"): "nothing in view, fog or lens cap",
    ("contrast", "high"): "another lamp or product",
    ("sharpness", "low"): "out of focus or moved",
    ("sharpness", "high"): "noise, or another product",
}
_DARK = 0.002  # half a level of 255, so that black images don't give a ratio of 0 / 0


@dataclass(frozen=True, eq=False)
class TrainingStatistics:
    """Range and spread of good images' statistics.

    Attributes:
        seen: lowest and highest brightness, contrast and sharpness of the training images.
        mean: (D,) mean of the training images' mean embeddings.
        variance: (D,) their variance.
        spread: standard deviation of the patches' embeddings within an image, over all channels.
        farthest: (K, D) mean embeddings of the training images that are farthest from the others.
        images: number of training images; fewer than `LEAST_IMAGES` judge nothing, but can be
            merged with more.
    """

    seen: dict[str, tuple[float, float]]
    mean: Floats
    variance: Floats
    spread: float
    farthest: Floats
    images: int

    @classmethod
    def of(cls, statistics: Sequence[ImageStatistics]) -> TrainingStatistics:
        """Statistics of at least one training image."""
        figures = np.array([[*image.figures().values()] for image in statistics])
        values = dict(zip(_LEAST_FACTOR, figures.T.tolist(), strict=True))
        rows = np.stack([image.mean_embedding() for image in statistics])
        mean = rows.sum(axis=0) / len(rows)
        unthinned = cls(
            seen={name: (min(v), max(v)) for name, v in values.items()},
            mean=mean,
            variance=np.square(rows - mean).sum(axis=0) / max(len(rows) - 1, 1),
            # Images of one colour have no spread; distances are divided by it.
            spread=float(np.mean([image.variance() for image in statistics])) ** 0.5 + 1e-12,
            farthest=rows,
            images=len(rows),
        )
        return unthinned._thinned()

    @property
    def is_reliable(self) -> bool:
        """True if there are enough training images to judge others by."""
        return self.images >= LEAST_IMAGES

    def merged(self, further: TrainingStatistics) -> TrainingStatistics:
        """Statistics of both sets of training images together.

        Exact, except that the farthest images are chosen among the farthest of either set.
        """
        first, second = self.images, further.images
        count = first + second
        between = np.square(self.mean - further.mean) * first * second / count
        scatter = self.variance * (first - 1) + further.variance * (second - 1) + between
        seen = {
            name: (min(low, further.seen[name][0]), max(high, further.seen[name][1]))
            for name, (low, high) in self.seen.items()
        }
        unthinned = TrainingStatistics(
            seen=seen,
            mean=(self.mean * first + further.mean * second) / count,
            variance=scatter / (count - 1),
            spread=((first * self.spread**2 + second * further.spread**2) / count) ** 0.5,
            farthest=np.concatenate([self.farthest, further.farthest]),
            images=count,
        )
        return unthinned._thinned()

    def _thinned(self) -> TrainingStatistics:
        """A copy with at most 16 rows of `farthest`, the farthest from the others first."""
        order = np.argsort(-self._from_others(self.farthest), kind="stable")
        return replace(self, farthest=self.farthest[order[:_KEPT]])

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
        """Distance of the farthest training image from the others, in standard deviations."""
        return float(self._from_others(self.farthest).max())

    def deviation(self, image: ImageStatistics, *, turned: bool = False) -> str:
        """A message if an image is far outside the training set; empty otherwise.

        Empty, too, without enough training images to judge.

        Args:
            image: statistics of the whole image.
            turned: parts may be turned or mirrored against the training images; then only
                brightness, contrast and sharpness, which don't change with that, are compared.
        """
        if not self.is_reliable:
            return ""
        whole = "" if turned else self._outlying_embedding(image.mean_embedding())
        return "; ".join(filter(None, (self._outlying_figure(image), whole)))

    def _outlying_figure(self, image: ImageStatistics) -> str:
        """A message about the first figure outside its accepted range; empty without any."""
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

    def resembles(self, earlier: TrainingStatistics) -> bool:
        """True if an earlier model has learned like images, or this one too few to judge."""
        return not self.is_reliable or not self._outlying_embedding(earlier.mean)

    def _outlying_embedding(self, embedding: Floats) -> str:
        """A message if a mean embedding (D,) is another product's; empty otherwise."""
        difference = embedding - self.mean
        distance = float(self._standardised(difference, self.variance))
        in_spreads = float(_root_mean_square(difference)) / self.spread
        if distance > FARTHER * self.seen_distance and in_spreads > LEAST_DISTANCE:
            return (
                "it looks like none of the training images (another product, turned or cropped "
                "differently, or badly broken?)"
            )
        return ""

    def _standardised(self, differences: Floats, variance: Floats) -> Floats:
        """Root mean squares (…,) of differences (…, D), in standard deviations of the channels."""
        return _root_mean_square(differences / self.deviations(variance))

    def deviations(self, variance: Floats) -> Floats:
        """Standard deviations (…, D) of variances (…, D), raised as `_SHRINKAGE` says."""
        least = _SHRINKAGE * variance.mean(axis=-1, keepdims=True)
        return np.asarray(np.sqrt(variance + least + np.square(_ROUNDING * self.spread)))

    def _from_others(self, rows: Floats) -> Floats:
        """Distances (N,) of training images' mean embeddings (N, D) from all other images'.

        Mean and variance of the others follow from those of all by taking the one image out.
        """
        count = self.images
        from_others = (rows - self.mean) * (count / max(count - 1, 1))
        own = np.square(rows - self.mean) * (count / max(count - 1, 1))
        variance = np.maximum(self.variance * (count - 1) - own, 0) / max(count - 2, 1)
        return self._standardised(from_others, variance)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tensors to save, by name."""
        return {
            "seen": np.array([self.seen[name] for name in _LEAST_FACTOR]),
            "mean": self.mean,
            "variance": self.variance,
            "spread": np.array(self.spread),
            "farthest": self.farthest,
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, NDArray[Any]], images: int) -> TrainingStatistics:
        """The statistics saved by `tensors`; the number of images is saved elsewhere.

        Raises:
            ModelError: the tensors aren't the statistics of training images.
        """
        dimensions = axis_length(tensors, "mean")
        shapes = {
            "seen": (len(_LEAST_FACTOR), 2),
            "mean": (-1,),
            "variance": (dimensions,),
            "spread": (),
            "farthest": (-1, dimensions),
        }
        check_tensors(tensors, {name: ("float64", shape) for name, shape in shapes.items()})
        seen = zip(_LEAST_FACTOR, tensors["seen"].tolist(), strict=True)
        return cls(
            seen={name: (low, high) for name, (low, high) in seen},
            mean=tensors["mean"],
            variance=tensors["variance"],
            spread=float(tensors["spread"]),
            farthest=tensors["farthest"],
            images=images,
        )


def outliers_among(statistics: Sequence[ImageStatistics]) -> list[int]:
    """Indices, ascending, of images that would be far outside a training set of all others.

    Their share estimates how often good parts will be taken to be another product. Blank images
    always count.
    """
    blank = {index for index, image in enumerate(statistics) if image.blank}
    if len(statistics) <= LEAST_IMAGES:
        return sorted(blank)
    figures = np.array([[*image.figures().values()] for image in statistics])
    rows = np.stack([image.mean_embedding() for image in statistics])
    farthest = np.argmax(TrainingStatistics.of(statistics)._from_others(rows))
    # Only an image at an end of a range, or the farthest one, can be outside: few are left out.
    candidates = {*np.argmin(figures, axis=0), *np.argmax(figures, axis=0), farthest}
    outliers = {
        index
        for index in map(int, candidates)
        if TrainingStatistics.of([*statistics[:index], *statistics[index + 1 :]]).deviation(
            statistics[index]
        )
    }
    return sorted(outliers | blank)


def _root_mean_square(difference: Floats) -> Floats:
    """Root mean square over the last axis."""
    return np.asarray(np.sqrt(np.mean(np.square(difference), axis=-1)))
