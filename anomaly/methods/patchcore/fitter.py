"""Good patches -> a memory bank: PatchCore's coreset, and what a config says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anomaly.methods.base import Align, Fitter, Fold, MatrixOf, PatchSet
from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.methods.patchcore.coreset import random_projection, select_streamed
from anomaly.methods.patchcore.embedding import ALIGNERS
from anomaly.methods.patchcore.held_out import banks_without, extended, gather, in_chunks, placed
from anomaly.methods.patchcore.nearest_centres import distances_to_nearest
from anomaly.runtime import Progress


def fitter(settings: Mapping[str, Any], *, seed: int) -> MemoryBankFitter:
    """The fitter of a config's section `model`.

    Args:
        settings: its values by key.
        seed: of the projection and the first pick.
    """
    return MemoryBankFitter(
        settings["coreset_ratio"],
        seed=seed,
        embedding=settings["embedding"],
        spacing_neighbours=settings["spacing_neighbours"],
    )


@dataclass(frozen=True)
class MemoryBankFitter(Fitter[MemoryBank]):
    """Settings of PatchCore.

    Attributes:
        coreset_ratio: share of the training patches that the bank keeps.
        projection_dim: dimensions in which the coreset is selected (PatchCore, section 3.2).
        seed: of the projection and the first pick.
        memory_limit: bytes of projected patches held at once, of 500,000 of 128 numbers. With
            more, the selection is nearly as good, see `select_streamed`, and reads their points
            twice more.
        embedding: how feature maps become embeddings, see `MemoryBank`.
        spacing_neighbours: of the bank's image scores, see `MemoryBank`.
        base: the bank that `fit` adds to; None where it makes one.
    """

    coreset_ratio: float = 0.1
    projection_dim: int = 128
    seed: int = 0
    memory_limit: int = 256 * 1024**2
    embedding: str = "sharp"
    spacing_neighbours: int = 0
    base: MemoryBank | None = None

    @property
    def align(self) -> Align:
        """Turn feature maps into the embeddings to learn from."""
        return ALIGNERS[self.embedding]

    @property
    def projected_by(self) -> MatrixOf:
        """The projection for selecting bank vectors."""
        return self.projection

    def projection(self, channels: int) -> Tensor:
        """The projection matrix (D, d) for the selection, with D = `channels`."""
        return self._drawn(channels)[0]

    def _drawn(self, channels: int) -> tuple[Tensor, torch.Generator]:
        """The projection, and the generator that goes on to draw what is selected by chance."""
        generator = torch.Generator().manual_seed(self.seed)
        return random_projection(channels, self.projection_dim, generator=generator), generator

    def fit(self, batches: PatchSet, progress: Progress | None = None) -> MemoryBank:
        """Choose the bank: one reading for the projections, another for the chosen vectors.

        Args:
            batches: good patches, of any grids.
            progress: called with (bank vectors selected, all of them).

        Raises:
            ConfigError: the coreset's ratio or size can't be had.
            DataError: no patches, or some that hold NaN or infinite values.
        """
        if self.base is not None:
            projection = self._projection_of(self.base)
            return extended(self.base, batches, projection=projection).spaced()
        matrix, generator = self._drawn(batches.channels)
        # Batches that are made in inference mode switch it on between them, but not at the end;
        # what is written to all along has to live in one mode.
        with torch.inference_mode():
            chosen = select_streamed(
                ProjectedPatches(batches, matrix),
                self.coreset_ratio,
                memory_limit=self.memory_limit,
                generator=generator,
                progress=progress,
            )
            vectors, origins = gather(batches, chosen.picks)
            bank = MemoryBank(
                vectors,
                origins,
                chosen.covering_radius,
                chosen.exact,
                embedding=self.embedding,
                spacing_neighbours=self.spacing_neighbours,
            )
            return bank.spaced()

    def held_out(
        self, scorer: MemoryBank, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, MemoryBank]]:
        """Banks without the images of one fold after another, each repaired, never fitted anew.

        One that was extended is repaired from the patches that it was extended by.
        """
        projection = self._projection_of(scorer)
        share, known = 1.0, 0
        if self.base is None:
            share = self.memory_limit / (4 * projection.shape[1] * patches.count)
        else:
            known = len(self.base.vectors)
            patches = patches.only(frozenset(image for fold in folds for image in fold))
        banks = banks_without(
            scorer, patches, folds, projection=projection, share=share, known=known
        )
        yield from zip(folds, banks, strict=True)

    def incremental(self, scorer: MemoryBank, learned: int) -> MemoryBankFitter:
        """A fitter whose `fit` adds vectors to a bank, see `MemoryBankFitter.base`."""
        return replace(self, base=scorer)

    def _projection_of(self, bank: MemoryBank) -> Tensor:
        return self.projection(bank.dimensions).to(bank.vectors.device)


@dataclass(frozen=True)
class ProjectedPatches:
    """The projected training patches, image by image; can be iterated repeatedly.

    Attributes:
        patches: of the training images.
        matrix: (D, d), the projection.
    """

    patches: PatchSet
    matrix: Tensor

    @property
    def count(self) -> int:
        """Number of points at most."""
        return self.patches.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return placed(self.patches.projected(self.matrix))

    def distances(self, centres: Tensor) -> Iterator[Tensor]:
        """Distances (n,) of each step's points to their nearest centre (K, d)."""
        for part in self.patches.each(partial(_distances, self.matrix, centres)):
            yield from part


def _distances(matrix: Tensor, centres: Tensor, patches: PatchSet) -> list[Tensor]:
    """Distances of points to their nearest centre, image by image."""
    with torch.inference_mode():
        pieces = list(patches.projected(matrix))
        nearest = [distances_to_nearest(p, centres) for p, _ in in_chunks(pieces)]
        lengths = [len(points) for _, points in pieces]
        return list(torch.split(torch.cat(nearest), lengths)) if nearest else []
