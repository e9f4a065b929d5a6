"""Ways from feature maps to patch scores, for `benchmarks.accuracy` to compare."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from anomaly.methods.base import PatchBatch, PatchSet
from anomaly.methods.patchcore.embedding import ALIGNERS
from anomaly.methods.patchcore.fitter import MemoryBankFitter
from benchmarks.feature_cache import ImageMaps, SetMaps


@dataclass(frozen=True)
class Variant:
    """One way from feature maps to scores; the defaults are those of configs/folder.yaml.

    Attributes:
        layers: digits of the hooked layers that are joined, 1 for the finest.
        embedding: how layers are joined, as `model.embedding`.
        power: what |x| of the maps' numbers x is raised to, signs kept.
        ratio: share of the patches in the bank.
        neighbours: mean distance of so many bank vectors.
        spacing: as `model.spacing_neighbours`.
        shots: training images, drawn by the seed; 0 for all.
        score: image score: `max`, `map` (maximum of the blurred map), `topP` (mean of the highest
            P % of the patch scores), `maptopP` (likewise of the blurred map), `relative` (as
            `map_top_relative`) or `relativeE` (over the image's median to the power of E).
        smoothing: σ in network pixels.
        halo: γ of the damped halo, of the map that pixel figures are of; 0 for none.
        border: δ of the damped border, of the patch scores that image scores are of; 0 for none.
    """

    layers: str = "23"
    embedding: str = "sharp"
    power: float = 1.0
    ratio: float = 0.02
    neighbours: int = 1
    spacing: int = 9
    shots: int = 0
    score: str = "maptop1"
    smoothing: float = 4.0
    halo: float = 0.5
    border: float = 0.2

    @property
    def distances(self) -> Variant:
        """What patch scores depend on; the rest is what is made of them."""
        default = Variant()
        made_of_scores = ("score", "smoothing", "halo", "border")
        same = replace(self, **{key: getattr(default, key) for key in made_of_scores})
        return same if self.spacing else replace(same, spacing=default.spacing)

    @property
    def embedding_alone(self) -> Variant:
        """What embeddings depend on."""
        return Variant(layers=self.layers, embedding=self.embedding, power=self.power)

    @property
    def maps(self) -> Variant:
        """What anomaly maps depend on."""
        default = Variant()
        return replace(self, score=default.score, border=default.border, spacing=default.spacing)

    @classmethod
    def parsed(cls, text: str) -> Variant:
        """From `key:value,key:value`.

        Raises:
            ValueError: an unknown key, or a value of another kind.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values = dict(part.split(":") for part in text.split(",") if part)
        if unknown := values.keys() - kinds.keys():
            raise ValueError(f"unknown {', '.join(unknown)}; there are {', '.join(kinds)}")
        return cls(**{key: kinds[key](value) for key, value in values.items()})


@dataclass(frozen=True, eq=False)
class TrainingPatches(PatchSet):
    """Patch embeddings (h, w, D) of the training images; re-iterable."""

    embeddings: Sequence[Tensor]

    @property
    def count(self) -> int:
        return sum(one[..., 0].numel() for one in self.embeddings)

    def __iter__(self) -> Iterator[PatchBatch]:
        for i, embedded in enumerate(self.embeddings):
            yield PatchBatch(embedded[None], (i,))


@lru_cache(maxsize=1)
def _embedded(
    images: SetMaps, variant: Variant, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Patch embeddings of the training and the test images, kept for the next variant."""
    train, test = (
        [embeddings(image, variant, device) for image in part]
        for part in (images.train, images.test)
    )
    return train, test


def embeddings(image: ImageMaps, variant: Variant, device: torch.device) -> Tensor:
    """Patch embeddings (h, w, D) float32 of an image."""
    maps = [image.maps[int(layer) - 1][None].to(device).float() for layer in variant.layers]
    if variant.power != 1:
        maps = [m.sign() * m.abs() ** variant.power for m in maps]
    return ALIGNERS[variant.embedding](maps)[0]


def patch_scores(
    images: SetMaps, variant: Variant, seed: int, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Each test image's patch scores (h, w), for the map and for the image score; and the seconds.

    The seconds are those that selecting the bank and searching it took.
    """
    train, test = _embedded(images, variant.embedding_alone, device)
    if variant.shots:
        train = random.Random(seed).sample(train, min(variant.shots, len(train)))
    fitter = MemoryBankFitter(
        variant.ratio,
        seed=seed,
        embedding=variant.embedding,
        spacing_neighbours=variant.spacing,
    )
    start = time.perf_counter()
    bank = fitter.fit(TrainingPatches(train))
    with torch.inference_mode():
        scores = []
        for queries in test:
            if variant.neighbours == 1:
                patches = bank.score(queries[None])
                scores.append((patches.scores[0].cpu(), bank.weighted(patches)[0].cpu()))
            else:
                away, _ = bank.neighbours(queries.flatten(0, 1), variant.neighbours)
                scores.append((away.mean(1).view(queries.shape[:2]).cpu(),) * 2)
    return scores, time.perf_counter() - start
