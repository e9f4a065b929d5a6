"""What an image looks like as a whole: its light, its detail, and the mean of its embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, as_numpy, module_of
from anomaly.imaging.loading import NetworkInput

Floats = NDArray[np.float64]

_QUIET = 0.02  # contrast, below which a ratio to it means nothing
# Brightness that differs less, all over an image, is one value and the rounding of resizing it.
_BLANK = 1e-4
# Of one picture's mean embeddings in batches of different sizes, relative to their size.
_ROUNDING = 1e-3


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
    return bool(np.linalg.norm(one - other) <= _ROUNDING * np.linalg.norm(one))


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
