"""PatchCore (Roth et al. 2022): a memory bank of good patches, and the distance to it.

Scores torch tensors and numpy arrays alike. Exported models score without torch, so torch is
imported only in functions that align feature maps, save or trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.imaging.arrays import Array, module_of
from anomaly.methods.base import (
    Align,
    PatchScores,
    Scorer,
    axis_length,
    check_channels,
    check_tensors,
)
from anomaly.methods.patchcore.search import NearestNeighbors
from anomaly.runtime import locked_cached_property

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bank vectors that a graph compares patches with at once: 16 MiB for an image of 1024 patches.
_BLOCK = 4096
_REWEIGHTED = 3  # b of the re-weighted image score: bank vectors in its sum


@dataclass(frozen=True, eq=False)
class MemoryBank(Scorer):
    """The memory bank: vectors of good patches, and the origin of each.

    Attributes:
        vectors: (M, D) float32, in the order in which they were picked.
        origins: (M, 3) int32: training image, patch row, patch column. Rows from 65,536 on belong
            to turned copies, see `anomaly.imaging.loading`.
        covering_radius: no training patch is farther than this from its nearest bank vector,
            among the projected embeddings that the coreset was selected on.
        search: method of `NearestNeighbors`: `exact`, `faiss` or `ivf`.
        embedding: alignment of feature maps: `sharp` or `concat`, see
            `anomaly.methods.patchcore.embedding`.
        spacing_neighbours: number of neighbours that `spacing` is averaged over; 0 for no spacing.
        spacing: (M,) float32, the mean distance of each vector to its nearest neighbours in the
            bank; None before `spaced`, and where image scores count all distances alike.
    """

    vectors: Array
    origins: Array
    covering_radius: float
    search: str = "exact"
    embedding: str = "sharp"
    spacing_neighbours: int = 0
    spacing: Array | None = None
    unit = "distance"

    @property
    def align(self) -> Align:
        """The function from feature maps to the embeddings that `score` takes."""
        # The alignment needs torch, which an exported model does without.
        from anomaly.methods.patchcore.embedding import ALIGNERS

        return ALIGNERS[self.embedding]

    @property
    def dimensions(self) -> int:
        """Number D of channels that `score` takes."""
        return int(self.vectors.shape[1])

    def neighbours(self, patches: Array, count: int) -> tuple[Array, Array]:
        """The K nearest bank vectors of patches.

        Args:
            patches: (N, D) float32, on the bank's device.
            count: number K of vectors for each patch.

        Returns:
            Distances (N, K) float32, ascending, and indices (N, K) int64; K is M at most.
        """
        return self._neighbours.search(patches, count)

    @locked_cached_property
    def _neighbours(self) -> NearestNeighbors:
        """The search, whose index is made at first use."""
        # Exported models, whose banks are arrays, do without faiss; a GPU multiplies faster than
        # faiss searches on a CPU.
        by_faiss = not isinstance(self.vectors, np.ndarray) and self.vectors.device.type == "cpu"
        return NearestNeighbors(self.vectors, self.search if by_faiss else "exact")

    def score(self, embeddings: Array) -> PatchScores:
        """The distance of each patch to its nearest bank vector (PatchCore, section 3.3).

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, D) float32, on the bank's device.

        Raises:
            DataError: another number of channels than the bank has.
        """
        *grid, channels = embeddings.shape
        check_channels(channels, self.dimensions)
        distances, nearest = self.neighbours(embeddings.reshape(-1, channels), 1)
        return PatchScores(distances.reshape(grid), nearest.reshape(grid))

    def weighted(self, scores: PatchScores) -> Array:
        """Patch scores (B, h, w) for the image score, lowered near rare bank vectors.

        Around a vector of a rare kind the bank's vectors lie far apart, and so good patches of that
        kind have large distances, too. A distance is divided by the spacing of its nearest vector
        over the bank's mean spacing, where that is above 1. Anomaly maps have plain distances,
        because the division blurs the edges of defects.
        """
        if self.spacing is None or scores.nearest is None:
            return scores.scores
        return scores.scores / self._sparsity[scores.nearest]

    @locked_cached_property
    def _sparsity(self) -> Array:
        """Divisors (M,) float32, at least 1, for distances to the bank vectors."""
        assert self.spacing is not None  # see `weighted`
        mean = self.spacing.mean()
        # In a bank of duplicates all spacings are 0, and the divisors 1.
        return self.spacing.clip(mean) / mean if mean > 0 else self.spacing + 1

    def image_scores(self, embeddings: Array, scores: PatchScores) -> Array:
        """The paper's image score (PatchCore, eq. 6 and 7).

        The highest patch score s* of an image, at patch m_test with nearest bank vector m*, is
        weighted by 1 − exp(‖m_test − m*‖) / Σ exp(‖m_test − m‖), the sum over m* and the vectors
        of the bank that are nearest to it: a patch whose nearest vector is itself a rare one
        among good patches scores higher. Unweighted if the bank has one vector.

        Args:
            embeddings: (B, h, w, D), the embeddings that were scored.
            scores: result of `score`, with -inf on patches that don't count.

        Returns:
            (B,) float32, in score units.

        Raises:
            ValueError: the scores name no bank vectors.
        """
        if scores.nearest is None:
            raise ValueError("scores name no bank vectors; give the result of the bank's score()")
        xp = module_of(embeddings)
        count = len(embeddings)
        flat = scores.scores.reshape(count, -1)
        highest_at = list(range(count)), flat.argmax(1)
        highest = flat[highest_at]
        if len(self.vectors) == 1:
            return highest
        patches = embeddings.reshape(count, -1, self.dimensions)[highest_at]
        centre = scores.nearest.reshape(count, -1)[highest_at]
        group = self.neighbours(self.vectors[centre], _REWEIGHTED)[1]
        distances = xp.linalg.norm(self.vectors[group] - patches[:, None], None, 2)
        # Duplicates of m* may keep it out of its own group, so the numerator takes s* itself.
        most = xp.amax(distances, 1)  # subtracted, so that no exponential overflows
        share = xp.exp(highest - most) / xp.exp(distances - most[:, None]).sum(1)
        return highest * (1 - share).clip(0)

    def only(self, rows: Tensor, similar: MemoryBank) -> MemoryBank:
        """A bank of some of the vectors.

        Args:
            rows: (m,) int64, indices of the vectors.
            similar: a bank of mostly the same vectors, whose search axes are used again.
        """
        spacing = None if self.spacing is None else self.spacing[rows]
        part = replace(
            self, vectors=self.vectors[rows], origins=self.origins[rows], spacing=spacing
        )
        if neighbours := similar._neighbours.for_similar(part.vectors):
            vars(part)["_neighbours"] = neighbours  # the cache of the property
        return part

    def spaced(self, rows: Tensor | None = None) -> MemoryBank:
        """The bank with its `spacing` computed; without neighbours, its spacing is None.

        Args:
            rows: (m,) int64, vectors whose spacing is computed anew; None for all.
        """
        count = min(self.spacing_neighbours, len(self.vectors) - 1)
        if count < 1:
            return replace(self, spacing=None)
        vectors = self.vectors if rows is None else self.vectors[rows]
        distances, _ = self.neighbours(vectors, count + 1)
        spacing = distances[:, 1:].mean(1)  # the nearest is the vector itself
        if rows is not None and self.spacing is not None:
            spacing = self.spacing.index_copy(0, rows, spacing)
        spaced = replace(self, spacing=spacing)
        # `replace` drops the cached index, which serves the same vectors.
        vars(spaced)["_neighbours"] = self._neighbours
        return spaced

    def evidence(self, patches: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Distances (N, K) and origins (N, K, 3) of the bank vectors nearest to patches (N, D).

        K is `count`, at most M; the nearest come first.
        """
        distances, nearest = self.neighbours(patches, count)
        return distances, self.origins[nearest]

    def graph(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """`score` as plain reductions, for exported graphs.

        The bank is read in blocks, so that memory doesn't grow with it. Products name the nearest
        vector; its distance is then measured directly, which cancels nothing.
        """
        import torch  # only models of tensors are traced

        centre, count = self.vectors.mean(0), len(self.vectors)
        vectors = self.vectors - centre  # around their mean, products lose fewer digits
        squares = (vectors * vectors).sum(1)

        def nearest_of(patches: Tensor, start: int) -> tuple[Tensor, Tensor]:
            """The least ‖y‖² − 2xy (B, h, w) of a block of vectors y, and the index of that y."""
            block = slice(start, min(start + _BLOCK, count))
            # ‖x − y‖² less ‖x‖², which is the same for all y.
            values = squares[block] - 2 * (patches @ vectors[block].T)
            least = values.amin(-1)
            indices = torch.arange(block.start, block.stop, device=patches.device)
            beyond = torch.full_like(indices, count)  # an index above all others
            return least, torch.where(values <= least[..., None], indices, beyond).amin(-1)

        def scores(embeddings: Tensor) -> tuple[Tensor, Tensor]:
            patches = embeddings - centre
            least, nearest = nearest_of(patches, 0)
            for start in range(_BLOCK, count, _BLOCK):
                values, indices = nearest_of(patches, start)
                nearest = torch.where(values < least, indices, nearest)
                least = torch.minimum(values, least)
            nearest = nearest.clamp(max=count - 1)  # a patch with NaN has no nearest vector
            difference = patches - vectors[nearest]
            return difference.square().sum(-1).sqrt(), nearest

        return scores

    def to(self, target: torch.device | str) -> MemoryBank:
        """The same bank on another device."""
        vectors, origins = self.vectors.to(target), self.origins.to(target)
        spacing = None if self.spacing is None else self.spacing.to(target)
        return replace(self, vectors=vectors, origins=origins, spacing=spacing)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        import torch  # only models of tensors are saved

        spacing = {} if self.spacing is None else {"spacing": self.spacing}
        return spacing | {
            "vectors": self.vectors,
            "origins": self.origins,
            "covering_radius": torch.tensor(self.covering_radius, dtype=torch.float64),
        }


def scorer(tensors: Mapping[str, Array], settings: Mapping[str, Any]) -> MemoryBank:
    """The memory bank in saved tensors.

    Args:
        tensors: result of `MemoryBank.tensors`; arrays for a scorer that takes arrays.
        settings: the config's section `model`, by key.

    Raises:
        ModelError: the tensors aren't those of a memory bank.
    """
    count = axis_length(tensors, "origins")
    spacing = {"spacing": ("float32", (count,))} if "spacing" in tensors else {}
    check_tensors(
        tensors,
        {
            "origins": ("int32", (-1, 3)),
            "vectors": ("float32", (count, -1)),
            "covering_radius": ("float64", ()),
            **spacing,
        },
    )
    return MemoryBank(
        tensors["vectors"],
        tensors["origins"],
        float(tensors["covering_radius"]),
        search=settings["search"],
        embedding=settings["embedding"],
        spacing_neighbours=settings["spacing_neighbours"],
        spacing=tensors.get("spacing") if settings["spacing_neighbours"] else None,
    )
