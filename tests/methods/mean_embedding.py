"""A method as someone else would write it: how far a patch is from the mean of all good ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.methods.base import Align, Fitter, PatchBatch, PatchScores, Scorer, check_tensors
from anomaly.methods.patchcore.embedding import patchcore_concat
from anomaly.runtime import Progress


@dataclass(frozen=True, eq=False)
class MeanEmbedding(Scorer):
    """The mean (D,) float32 of all good patches."""

    mean: Tensor
    unit = "distance to the mean"

    @property
    def align(self) -> Align:
        return patchcore_concat

    @property
    def dimensions(self) -> int:
        return len(self.mean)

    def score(self, embeddings: Tensor) -> PatchScores:
        return PatchScores(torch.linalg.vector_norm(embeddings - self.mean, dim=3))

    def to(self, target: torch.device | str) -> MeanEmbedding:
        return MeanEmbedding(self.mean.to(target))

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean}


@dataclass(frozen=True)
class MeanFitter(Fitter[MeanEmbedding]):
    """Learns nothing else, so it has no settings."""

    @property
    def align(self) -> Align:
        return patchcore_concat

    def fit(self, batches: Iterable[PatchBatch], progress: Progress | None = None) -> MeanEmbedding:
        sums = [(b.embeddings.flatten(0, 2).sum(0), b.embeddings[..., 0].numel()) for b in batches]
        if not sums:
            raise DataError("no training patches; check the training images")
        total = torch.stack([each for each, _ in sums]).sum(0)
        return MeanEmbedding(total / sum(count for _, count in sums))


def fitter(settings: Mapping[str, Any], *, seed: int) -> MeanFitter:
    return MeanFitter()


def scorer(tensors: dict[str, Tensor], settings: Mapping[str, Any]) -> MeanEmbedding:
    check_tensors(tensors, {"mean": (torch.float32, (-1,))})
    return MeanEmbedding(tensors["mean"])
