"""PatchCore (Roth et al. 2022): a memory bank of good patches, and the distance to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from anomaly.errors import ConfigError, DataError
from anomaly.scorers.base import PatchBatch, PatchScores, Progress, check_tensors, leading
from anomaly.scorers.patchcore.coreset import coreset_size, random_projection
from anomaly.scorers.patchcore.search.neighbors import NearestNeighbors
from anomaly.scorers.patchcore.streamed_coreset import select_streamed


@dataclass(frozen=True, eq=False)
class MemoryBank:
    """Good patches, and where each came from.

    Attributes:
        vectors: (M, D) float32, in the order in which they were picked.
        origins: (M, 3) int32: training image, patch row, patch column.
        covering_radius: no training patch is farther than this from its nearest bank vector,
            among the projected embeddings that the coreset was selected on.
        exact: the selection saw all training patches at once, not a part at a time.
        search: how neighbours are found, see `NearestNeighbors`.
        cache: folder for what an approximate search has to train first; it can be deleted.
    """

    vectors: Tensor
    origins: Tensor
    covering_radius: float
    exact: bool = True
    search: str = "auto"
    cache: Path | None = None

    @cached_property
    def _neighbours(self) -> NearestNeighbors:
        return NearestNeighbors(self.vectors, self.search, self.cache)

    def score(self, embeddings: Tensor) -> PatchScores:
        """The distance of each patch to its nearest bank vector (PatchCore, section 3.3).

        Differentiable in the embeddings.

        Args:
            embeddings: (B, h, w, D) float32, on the bank's device.

        Raises:
            DataError: another number of channels than the bank has.
        """
        self._check(embeddings)
        shape = embeddings.shape[:3]
        distances, found = self._neighbours.search(embeddings.reshape(-1, embeddings.shape[3]))
        return PatchScores(distances.view(shape), found.view(shape))

    def neighbours(self, patches: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The bank vectors nearest to patches.

        Args:
            patches: (N, D) float32, on the bank's device.
            count: K, vectors for each.

        Returns:
            Distances (N, K) float32, ascending, and indices (N, K) int64.
        """
        return self._neighbours.search(patches, count)

    def reweighted(self, embeddings: Tensor, scores: PatchScores, neighbours: int) -> Tensor:
        """The paper's image score (PatchCore, eq. 6 and 7).

        The highest patch score s* of an image, at patch m_test with nearest bank vector m*, is
        weighed by 1 − exp(‖m_test − m*‖) / Σ exp(‖m_test − m‖), the sum over m* and the vectors
        of the bank that are nearest to it: a patch whose nearest vector is itself a rare one
        among good patches scores higher.

        Args:
            embeddings: (B, h, w, D), those that were scored.
            scores: what `score` said about them.
            neighbours: b, vectors in the sum, with m*. 1 leaves a weight of 0, so at least 2.

        Returns:
            (B,) float32, in score units.

        Raises:
            ConfigError: fewer than 2 neighbours.
        """
        if neighbours < 2:
            raise ConfigError(f"image-score neighbours must be at least 2, not {neighbours}")
        if scores.nearest is None:
            raise ValueError("scores name no bank vectors; take those of this bank's score()")
        if len(self.vectors) == 1:
            return scores.scores.flatten(1).amax(1)
        highest, at = scores.scores.flatten(1).max(1)
        images = torch.arange(len(at), device=at.device)
        patches = embeddings.flatten(1, 2)[images, at]
        centre = scores.nearest.flatten(1)[images, at]
        group = self._neighbours.search(self.vectors[centre], neighbours)[1]
        distances = torch.linalg.vector_norm(self.vectors[group] - patches[:, None], dim=2)
        # Duplicates may push m* out of its own group, so its distance is the numerator's alone.
        share = torch.exp(highest - torch.logsumexp(distances, 1))
        return highest * (1 - share).clamp(min=0)

    def to(self, target: torch.device | str) -> MemoryBank:
        """The same bank on another device."""
        return MemoryBank(
            self.vectors.to(target),
            self.origins.to(target),
            self.covering_radius,
            self.exact,
            self.search,
            self.cache,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name."""
        return {
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
        count = leading(tensors, "origins")
        check_tensors(
            tensors,
            {
                "origins": (torch.int32, (-1, 3)),
                "vectors": (torch.float32, (count, -1)),
                "covering_radius": (torch.float64, ()),
                "exact": (torch.bool, ()),
            },
        )
        radius = float(tensors["covering_radius"])
        return cls(tensors["vectors"], tensors["origins"], radius, bool(tensors["exact"]))

    def _check(self, embeddings: Tensor) -> None:
        if embeddings.shape[3] != self.vectors.shape[1]:
            raise DataError(
                f"embeddings have {embeddings.shape[3]} channels where the memory bank's have "
                f"{self.vectors.shape[1]}; use the backbone and layers it was made with"
            )


@dataclass(frozen=True)
class MemoryBankFitter:
    """Settings of PatchCore.

    Attributes:
        coreset_ratio: share of the training patches that the bank keeps; None with coreset_size.
        coreset_size: how many it keeps; None with coreset_ratio.
        projection_dim: dimensions in which the coreset is selected (PatchCore, section 3.2).
        seed: of the projection and the first pick.
        memory_limit: bytes of projected patches held at once. With more, the selection is nearly
            as good, see `select_streamed`, and reads the batches a third time.
    """

    coreset_ratio: float | None = 0.1
    coreset_size: int | None = None
    projection_dim: int = 128
    seed: int = 0
    memory_limit: int = 256 * 1024**2

    def fit(self, batches: Iterable[PatchBatch], progress: Progress | None = None) -> MemoryBank:
        """Choose the bank: one reading for the projections, another for the chosen vectors.

        Args:
            batches: good patches, of any grids. Read twice, the same each time.
            progress: called with (bank vectors selected, all of them).

        Raises:
            ConfigError: the coreset's ratio or size can't be had.
            DataError: no patches, or some that hold NaN or infinite values.
        """
        generator = torch.Generator().manual_seed(self.seed)
        # Batches that are made in inference mode switch it on between them, but not at the end;
        # what is written to all along has to live in one mode.
        with torch.inference_mode():
            chosen = select_streamed(
                _Projected(batches, self.projection_dim, generator),
                self._size,
                memory_limit=self.memory_limit,
                generator=generator,
                progress=progress,
            )
            vectors, origins = gather(batches, chosen.picks)
        return MemoryBank(vectors, origins, chosen.covering_radius, chosen.exact)

    def projection(self, channels: int) -> Tensor:
        """(D, d), what embeddings with D = `channels` are multiplied by for the selection."""
        generator = torch.Generator().manual_seed(self.seed)
        return random_projection(channels, self.projection_dim, generator=generator)

    def _size(self, patches: int) -> int:
        if patches == 0:
            raise DataError("no training patches; check the training images")
        return coreset_size(patches, ratio=self.coreset_ratio, size=self.coreset_size)


class _Projected:
    """The patches of each image in turn, projected; re-iterable."""

    def __init__(self, batches: Iterable[PatchBatch], dim: int, generator: torch.Generator) -> None:
        self._batches = batches
        self._dim = dim
        self._generator = generator
        self._matrix: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._batches:
            if self._matrix is None:
                channels = batch.embeddings.shape[3]
                matrix = random_projection(channels, self._dim, generator=self._generator)
                self._matrix = matrix.to(batch.embeddings.device)
            # One image at a time: a product's rounding depends on its shape, and which images
            # share a batch must not change the bank.
            for i, image in enumerate(batch.embeddings.flatten(1, 2)):
                counted = image if batch.inside is None else image[batch.inside[i].flatten()]
                yield counted @ self._matrix


def gather(batches: Iterable[PatchBatch], picks: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings and origins of the patches `picks`, counted through all batches.

    Args:
        batches: the batches that were selected from.
        picks: (M,) int64.

    Returns:
        (M, D) float32 and (M, 3) int32, in the order of `picks`.
    """
    ascending, places = picks.sort()
    vectors: Tensor | None = None
    origins = torch.empty(len(picks), 3, dtype=torch.int32, device=picks.device)
    start = 0
    for batch in batches:
        images, height, width, dim = batch.embeddings.shape
        if vectors is None:
            vectors = batch.embeddings.new_empty(len(picks), dim)
        counted = None if batch.inside is None else batch.inside.flatten().nonzero()[:, 0]
        stop = start + (images * height * width if counted is None else len(counted))
        bounds = torch.searchsorted(ascending, torch.tensor([start, stop], device=picks.device))
        here = slice(*bounds.tolist())
        offsets, to = ascending[here] - start, places[here]
        if counted is not None:
            offsets = counted[offsets]
        vectors[to] = batch.embeddings.reshape(-1, dim)[offsets]
        corners = batch.corners or ((0, 0),) * images
        starts = [(name, *corner) for name, corner in zip(batch.images, corners, strict=True)]
        grid, cell = offsets // (height * width), offsets % (height * width)
        inner = torch.stack([torch.zeros_like(cell), cell // width, cell % width], 1)
        origins[to] = (torch.tensor(starts, device=picks.device)[grid] + inner).int()
        start = stop
    if vectors is None or start <= int(ascending[-1]):
        raise DataError("the training patches changed while they were read; train again")
    return vectors, origins
