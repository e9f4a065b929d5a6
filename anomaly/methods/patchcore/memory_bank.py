"""PatchCore (Roth et al. 2022): a memory bank of good patches, and the distance to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from anomaly.errors import DataError
from anomaly.methods.base import Align, PatchBatch, PatchSet, Scorer
from anomaly.methods.patchcore.bank import Bank, check_bank
from anomaly.methods.patchcore.embedding import ALIGNERS
from anomaly.methods.patchcore.search import NearestNeighbors
from anomaly.runtime.parallel import locked_cached_property

# Bank vectors that a graph compares patches with at once: 16 MiB for an image of 1024 patches.
_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class MemoryBank(Bank, Scorer):
    """Good patches, and where each came from.

    Attributes:
        vectors: (M, D) float32, in the order in which they were picked.
        origins: (M, 3) int32: training image, patch row, patch column. Rows from 65,536 on are of
            turned copies, see `anomaly.imaging.loading`.
        covering_radius: no training patch is farther than this from its nearest bank vector,
            among the projected embeddings that the coreset was selected on.
        exact: the selection saw all training patches at once, not a part at a time.
        search: how neighbours are found, see `NearestNeighbors`.
        cache: folder for what an approximate search has to train first; it can be deleted.
        embedding: how feature maps become embeddings: `sharp`, `concat` or `adaptive`, see
            `anomaly.methods.patchcore.embedding`.
        reweighting: b, bank vectors that the re-weighted image score looks at.
        spacing_neighbours: how many neighbours of each vector `spacing` is the mean distance to; 0
            for none.
        spacing: (M,) float32, see `Bank`; None before `spaced`, or without neighbours.
    """

    vectors: Tensor
    origins: Tensor
    covering_radius: float
    exact: bool = True
    search: str = "exact"
    cache: Path | None = None
    embedding: str = "sharp"
    reweighting: int = 3
    spacing_neighbours: int = 0
    spacing: Tensor | None = None

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings that `score` takes."""
        return ALIGNERS[self.embedding]

    @locked_cached_property
    def _neighbours(self) -> NearestNeighbors:
        return NearestNeighbors(self.vectors, self.search, self.cache)

    def only(self, rows: Tensor) -> MemoryBank:
        """The bank of some of its vectors (m,) int64; their index comes from this one's."""
        spacing = None if self.spacing is None else self.spacing[rows]
        part = replace(
            self,
            vectors=self.vectors[rows],
            origins=self.origins[rows],
            spacing=spacing,
            exact=False,
        )
        if self.search == "exact":
            # As if the property had made it, which `replace` forgets.
            vars(part)["_neighbours"] = self._neighbours.only(part.vectors, rows)
        return part

    def spaced(self, rows: Tensor | None = None) -> MemoryBank:
        """The same bank, which knows its `spacing`.

        Args:
            rows: (m,) int64, vectors whose spacing is found anew; None for all.
        """
        count = min(self.spacing_neighbours, len(self.vectors) - 1)
        if count < 1:
            return replace(self, spacing=None)
        known = None if rows is None else self.spacing
        vectors = self.vectors if rows is None or known is None else self.vectors[rows]
        distances, _ = self.neighbours(vectors, count + 1)
        apart = distances[:, 1:].mean(1)  # the first is the vector itself
        if rows is not None and known is not None:
            apart = known.index_copy(0, rows, apart)
        same = replace(self, spacing=apart)
        vars(same)["_neighbours"] = self._neighbours
        return same

    def evidence(self, patches: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The training patches of the bank vectors nearest to patches.

        Args:
            patches: (N, D) float32, on the bank's device.
            count: K, how many for each.

        Returns:
            Distances (N, K) float32, ascending, and origins (N, K, 3) int32.
        """
        distances, nearest = self.neighbours(patches, count)
        return distances, self.origins[nearest]

    def graph(self) -> _BankGraph:
        """`score` as a module that can be traced."""
        return _BankGraph(self.vectors)

    def to(self, target: torch.device | str) -> MemoryBank:
        """The same bank on another device."""
        vectors, origins = self.vectors.to(target), self.origins.to(target)
        spacing = None if self.spacing is None else self.spacing.to(target)
        return replace(self, vectors=vectors, origins=origins, spacing=spacing)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name."""
        spacing = {} if self.spacing is None else {"spacing": self.spacing}
        return spacing | {
            "vectors": self.vectors,
            "origins": self.origins,
            "covering_radius": torch.tensor(self.covering_radius, dtype=torch.float64),
            "exact": torch.tensor(self.exact),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> MemoryBank:
        """The way back from `tensors`.

        Raises:
            ModelError: they aren't those of a memory bank.
        """
        check_bank(tensors)
        radius = float(tensors["covering_radius"])
        bank = cls(tensors["vectors"], tensors["origins"], radius, bool(tensors["exact"]))
        return replace(bank, spacing=tensors.get("spacing"))


def gather(patches: PatchSet, places: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings and origins of some patches.

    Args:
        patches: of the training images.
        places: (M, 2) int64: training image, and which of its patches that count.

    Returns:
        (M, D) float32 and (M, 3) int32, in the order of `places`.

    Raises:
        DataError: the images have fewer patches than they had.
    """
    vectors: Tensor | None = None
    origins = torch.empty(len(places), 3, dtype=torch.int32, device=places.device)
    missing = len(places)
    for part in patches.each(partial(_gathered, places.cpu())):
        while part:  # what is copied goes, so that nothing is there twice
            rows, embeddings, where = part.pop()
            if vectors is None:
                vectors = embeddings.new_empty(
                    len(places), embeddings.shape[1], device=places.device
                )
            rows = rows.to(places.device)
            vectors[rows], origins[rows] = embeddings.to(places.device), where.to(places.device)
            missing -= len(rows)
    if vectors is None or missing:
        raise DataError("the training patches changed while they were read; train again")
    return vectors, origins


def _gathered(places: Tensor, patches: PatchSet) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Which of the places some images have, with their embeddings and origins; see `gather`."""
    order = places[:, 0].argsort(stable=True)
    images, ranks = places[order].T.contiguous()
    seen: dict[int, int] = {}
    gathered = []
    for batch in patches:
        height, width = batch.embeddings.shape[1:3]
        corners = batch.corners or ((0, 0),) * len(batch.images)
        for i, image in enumerate(batch.images):
            counted = torch.arange(height * width)
            if batch.inside is not None:
                counted = batch.inside[i].flatten().nonzero()[:, 0].cpu()
            first = seen.get(image, 0)
            seen[image] = first + len(counted)
            wanted = slice(*torch.searchsorted(images, torch.tensor([image, image + 1])).tolist())
            here = (ranks[wanted] >= first) & (ranks[wanted] < seen[image])
            cells = counted[ranks[wanted][here] - first]
            inner = torch.stack([cells // width, cells % width], 1)
            start = torch.tensor([image, *corners[i]])
            origins = start + torch.cat([torch.zeros_like(cells)[:, None], inner], 1)
            vectors = batch.embeddings[i].flatten(0, 1)[cells.to(batch.embeddings.device)]
            gathered.append((order[wanted][here], vectors, origins.int()))
    return gathered


def gather_origins(batches: Iterable[PatchBatch], origins: Tensor) -> Tensor:
    """Embeddings of the patches at some places.

    Args:
        batches: the patches of all images, read once.
        origins: (M, 3): image, patch row, patch column.

    Returns:
        (M, D) float32, in the order of `origins`.

    Raises:
        DataError: the batches don't hold all of them.
    """
    vectors: Tensor | None = None
    missing = torch.ones(len(origins), dtype=torch.bool, device=origins.device)
    for batch in batches:
        size = torch.tensor(batch.embeddings.shape[1:3], device=origins.device)
        corners = batch.corners or ((0, 0),) * len(batch.images)
        for grid, image, corner in zip(batch.embeddings, batch.images, corners, strict=True):
            if vectors is None:
                vectors = grid.new_empty(len(origins), grid.shape[-1])
            places = origins[:, 1:] - torch.tensor(corner, device=origins.device)
            here = (origins[:, 0] == image) & ((places >= 0) & (places < size)).all(1)
            rows, columns = places[here].long().T
            vectors[here] = grid[rows, columns]
            missing &= ~here
    if vectors is None or bool(missing.any()):
        raise DataError(
            f"{int(missing.sum())} vectors of the memory bank come from patches that the training "
            "images don't have; train again"
        )
    return vectors


class _BankGraph(nn.Module):
    """Patch embeddings -> the distance to the nearest bank vector, and which one it is.

    The search as plain reductions, for programs that know nothing of this one. The bank goes by in
    blocks, so that memory doesn't grow with it. Products name the nearest vector; its distance is
    then measured directly, which cancels nothing.

    Args:
        vectors: the bank (M, D) float32.
    """

    centre: Tensor
    vectors: Tensor
    squares: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        # Around their mean, products lose fewer digits.
        self.register_buffer("centre", vectors.mean(0))
        self.register_buffer("vectors", vectors - self.centre)
        self.register_buffer("squares", self.vectors.square().sum(1))

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, h, w) float32 and nearest vectors (B, h, w) int64 of (B, h, w, D)."""
        patches, count = embeddings - self.centre, len(self.vectors)
        least, nearest = self._nearest(patches, 0)
        for start in range(_BLOCK, count, _BLOCK):
            values, place = self._nearest(patches, start)
            nearest = torch.where(values < least, place, nearest)
            least = torch.minimum(values, least)
        nearest = nearest.clamp(max=count - 1)  # of NaN none is the nearest
        difference = patches - self.vectors[nearest]
        return difference.square().sum(-1).sqrt(), nearest

    def _nearest(self, patches: Tensor, start: int) -> tuple[Tensor, Tensor]:
        block = slice(start, min(start + _BLOCK, len(self.vectors)))
        # ‖x − y‖² without ‖x‖², which is the same for all y.
        values = self.squares[block] - 2 * (patches @ self.vectors[block].T)
        least = values.amin(-1)
        places = torch.arange(block.start, block.stop, device=patches.device)
        beyond = torch.full_like(places, len(self.vectors))
        return least, torch.where(values <= least[..., None], places, beyond).amin(-1)
