"""Is this even our part? What training images look like as a whole, and what is far outside it.

A lens cap, the wrong product, a blurred or an over-exposed image make high scores for the wrong
reason. They need a person, not a confident reject.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anomaly.errors import ModelError
from anomaly.model.appearance import Appearance, Floats

LEAST_IMAGES = 8  # fewer don't show how much good images differ


# The training images' range is widened by the ratio of its ends at either end, and at least by
# these: factors, as exposure and focus work in factors.
_LEAST_FACTOR = {"brightness": 1.3, "contrast": 2.0, "sharpness": 2.0}


# How far an image's mean embedding may be from the training images', in standard deviations of
# the patches within one image, and in distances of the farthest training image. Other products
# were 0.63 and more away in six data sets, defects at most 0.60 where the training images reach
# 0.54, and 0.57 where they reach 0.48.
_LEAST_DISTANCE = 0.5


_FARTHER = 1.25


_DARK = 0.002  # half a level of 255


_AT_ONCE = 256  # images whose mean embeddings are held a second time


@dataclass(frozen=True, eq=False)
class AppearanceModel:
    """What the training images look like.

    Attributes:
        ranges: lowest and highest accepted brightness, contrast and sharpness.
        seen: lowest and highest of the training images.
        mean: (D,) of the training images' mean embeddings.
        spread: standard deviation of the patches' embeddings within an image, over all values.
        seen_distance: of the farthest training image from the mean of the others, in spreads.
        images: that this was learned from; fewer than `LEAST_IMAGES` don't show what is far
            outside, but are kept to be joined with more.
    """

    ranges: dict[str, tuple[float, float]]
    seen: dict[str, tuple[float, float]]
    mean: Floats
    spread: float
    seen_distance: float
    images: int

    @classmethod
    def of(cls, looks: Sequence[Appearance]) -> AppearanceModel:
        """Learn from training images, one at least."""
        mean = _mean_of(looks)
        return cls._from(_figures(looks), _variances(looks), mean, _away(looks, mean))

    @classmethod
    def _from(
        cls, figures: Floats, variances: Floats, mean: Floats, away: Floats
    ) -> AppearanceModel:
        """The model of N images.

        Args:
            figures: (N, 3), in the order of `_LEAST_FACTOR`.
            variances: (N,) of the patches' embeddings within each image.
            mean: (D,) of their mean embeddings.
            away: (N,), how far each of these is from the mean.
        """
        values = dict(zip(_LEAST_FACTOR, figures.T.tolist(), strict=True))
        spread = float(np.mean(variances)) ** 0.5 + 1e-12
        # The others' mean is farther away than the mean of all.
        others = len(away) / max(len(away) - 1, 1)
        return cls(
            ranges={name: _widened(name, v) for name, v in values.items()},
            seen={name: (min(v), max(v)) for name, v in values.items()},
            mean=mean,
            spread=spread,
            seen_distance=others * float(away.max()) / spread,
            images=len(away),
        )

    @property
    def tells(self) -> bool:
        """Whether there were images enough to tell what is far outside them."""
        return self.images >= LEAST_IMAGES

    def merged(self, other: AppearanceModel) -> AppearanceModel:
        """What the images of both look like together.

        How far the farthest is from the mean isn't kept by image, so that what is said is the most
        that it can be.

        Args:
            other: what further images look like.
        """
        images, others = self.images, other.images
        count = images + others
        mean = (self.mean * images + other.mean * others) / count
        spread = ((images * self.spread**2 + others * other.spread**2) / count) ** 0.5
        seen = {
            name: (min(low, other.seen[name][0]), max(high, other.seen[name][1]))
            for name, (low, high) in self.seen.items()
        }
        farthest = max(
            one.seen_distance * one.spread * (n - 1) / n + float(_root_mean_square(one.mean - mean))
            for one, n in ((self, images), (other, others))
        )
        return AppearanceModel(
            ranges={name: _widened(name, ends) for name, ends in seen.items()},
            seen=seen,
            mean=mean,
            spread=spread,
            seen_distance=farthest / spread * count / (count - 1),
            images=count,
        )

    def deviation(self, one: Appearance) -> str:
        """Why an image is far outside the training set, for a person.

        Empty where it isn't, or where there were too few images to tell.
        """
        if not self.tells:
            return ""
        for name, value in one.figures().items():
            low, high = self.ranges[name]
            if not low <= value <= high:
                seen = "{:.3g} to {:.3g}".format(*self.seen[name])
                side = "low" if value < low else "high"
                return (
                    f"{name} {value:.3g} is far outside the training images' {seen}"
                    f" ({_CAUSES[name, side]}?)"
                )
        distance = self.distance(one)
        if distance > max(_LEAST_DISTANCE, _FARTHER * self.seen_distance):
            return (
                f"as a whole it is {distance:.2g} from the training images, which are "
                f"{self.seen_distance:.2g} from each other at most "
                "(another product, or turned or cut out differently?)"
            )
        return ""

    def distance(self, one: Appearance) -> float:
        """How far an image's mean embedding is from the training images', in spreads."""
        return float(_root_mean_square(one.mean_embedding() - self.mean)) / self.spread

    def tensors(self) -> dict[str, Floats]:
        """Everything that has to be saved, by name."""
        bounds = np.array([[*self.ranges[n], *self.seen[n]] for n in _LEAST_FACTOR])
        return {
            "bounds": bounds,
            "mean": self.mean,
            "spread": np.array(self.spread),
            "seen_distance": np.array(self.seen_distance),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Floats], images: int) -> AppearanceModel:
        """The way back from `tensors`, for as many images as they were learned from.

        Raises:
            ModelError: they aren't those of a training set's look.
        """
        dimensions = {"bounds": 2, "mean": 1, "spread": 0, "seen_distance": 0}
        if (
            {name: value.ndim for name, value in tensors.items()} != dimensions
            or any(v.dtype != np.float64 or not np.isfinite(v).all() for v in tensors.values())
            or tensors["bounds"].shape != (len(_LEAST_FACTOR), 4)
            or tensors["spread"] <= 0
        ):
            raise ModelError("what says how the training images look is damaged")
        bounds = dict(zip(_LEAST_FACTOR, tensors["bounds"].tolist(), strict=True))
        return cls(
            ranges={name: (b[0], b[1]) for name, b in bounds.items()},
            seen={name: (b[2], b[3]) for name, b in bounds.items()},
            mean=tensors["mean"],
            spread=float(tensors["spread"]),
            seen_distance=float(tensors["seen_distance"]),
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
    figures, variances, mean = _figures(looks), _variances(looks), _mean_of(looks)
    farthest = int(_away(looks, mean).argmax())
    outer = {*np.argmin(figures, axis=0), *np.argmax(figures, axis=0), farthest}
    odd = []
    for place in sorted(map(int, outer)):
        own = looks[place].mean_embedding()
        others = mean + (mean - own) / (len(looks) - 1)  # their mean
        away = np.delete(_away(looks, others), place)
        left = np.delete(figures, place, axis=0), np.delete(variances, place)
        if AppearanceModel._from(*left, others, away).deviation(looks[place]):
            odd.append(place)
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


def _figures(looks: Sequence[Appearance]) -> Floats:
    """Brightness, contrast and sharpness of each image, (N, 3)."""
    return np.array([[*one.figures().values()] for one in looks])


def _variances(looks: Sequence[Appearance]) -> Floats:
    return np.array([one.variance() for one in looks])


def _mean_of(looks: Sequence[Appearance]) -> Floats:
    """The mean (D,) of images' mean embeddings, which aren't held a second time."""
    total = np.zeros_like(looks[0].mean_embedding())
    for one in looks:
        total += one.mean_embedding()
    return total / len(looks)


def _away(looks: Sequence[Appearance], mean: Floats) -> Floats:
    """How far each image's mean embedding is from a mean (D,): (N,)."""
    found = []
    for first in range(0, len(looks), _AT_ONCE):
        some = np.stack([one.mean_embedding() for one in looks[first : first + _AT_ONCE]])
        found.append(_root_mean_square(some - mean))
    return np.concatenate(found)


def _root_mean_square(difference: Floats) -> Floats:
    """Over the last axis."""
    return np.asarray(np.sqrt(np.mean(np.square(difference), axis=-1)))
