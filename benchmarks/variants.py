"""Ways from feature maps to patch scores, for `benchmarks.accuracy` to compare."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from anomaly.scorers.patchcore.fitter import MemoryBankFitter
from anomaly.scorers.patchcore.memory_bank import ALIGNERS
from anomaly.scorers.patches import PatchBatch, PatchSet
from anomaly.scorers.subspace.fitter import PatchSubspace, SubspaceFitter
from benchmarks.feature_cache import Seen, SeenSet


@dataclass(frozen=True)
class Variant:
    """One way from feature maps to scores.

    Attributes:
        kind: the method, `patchcore` or `subspace`.
        share: of the variance that a subspace keeps.
        layers: digits of the layers that are joined, of 1, 2 and 3; with `+`, each group has a bank
            of its own and scores are averaged, each in units of its median; with `|`, finest first,
            each has one on its own grid, coarser ones of plain means, and distances are added.
        dims: principal components that are kept; 0 keeps the embeddings as they are.
        power: components are divided by their standard deviation to this power.
        ratio: share of the patches in the bank.
        neighbours: mean distance of so many bank vectors.
        score: image score: `max`, `map` (maximum of the blurred map), `topP` (mean of the highest
            P % of the patch scores) or `maptopP` (likewise of the blurred map).
        smoothing: σ in network pixels.
        halo: γ of the damped halo, of the map that pixel figures are of; 0 for none.
        border: δ of the damped border, of the patch scores that image scores are of; 0 for none.
        embedding: how layers are joined, as `model.embedding`, unless `finest` says it; a
            subspace has plain means.
        weight: what the coarsest layer is multiplied by.
        finest: the layer whose grid the embeddings have; finer maps are averaged down to it. 0 for
            the finest of those joined.
        compress: what numbers x of the embeddings become: `sqrt`, `asinh` of x over their mean
            absolute value in the training set (`asinh12`: over twelve times that, `asinh_image`:
            over that of the image), or `unit` vectors.
        shots: training images of PatchCore, drawn by the seed; 0 for all.
    """

    kind: str = "patchcore"
    share: float = 0.95
    layers: str = "23"
    dims: int = 0
    power: float = 0.0
    ratio: float = 0.1
    neighbours: int = 1
    score: str = "maptop1"
    smoothing: float = 4.0
    halo: float = 0.5
    border: float = 0.35
    embedding: str = "sharp"
    weight: float = 1.0
    finest: int = 0
    compress: str = ""
    shots: int = 0

    @property
    def joining(self) -> Variant:
        """What embeddings depend on before anything is done to their numbers."""
        how = "concat" if self.kind == "subspace" else self.embedding
        return Variant(layers=self.layers, finest=self.finest, weight=self.weight, embedding=how)

    @property
    def distances(self) -> Variant:
        """What distances depend on."""
        others = Variant()
        return replace(
            self,
            score=others.score,
            smoothing=others.smoothing,
            halo=others.halo,
            border=others.border,
        )


class Embedded:
    """A set's patches as a variant embeds them."""

    def __init__(self, images: SeenSet, variant: Variant) -> None:
        self._known = _all_joined(images, variant.joining)
        self._how = variant.compress
        means = [float(self._known[one.name].abs().mean()) for one in images.train]
        self._mean = statistics.fmean(means)
        self.basis: Tensor | None = None
        if variant.dims:
            self.basis = _basis(images, variant)

    def of(self, one: Seen) -> Tensor:
        """(h, w, D) float32."""
        joined = _compressed(self._known[one.name], self._how, self._mean)
        if self.basis is not None:
            joined = joined @ self.basis
        return joined


def _compressed(x: Tensor, how: str, mean: float) -> Tensor:
    if how == "sqrt":
        return x.sign() * x.abs().sqrt()
    if how == "unit":
        return F.normalize(x, dim=-1)
    if how == "asinh_image":
        return torch.asinh(x / x.abs().mean())
    return torch.asinh(x / mean / float(how.removeprefix("asinh") or 1)) if how else x


@lru_cache(maxsize=1)
def _all_joined(images: SeenSet, variant: Variant) -> dict[str, Tensor]:
    return {one.name: _joined(one, variant) for one in [*images.train, *images.test]}


def _joined(one: Seen, variant: Variant) -> Tensor:
    maps = [one.maps[int(layer) - 1][None].float() for layer in variant.layers]
    maps[-1] = maps[-1] * variant.weight
    if variant.finest:
        grid = one.maps[variant.finest - 1].shape[1:]
        pooled = [F.avg_pool2d(m, 3, stride=1, padding=1) for m in maps]
        resized = [
            F.adaptive_avg_pool2d(m, grid)
            if m.shape[2] > grid[0]
            else F.interpolate(m, grid, mode="bilinear", align_corners=False)
            for m in pooled
        ]
        return torch.cat(resized, 1)[0].permute(1, 2, 0)
    return ALIGNERS[variant.embedding](maps)[0]


@lru_cache(maxsize=4)
def _spectrum(images: SeenSet, variant: Variant) -> tuple[Tensor, Tensor]:
    total, mean, count = torch.zeros(()), torch.zeros(()), 0
    known = _all_joined(images, variant)
    for one in images.train:
        flat = known[one.name].flatten(0, 1)
        total, mean, count = total + flat.T @ flat, mean + flat.sum(0), count + len(flat)
    covariance = (total / count).double() - torch.outer(mean / count, mean / count).double()
    values, vectors = torch.linalg.eigh(covariance)
    return values.flip(0).clamp_min(1e-12), vectors.flip(1)


def _basis(images: SeenSet, variant: Variant) -> Tensor:
    values, vectors = _spectrum(images, variant.joining)
    scale = values[: variant.dims].sqrt() ** -variant.power
    return (vectors[:, : variant.dims] * (scale / scale[0])).float()


@dataclass(frozen=True, eq=False)
class _Patches(PatchSet):
    """The training patches, image by image; re-iterable."""

    images: Sequence[Seen]
    embed: Embedded

    def __iter__(self) -> Iterator[PatchBatch]:
        for i, one in enumerate(self.images):
            yield PatchBatch(self.embed.of(one)[None], (i,))


@lru_cache(maxsize=1)
def _subspace(images: SeenSet, variant: Variant) -> PatchSubspace:
    """Its sums are those of any share of the variance."""
    return SubspaceFitter().fit(_Patches(images.train, Embedded(images, variant)))


def patch_scores(images: SeenSet, variant: Variant, seed: int) -> tuple[list[Tensor], float]:
    """Patch scores (h, w) of each test image, and the seconds that bank and search took."""
    if "+" in variant.layers:
        parts = [
            patch_scores(images, replace(variant, layers=layers), seed)
            for layers in variant.layers.split("+")
        ]
        usual = [torch.cat([one.flatten() for one in scores]).median() for scores, _ in parts]
        joined = [
            torch.stack([s / u for s, u in zip(every, usual, strict=True)]).mean(0)
            for every in zip(*(scores for scores, _ in parts), strict=True)
        ]
        return joined, sum(seconds for _, seconds in parts)
    if "|" in variant.layers:
        finest, *coarser = variant.layers.split("|")
        found, seconds = patch_scores(images, replace(variant, layers=finest), seed)
        for layers in coarser:
            own = replace(variant, layers=layers, embedding="concat")
            more, spent = patch_scores(images, own, seed)
            found = [s + _on_grid(m, s.shape) for s, m in zip(found, more, strict=True)]
            seconds += spent
        return found, seconds
    started = time.perf_counter()
    embed, train = Embedded(images, variant), images.train
    if variant.shots:
        train = random.Random(seed).sample(train, min(variant.shots, len(train)))

    if variant.kind == "subspace":
        subspace = _subspace(images, replace(variant, share=Variant().share))
        subspace = replace(subspace, basis=subspace.statistics.axes(variant.share, None))
        found = [subspace.score(embed.of(one)[None]).scores[0] for one in images.test]
        return found, time.perf_counter() - started
    bank = MemoryBankFitter(variant.ratio, seed=seed).fit(_Patches(train, embed))
    found = []
    with torch.inference_mode():
        for one in images.test:
            patches = embed.of(one)
            away, _ = bank.neighbours(patches.flatten(0, 1), variant.neighbours)
            found.append(away.mean(1).view(patches.shape[:2]))
    return found, time.perf_counter() - started


def _on_grid(scores: Tensor, grid: Sequence[int]) -> Tensor:
    """Patch scores (h, w) on a finer grid."""
    return F.interpolate(scores[None, None], tuple(grid), mode="bilinear", align_corners=False)[
        0, 0
    ]


def forget() -> None:
    """Drop what is kept of a data set from one variant to the next."""
    for kept in (_spectrum, _subspace, _all_joined):
        kept.cache_clear()
