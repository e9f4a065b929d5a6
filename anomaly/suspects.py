"""The training images that look least like the others: perhaps a defect among the good ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.embedding import TrainingPatches
from anomaly.scorers.base import PatchBatch, Scorer
from anomaly.scorers.coreset import random_projection
from anomaly.scorers.memory_bank import MemoryBank

COUNT = 5
_QUERIES = 4096
_DIMENSIONS = 128
_BLOCK = 1 << 24


@dataclass(frozen=True, eq=False)
class Suspect:
    """A training image that differs from the others.

    Attributes:
        image: its index.
        score: the highest of its patch scores by what was learned from the others alone.
        patch_scores: (h, w) float32; NaN doesn't count. With tiles, the mosaic of their patches.
    """

    image: int
    score: float
    patch_scores: NDArray[np.float32]


def find_suspects(scorer: Scorer, patches: TrainingPatches) -> list[Suspect]:
    """The most suspicious training images, the worst first.

    A memory bank holds an image's own patches, a defect's above all, so its patches are compared
    with the vectors of the other images only. A Gaussian has learned from its own outliers, too,
    but from all others as well, so that they still stand out.

    Args:
        scorer: what was learned.
        patches: of the training images it was learned from, once read.
    """
    with torch.inference_mode():
        if isinstance(scorer, MemoryBank):
            found = [_against_others(scorer, patches, i) for i in _outstanding(scorer)]
        else:
            found = _worst(scorer, patches)
    return sorted(found, key=lambda s: -s.score)[:COUNT]


def _outstanding(bank: MemoryBank) -> list[int]:
    """Images with the bank vectors that are farthest from all other images' vectors.

    Greedy k-center picks outliers first, so the first vectors are enough to ask about; and a
    random projection is precise enough for a first choice.
    """
    matrix = random_projection(
        bank.vectors.shape[1], _DIMENSIONS, generator=torch.Generator().manual_seed(0)
    ).to(bank.vectors)
    points, images = bank.vectors @ matrix, bank.origins[:, 0]
    lonely: dict[int, float] = {}
    step = max(1, _BLOCK // len(points))
    for start in range(0, min(len(points), _QUERIES), step):
        queries = slice(start, min(start + step, _QUERIES))
        nearest = _to_others(points[queries], images[queries], points, images)
        for image, distance in zip(images[queries].tolist(), nearest.tolist(), strict=True):
            lonely[image] = max(distance, lonely.get(image, 0.0))
    return sorted(lonely, key=lambda image: -lonely[image])[: 2 * COUNT]


def _to_others(queries: Tensor, own: Tensor, points: Tensor, images: Tensor) -> Tensor:
    """Distance of each query (n, D) to the nearest point of another image, (n,)."""
    distances = torch.cdist(queries, points)
    return distances.masked_fill_(own[:, None] == images, torch.inf).amin(1)


def _against_others(bank: MemoryBank, patches: TrainingPatches, image: int) -> Suspect:
    others = bank.vectors[bank.origins[:, 0] != image]
    if not len(others):
        others = bank.vectors
    step = max(1, _BLOCK // len(others))

    def scores(batch: PatchBatch) -> Tensor:
        flat = batch.embeddings.flatten(0, 2)
        nearest = torch.cat([torch.cdist(part, others).amin(1) for part in torch.split(flat, step)])
        return nearest.view(batch.embeddings.shape[:3])

    return _suspect(image, patches, ((b, scores(b)) for b in patches.only({image})))


def _worst(scorer: Scorer, patches: TrainingPatches) -> list[Suspect]:
    highest: dict[int, float] = {}
    for batch in patches:
        scores = _counted(batch, scorer.score(batch.embeddings).scores)
        for image, one in zip(batch.images, scores, strict=True):
            highest[image] = max(float(one.nan_to_num(nan=0).amax()), highest.get(image, 0.0))
    worst = sorted(highest, key=lambda image: -highest[image])[:COUNT]
    return [
        _suspect(
            image,
            patches,
            ((b, scorer.score(b.embeddings).scores) for b in patches.only({image})),
        )
        for image in worst
    ]


def _counted(batch: PatchBatch, scores: Tensor) -> Tensor:
    return scores if batch.inside is None else scores.masked_fill(~batch.inside, torch.nan)


def _suspect(
    image: int, patches: TrainingPatches, scored: Iterable[tuple[PatchBatch, Tensor]]
) -> Suspect:
    """One image's patch scores, put together from its tiles where it has any."""
    rows, columns = (len(pieces) for pieces in patches.views[image].axes)
    mosaic: NDArray[np.float32] | None = None
    for batch, scores in scored:
        height, width = scores.shape[1:]
        if mosaic is None:
            mosaic = np.full((rows * height, columns * width), np.nan, np.float32)
        corners = batch.corners or ((0, 0),) * len(scores)
        for (top, left), one in zip(corners, _counted(batch, scores).cpu().numpy(), strict=True):
            mosaic[top : top + height, left : left + width] = one
    assert mosaic is not None
    return Suspect(image, float(np.nanmax(mosaic)), mosaic)
