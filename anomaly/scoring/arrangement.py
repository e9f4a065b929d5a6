"""How much of what lies where in an image: parts that are missing, surplus, swapped or wrong.

Patches are looked at coarsely and sorted into 32 kinds. Each quarter of an image has a histogram of
them; the four together are held against those of the training images by a Gaussian with a shrunk
covariance (Ledoit and Wolf, 2004). Why these numbers: `benchmarks/ACCURACY.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, as_numpy, like
from anomaly.errors import DataError, ModelError

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]

LEAST_IMAGES = 20  # of fewer, the farthest one says too little of others
_KINDS = 32
_DIMENSIONS = 64  # of the random projection in which patches are clustered
_SIDE = 16  # coarse patches along an image's shorter side, about
_SAMPLE, _ROUNDS = 15_000, 25  # of k-means
_STEEPNESS, _MOST = 2.0, 5.0
_TENSORS = ("projection", "centres", "examples", "histograms", "scale")
_PLACES = ("upper left", "upper right", "lower left", "lower right")


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The kinds of patches in the training images, and how many of each lie in which quarter.

    Attributes:
        projection: (D, d) float32.
        centres: (K, d) float32, of the kinds of coarse patches.
        examples: (K, 3) float32, the patch most like each: training image, x and y in percent.
        histograms: (n, 4·K) float32, of the training images.
        scale: (4,) float64, logarithms of cross-fitted scores: median and 95 % quantile of the
            patch scores, median and maximum of the histograms' distances. 0 before `joined`.
    """

    projection: Vectors
    centres: Vectors
    examples: Vectors
    histograms: Vectors
    scale: Floats

    @classmethod
    def of(
        cls, batches: Iterable[tuple[Sequence[int], Array, Array | None]], seed: int
    ) -> Arrangement:
        """Learn from good images.

        Args:
            batches: image numbers, embeddings (B, h, w, D), and (B, h, w) bool, the patches that
                count, None for all; the images ascend.
            seed: of the projection, the sample and the first centres.

        Raises:
            DataError: too few images.
        """
        rng = np.random.default_rng(seed)
        projection: Vectors | None = None
        coarse: dict[int, tuple[Vectors, Vectors]] = {}
        for images, embeddings, inside in batches:
            if projection is None:
                size = embeddings.shape[3], min(_DIMENSIONS, embeddings.shape[3])
                projection = np.linalg.qr(rng.standard_normal(size))[0].astype(np.float32)
            patches, weights = _coarse(embeddings, projection, inside)
            coarse.update(zip(images, zip(patches, weights, strict=True), strict=True))
        if projection is None or len(coarse) < LEAST_IMAGES:
            raise DataError(
                f"model.arrangement needs at least {LEAST_IMAGES} good images to learn how parts "
                f"are arranged; there are {len(coarse)}. Add images, or leave the setting out"
            )
        shown = [coarse[i] for i in sorted(coarse)]
        points = np.concatenate([patches[weights > 0] for patches, weights in shown])
        centres = _k_means(points[rng.permutation(len(points))[:_SAMPLE]], rng)
        histograms = np.stack([_histogram(*each, centres) for each in shown])
        return cls(projection, centres, _examples(shown, centres), histograms, np.zeros(4))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[np.generic]]) -> Arrangement:
        """The arrangement stored by `tensors`.

        Raises:
            ModelError: one is missing.
        """
        if tensors.keys() != set(_TENSORS):
            raise ModelError("arrangement.safetensors is damaged")
        return cls(**tensors)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        """The tensors to save in a model folder."""
        return {name: np.ascontiguousarray(getattr(self, name)) for name in _TENSORS}

    def joined(
        self, patch_scores: Sequence[float], places: Sequence[int], folds: Sequence[Sequence[int]]
    ) -> tuple[Arrangement, tuple[float, ...]]:
        """A copy scaled to patch scores, and the combined scores.

        Args:
            patch_scores: cross-fitted, of distinct training images.
            places: of these images among the histograms.
            folds: places that were held out together.
        """
        held_out = np.zeros(len(self.histograms))
        for fold in folds:
            rest = np.delete(self.histograms, fold, axis=0)
            held_out[list(fold)] = _distances(self.histograms[list(fold)], *_gaussian(rest))
        scores, away = np.log(patch_scores), np.log(held_out[list(places)])
        scale = [np.median(scores), np.quantile(scores, 0.95), np.median(away), away.max()]
        fitted = replace(self, scale=np.array(scale))
        return fitted, tuple(fitted._in_patch_units(np.exp(away)).clip(patch_scores).tolist())

    def judged(
        self, scores: Sequence[float], embeddings: Array, inside: Array | None, names: Sequence[str]
    ) -> tuple[list[float], list[str]]:
        """Image scores with the arrangement, and the part at fault.

        Args:
            scores: of the patches (B,).
            embeddings: (B, h, w, D).
            inside: (B, h, w) bool, the patches that count; None for all.
            names: of the training images, in order.

        Returns:
            Scores; and for each image that its arrangement raised above its patches' score, which
            part holds too much or too little of what; else an empty text.
        """
        patches, weights = _coarse(embeddings, self.projection, inside)
        shown = zip(patches, weights, strict=True)
        histograms = np.stack([_histogram(*each, self.centres) for each in shown])
        own = self._in_patch_units(_distances(histograms, *self._usual))
        texts = [
            self._text(histogram, names) if raised > score else ""
            for histogram, raised, score in zip(histograms, own, scores, strict=True)
        ]
        return np.maximum(own, scores).tolist(), texts  # NaN stays NaN

    @cached_property
    def _usual(self) -> tuple[Floats, Floats]:
        return _gaussian(self.histograms)

    def _in_patch_units(self, distances: Floats) -> Floats:
        """Distances as patch scores: the farthest training image's is as rare as 1 in 20.

        Those of usual images lie far below the median, so that patches alone order them.
        """
        middle, rare, median, farthest = self.scale
        slope = _STEEPNESS * (rare - middle) / max(farthest - median, 0.01)
        above = slope * (np.log(distances) - farthest)
        return np.asarray(np.exp(rare + np.minimum(above, _MOST)))

    def _text(self, histogram: Vectors, names: Sequence[str]) -> str:
        mean, precision = self._usual
        change = histogram - mean
        share = (change * (precision @ change)).reshape(4, -1)
        place, kind = np.unravel_index(int(share.argmax()), share.shape)
        much = "much" if change.reshape(4, -1)[place, kind] > 0 else "little"
        image, x, y = self.examples[kind].tolist()
        shown = names[int(image)] if int(image) < len(names) else f"training image {int(image)}"
        what = f"what {shown} shows at {x:.0f} % of its width, {y:.0f} % of its height"
        return f"{_PLACES[int(place)]}: too {much} of {what}"


def _coarse(
    embeddings: Array, projection: Vectors, inside: Array | None
) -> tuple[Vectors, Vectors]:
    """Coarse patches (B, h', w', d), projected, and the share of each that counts (B, h', w')."""
    fine = as_numpy(embeddings @ like(projection, embeddings))
    count = np.ones(fine.shape[:3], np.float32) if inside is None else as_numpy(inside)
    step = max(1, round(min(fine.shape[1:3]) / _SIDE))
    weights = _pooled(count.astype(np.float32)[..., None], step)
    patches = _pooled(fine * count[..., None], step) / np.maximum(weights, 1e-6)
    return patches.astype(np.float32), weights[..., 0]


def _pooled(maps: Vectors, step: int) -> Vectors:
    """Means over squares of patches (B, h // step, w // step, d)."""
    batch, height, width, channels = maps.shape
    rows, columns = height // step, width // step
    cut = maps[:, : rows * step, : columns * step]
    return np.asarray(cut.reshape(batch, rows, step, columns, step, channels).mean((2, 4)))


def _k_means(points: Vectors, rng: np.random.Generator) -> Vectors:
    """Centres (K, d); each first one is drawn by its squared distance to those before."""
    chosen = [int(rng.integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    for _ in range(min(_KINDS, len(points)) - 1):
        away = np.square(points - points[chosen[-1]]).sum(1, dtype=np.float64)
        nearest = np.minimum(nearest, away)
        total = nearest.sum()
        share = nearest / total if total > 0 else None
        chosen.append(int(rng.choice(len(points), p=share)))
    centres = points[chosen]
    for _ in range(_ROUNDS):
        kinds = _squared(points, centres).argmin(1)
        for kind in np.unique(kinds):
            centres[kind] = points[kinds == kind].mean(0)
    return centres


def _squared(points: Vectors, centres: Vectors) -> Floats:
    """Squared distances (N, K)."""
    products = (points @ centres.T).astype(np.float64)
    norms = np.square(centres).sum(1, dtype=np.float64)
    own = np.square(points).sum(1, dtype=np.float64)
    return np.asarray(own[:, None] - 2 * products + norms)


def _histogram(patches: Vectors, weights: Vectors, centres: Vectors) -> Vectors:
    """(4·K,): the share of each kind in each quarter; a middle row or column counts in both."""
    height, width, channels = patches.shape
    away = _squared(patches.reshape(-1, channels), centres)
    between = _squared(centres, centres) + np.diag(np.full(len(centres), np.inf))
    # A patch between two kinds counts for both, so that rounding moves no count.
    softness = max(float(np.median(between.min(1))) / 8, 1e-9)
    share = np.exp((away.min(1, keepdims=True) - away) / softness)
    share /= share.sum(1, keepdims=True)
    counts = share.astype(np.float32).reshape(height, width, -1) * weights[..., None]
    rows = (slice(0, (height + 1) // 2), slice(height // 2, height))
    columns = (slice(0, (width + 1) // 2), slice(width // 2, width))
    return np.concatenate([counts[r, c].mean((0, 1)) for r in rows for c in columns])


def _examples(shown: Sequence[tuple[Vectors, Vectors]], centres: Vectors) -> Vectors:
    best, examples = np.full(len(centres), np.inf), np.zeros((len(centres), 3), np.float32)
    for image, (patches, weights) in enumerate(shown):
        height, width, channels = patches.shape
        away = _squared(patches.reshape(-1, channels), centres)
        away[weights.ravel() == 0] = np.inf
        at, lowest = away.argmin(0), away.min(0)
        x, y = (at % width + 0.5) / width, (at // width + 0.5) / height
        places = np.stack([np.full(len(at), image), 100 * x, 100 * y], 1)
        examples[lowest < best] = places[lowest < best]
        best = np.minimum(best, lowest)
    return examples


def _gaussian(vectors: Vectors) -> tuple[Floats, Floats]:
    """Mean (p,) and precision (p, p) of vectors (n, p), their covariance shrunk."""
    values = vectors.astype(np.float64)
    count, size = values.shape
    mean = values.mean(0)
    values = values - mean
    covariance = values.T @ values / count
    scale = np.trace(covariance) / size
    spread = np.square(covariance - scale * np.eye(size)).sum()
    noise = (
        np.square(np.square(values).sum(1)).sum() / count - np.square(covariance).sum()
    ) / count
    share = min(1.0, max(noise, 0.0) / spread) if spread > 0 else 1.0
    shrunk = (1 - share) * covariance + (share * scale + 1e-9) * np.eye(size)
    return mean, np.linalg.inv(shrunk)


def _distances(vectors: Vectors, mean: Floats, precision: Floats) -> Floats:
    away = vectors - mean
    return np.asarray(np.sqrt(np.maximum(((away @ precision) * away).sum(1), 1e-18)))
