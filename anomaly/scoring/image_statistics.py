"""What images look like as a whole, and whether one is another product, blank or ill lit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, as_numpy, module_of
from anomaly.errors import ModelError
from anomaly.imaging.loading import NetworkInput

Floats = NDArray[np.float64]

_QUIET = 0.02  # contrast, below which a ratio to it means nothing
# Brightness that differs less, all over an image, is one value and the rounding of resizing it.
_BLANK = 1e-4
# Of one picture's mean embeddings in batches of different sizes, relative to their size.
_NOISE = 1e-3


@dataclass(frozen=True)
class Appearance:
    """An image as a whole, in sums, so that its tiles add up.

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

    def __add__(self, other: Appearance) -> Appearance:
        return Appearance(
            self.pixels + other.pixels,
            self.light + other.light,
            self.light_squared + other.light_squared,
            self.edges + other.edges,
            self.patches + other.patches,
            self.embedding + other.embedding,
            self.squared + other.squared,
            min(self.darkest, other.darkest),
            max(self.brightest, other.brightest),
        )

    @property
    def blank(self) -> str:
        """That all pixels have one value, for a person; empty where they don't."""
        if self.brightest - self.darkest > _BLANK:
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
        sharpness = self.edges / count / max(contrast, _QUIET)
        return {"brightness": mean, "contrast": contrast, "sharpness": sharpness}

    def mean_embedding(self) -> Floats:
        """(D,)."""
        return np.asarray(self.embedding, np.float64) / max(self.patches, 1)

    def variance(self) -> float:
        """Of the embeddings of the image's patches, the mean over their values."""
        mean = self.mean_embedding()
        mean_square = self.squared / max(self.patches, 1) / len(mean)
        return max(mean_square - float(np.mean(np.square(mean))), 0.0)


class AppearanceSums:
    """Appearances of images, whose tiles come one by one.

    Their embeddings are float32 rows of one array: small arrays that stay among large ones that go
    keep the memory of these from being used again.

    Attributes:
        of_image: the sum of what was added, by image.

    Args:
        images: the numbers of all images that may come.
    """

    def __init__(self, images: Iterable[int]) -> None:
        self.of_image: dict[int, Appearance] = {}
        self._row_of = {image: row for row, image in enumerate(images)}
        self._embeddings: NDArray[np.float32] | None = None

    def add(self, image: int, one: Appearance) -> None:
        """Add one of an image's tiles."""
        known = self.of_image.get(image)
        total = one if known is None else known + one
        if self._embeddings is None:
            self._embeddings = np.empty((len(self._row_of), len(one.embedding)), np.float32)
        row = self._row_of[image]
        self._embeddings[row] = total.embedding
        self.of_image[image] = replace(total, embedding=self._embeddings[row])


def appearances_of(
    batch: Sequence[NetworkInput], embeddings: Array, inside: Array | None
) -> list[Appearance]:
    """What each image or tile of a batch looks like as a whole.

    Args:
        batch: of images of one network size.
        embeddings: (B, h, w, D), theirs.
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
    every = zip(batch, sums, squares, patches, masks, strict=True)
    return [look(item.pixels, *one) for item, *one in every]


def same_pictures(looks: Mapping[int, Appearance]) -> dict[int, int]:
    """The first image that shows the same picture as each one; the image itself if none does.

    Files of other bytes may hold the same pixels, with other metadata, say.

    Args:
        looks: of images, by their numbers.
    """
    met: dict[tuple[float, ...], list[int]] = {}
    first: dict[int, int] = {}
    for image, one in sorted(looks.items()):
        # Sums over pixels are the same to the last bit; those of a turned copy may be, too.
        seen = one.pixels, one.light, one.light_squared, one.edges, one.darkest, one.brightest
        alike = met.setdefault(seen, [])
        same = (other for other in alike if _is_rounding(looks[other].embedding, one.embedding))
        first[image] = next(same, image)
        if first[image] == image:
            alike.append(image)
    return first


def _is_rounding(one: Floats | NDArray[np.float32], other: Floats | NDArray[np.float32]) -> bool:
    return bool(np.linalg.norm(one - other) <= _NOISE * np.linalg.norm(one))


def look(
    pixels: NDArray[np.float32],
    embedding: Floats,
    squared: float,
    patches: int,
    inside: NDArray[np.bool_] | None = None,
) -> Appearance:
    """What one network input looks like.

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
    return Appearance(
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
_FARTHER = 2.0


# And it is more than so many standard deviations of the patches within an image away: where
# training images are all alike, a defect or a later lot is soon twice as far. Other products were
# 0.4 and more away, of the defects that were twice as far two broken bottles.
_LEAST_DISTANCE = 0.25


# Channels that hardly move in the training images mustn't count for everything: this share of the
# mean variance is added to that of each, and what rounding does, in spreads.
_SHRINKAGE, _ROUNDING = 0.1, 1e-3


# Training images whose mean embeddings are kept, the farthest ones: what is joined needs to know
# how far these are.
_KEPT = 16


_DARK = 0.002  # half a level of 255


_AT_ONCE = 64  # images whose mean embeddings are held a second time


@dataclass(frozen=True, eq=False)
class AppearanceModel:
    """What the training images look like.

    Attributes:
        ranges: lowest and highest accepted brightness, contrast and sharpness.
        seen: lowest and highest of the training images.
        mean: (D,) of the training images' mean embeddings.
        variance: (D,) theirs.
        spread: standard deviation of the patches' embeddings within an image, over all values.
        farthest: (K, D) mean embeddings of the training images that are farthest from the others.
        images: that this was learned from; fewer than `LEAST_IMAGES` don't show what is far
            outside, but are kept to be joined with more.
    """

    ranges: dict[str, tuple[float, float]]
    seen: dict[str, tuple[float, float]]
    mean: Floats
    variance: Floats
    spread: float
    farthest: Floats
    images: int

    @classmethod
    def of(cls, looks: Sequence[Appearance]) -> AppearanceModel:
        """Learn from training images, one at least."""
        figures = np.array([[*one.figures().values()] for one in looks])
        values = dict(zip(_LEAST_FACTOR, figures.T.tolist(), strict=True))
        mean = sum(rows.sum(axis=0) for rows in _mean_embeddings(looks)) / len(looks)
        squares = sum(np.square(rows - mean).sum(axis=0) for rows in _mean_embeddings(looks))
        model = cls(
            ranges={name: _widened(name, v) for name, v in values.items()},
            seen={name: (min(v), max(v)) for name, v in values.items()},
            mean=mean,
            variance=squares / max(len(looks) - 1, 1),
            spread=float(np.mean([one.variance() for one in looks])) ** 0.5 + 1e-12,
            farthest=mean[None],
            images=len(looks),
        )
        kept = [looks[place].mean_embedding() for place in model._farthest_of(looks)]
        return replace(model, farthest=np.stack(kept))

    @property
    def tells(self) -> bool:
        """Whether there were images enough to tell what is far outside them."""
        return self.images >= LEAST_IMAGES

    def merged(self, other: AppearanceModel) -> AppearanceModel:
        """What the images of both look like together.

        Exactly, but that the farthest image is looked for among those that were the farthest of
        either.

        Args:
            other: what further images look like.
        """
        images, others = self.images, other.images
        count = images + others
        apart = np.square(self.mean - other.mean) * images * others / count
        squares = self.variance * (images - 1) + other.variance * (others - 1) + apart
        seen = {
            name: (min(low, other.seen[name][0]), max(high, other.seen[name][1]))
            for name, (low, high) in self.seen.items()
        }
        model = AppearanceModel(
            ranges={name: _widened(name, ends) for name, ends in seen.items()},
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
    def seen_distance(self) -> float:
        """How far the farthest training image is from the others, as `standardised` measures."""
        return float(self._from_others(self.farthest).max())

    def deviation(self, one: Appearance, *, turned: bool = False) -> str:
        """Why an image is far outside the training set, for a person.

        Empty where it isn't, or where there were too few images to tell.

        Args:
            one: the image as a whole.
            turned: whether parts may lie other ways than in the training images; only brightness,
                contrast and sharpness, which turning doesn't change, are compared then.
        """
        if not self.tells:
            return ""
        whole = "" if turned else self._odd_whole(one)
        return "; ".join(filter(None, (self._odd_light(one), whole)))

    def _odd_light(self, one: Appearance) -> str:
        for name, value in one.figures().items():
            low, high = self.ranges[name]
            if not low <= value <= high:
                seen = "{:.3g} to {:.3g}".format(*self.seen[name])
                side = "low" if value < low else "high"
                return (
                    f"{name} {value:.3g} is far outside the training images' {seen}"
                    f" ({_CAUSES[name, side]}?)"
                )
        return ""

    def _odd_whole(self, one: Appearance) -> str:
        away, seen = self.standardised(one), self.seen_distance
        if away > _FARTHER * seen and self.distance(one) > _LEAST_DISTANCE:
            return (
                f"as a whole the image is {away:.2g} from the training images, and the farthest "
                f"of these is {seen:.2g} from the others (another product, or turned or cut out "
                "differently?)"
            )
        return ""

    def distance(self, one: Appearance) -> float:
        """How far an image's mean embedding is from the training images', in spreads.

        In one unit for all products behind one network.
        """
        return float(_root_mean_square(one.mean_embedding() - self.mean)) / self.spread

    def standardised(self, one: Appearance) -> float:
        """How far an image is from the training images, in these' standard deviations.

        The root of the mean over the channels of the squares of their deviations.
        """
        return float(self._standardised(one.mean_embedding() - self.mean, self.variance))

    def _standardised(self, apart: Floats, variance: Floats) -> Floats:
        """The size of differences (…, D) in standard deviations, of channels' variances (…, D)."""
        least = _SHRINKAGE * variance.mean(axis=-1, keepdims=True)
        least = least + np.square(_ROUNDING * self.spread)
        return _root_mean_square(apart / np.sqrt(variance + least))

    def _from_others(self, rows: Floats) -> Floats:
        """How far training images' mean embeddings (N, D) are from the others' without them."""
        count = self.images
        apart = (rows - self.mean) * (count / max(count - 1, 1))  # from the others' mean
        own = np.square(rows - self.mean) * (count / max(count - 1, 1))
        left = np.maximum(self.variance * (count - 1) - own, 0) / max(count - 2, 1)
        return self._standardised(apart, left)

    def _farthest_of(self, looks: Sequence[Appearance]) -> list[int]:
        """Places of the training images that are farthest from the others, the farthest first."""
        away = np.concatenate([self._from_others(rows) for rows in _mean_embeddings(looks)])
        return [int(place) for place in np.argsort(-away, kind="stable")[:_KEPT]]

    def tensors(self) -> dict[str, Floats]:
        """Everything that has to be saved, by name."""
        bounds = np.array([[*self.ranges[n], *self.seen[n]] for n in _LEAST_FACTOR])
        return {
            "bounds": bounds,
            "mean": self.mean,
            "variance": self.variance,
            "spread": np.array(self.spread),
            "farthest": self.farthest,
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Floats], images: int) -> AppearanceModel:
        """The way back from `tensors`, for as many images as they were learned from.

        Models of before knew one distance alone; of theirs all channels vary alike.

        Raises:
            ModelError: they aren't those of a training set's look.
        """
        before = tensors.keys() == {"bounds", "mean", "spread", "seen_distance"}
        if before and tensors["seen_distance"].ndim == tensors["spread"].ndim == 0:
            tensors = dict(tensors)
            size = tensors.pop("seen_distance") * tensors["spread"]
            tensors["variance"] = np.full_like(tensors["mean"], size**2)
            tensors["farthest"] = tensors["mean"][None] + size
        dimensions = {"bounds": 2, "mean": 1, "variance": 1, "spread": 0, "farthest": 2}
        if (
            {name: value.ndim for name, value in tensors.items()} != dimensions
            or any(v.dtype != np.float64 or not np.isfinite(v).all() for v in tensors.values())
            or tensors["bounds"].shape != (len(_LEAST_FACTOR), 4)
            or tensors["variance"].shape != tensors["mean"].shape
            or tensors["farthest"].shape[1:] != tensors["mean"].shape
            or not len(tensors["farthest"])
            or (tensors["variance"] < 0).any()
            or tensors["spread"] <= 0
        ):
            raise ModelError("what says how the training images look is damaged")
        bounds = dict(zip(_LEAST_FACTOR, tensors["bounds"].tolist(), strict=True))
        return cls(
            ranges={name: (b[0], b[1]) for name, b in bounds.items()},
            seen={name: (b[2], b[3]) for name, b in bounds.items()},
            mean=tensors["mean"],
            variance=tensors["variance"],
            spread=float(tensors["spread"]),
            farthest=tensors["farthest"],
            images=images,
        )


def odd_among(looks: Sequence[Appearance]) -> list[int]:
    """Places of the images that would be odd to a look learned from all the others.

    How often good parts are taken for another product, hence. Only images at an end of a range, or
    farther away than all others, can be; and blank ones are odd anyhow.
    """
    blank = [place for place, one in enumerate(looks) if one.blank]
    if len(looks) <= LEAST_IMAGES:
        return blank
    figures = np.array([[*one.figures().values()] for one in looks])
    farthest = AppearanceModel.of(looks)._farthest_of(looks)[0]
    outer = {*np.argmin(figures, axis=0), *np.argmax(figures, axis=0), farthest}
    odd = [
        place
        for place in map(int, outer)
        if AppearanceModel.of([*looks[:place], *looks[place + 1 :]]).deviation(looks[place])
    ]
    return sorted({*odd, *blank})


_CAUSES = {
    ("brightness", "low"): "lens cap, lamp or exposure",
    ("brightness", "high"): "over-exposed",
    ("contrast", "low"): "nothing in view, fog or lens cap",
    ("contrast", "high"): "another lamp or product",
    ("sharpness", "low"): "out of focus or moved",
    ("sharpness", "high"): "noise, or another product",
}


def _widened(name: str, values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    factor = max((high + _DARK) / (low + _DARK), _LEAST_FACTOR[name])
    return low / factor, high * factor


def nearest(models: Mapping[str, AppearanceModel], one: Appearance) -> str:
    """Which product an image looks most like: that whose training images it is least far from.

    Args:
        models: what the images of each product look like, by product.
        one: the image as a whole.
    """
    return min(models, key=lambda product: models[product].distance(one))


def _mean_embeddings(looks: Sequence[Appearance]) -> Iterator[Floats]:
    """Images' mean embeddings (n, D), so many at a time: they aren't all held a second time."""
    for first in range(0, len(looks), _AT_ONCE):
        yield np.stack([one.mean_embedding() for one in looks[first : first + _AT_ONCE]])


def _root_mean_square(difference: Floats) -> Floats:
    """Over the last axis."""
    return np.asarray(np.sqrt(np.mean(np.square(difference), axis=-1)))
