"""What a memory bank does alike on torch tensors and on numpy arrays. Imports no torch.

An exported model's is an `ArrayBank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, module_of
from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.methods.base import ArrayScorer, PatchScores, check_fits, check_tensors, axis_length
from anomaly.methods.patchcore.search import NearestNeighbors
from anomaly.runtime.parallel import made_once

ADAPTIVE_DIMENSIONS = 1024  # of embeddings, with `model.embedding: adaptive`


class Bank(ArrayScorer):
    """Good patches, and where each came from.

    Attributes:
        vectors: (M, D) float32.
        origins: (M, 3) int32: training image, patch row, patch column. Rows from 65,536 on are of
            turned copies, see `anomaly.imaging.loading`.
        embedding: how feature maps became embeddings: `sharp`, `concat` or `adaptive`.
        reweighting: b, bank vectors that the re-weighted image score looks at.
        spacing: (M,) float32, the mean distance of each vector to its nearest neighbours in the
            bank; None where image scores count all distances alike.
    """

    vectors: Array
    origins: Array
    spacing: Array | None
    embedding: str
    reweighting: int
    unit = "distance"

    def neighbours(self, patches: Array, count: int) -> tuple[Array, Array]:
        """The bank vectors nearest to patches.

        Args:
            patches: (N, D) float32, on the bank's device.
            count: K, vectors for each.

        Returns:
            Distances (N, K) float32, ascending, and indices (N, K) int64.
        """
        return self._neighbours.search(patches, count)

    @made_once
    def _neighbours(self) -> NearestNeighbors:
        return NearestNeighbors(self.vectors)

    @property
    def dimensions(self) -> int:
        """D, the channels of the embeddings that `score` takes."""
        return int(self.vectors.shape[1])

    def score(self, embeddings: Array) -> PatchScores:
        """The distance of each patch to its nearest bank vector (PatchCore, section 3.3).

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, D) float32, on the bank's device.

        Raises:
            DataError: another number of channels than the bank has.
        """
        *grid, channels = embeddings.shape
        if channels != self.dimensions:
            raise DataError(
                f"embeddings have {channels} channels where the memory bank's have "
                f"{self.dimensions}; use the backbone and layers it was made with"
            )
        distances, nearest = self.neighbours(embeddings.reshape(-1, channels), 1)
        return PatchScores(distances.reshape(grid), nearest.reshape(grid))

    def weighted(self, scores: PatchScores) -> Array:
        """Patch scores as the image score counts them: less where good patches are rare.

        Around a vector of a rare kind the bank's vectors lie far apart, and so good patches of that
        kind have large distances, too. A distance is divided by how far apart they lie around its
        nearest vector, where that is more than the bank's mean. Anomaly maps have plain distances:
        there a division blurs where a defect ends.

        Args:
            scores: what `score` said.

        Returns:
            (B, h, w) float32.
        """
        if self.spacing is None or scores.nearest is None:
            return scores.scores
        return scores.scores / self._sparsity[scores.nearest]

    @made_once
    def _sparsity(self) -> Array:
        """(M,) float32, from 1 up: what distances to each vector are divided by."""
        assert self.spacing is not None  # see `weighted`
        mean = self.spacing.mean()
        return self.spacing.clip(mean) / mean if mean > 0 else self.spacing + 1

    def image_scores(self, embeddings: Array, scores: PatchScores) -> Array:
        """The paper's image score (PatchCore, eq. 6 and 7).

        The highest patch score s* of an image, at patch m_test with nearest bank vector m*, is
        weighed by 1 − exp(‖m_test − m*‖) / Σ exp(‖m_test − m‖), the sum over m* and the vectors
        of the bank that are nearest to it: a patch whose nearest vector is itself a rare one
        among good patches scores higher.

        Args:
            embeddings: (B, h, w, D), those that were scored.
            scores: what `score` said about them; -inf on patches that don't count.

        Returns:
            (B,) float32, in score units.

        Raises:
            ConfigError: the sum has fewer than 2 vectors; 1 leaves a weight of 0.
        """
        if self.reweighting < 2:
            raise ConfigError(f"image-score neighbours must be at least 2, not {self.reweighting}")
        if scores.nearest is None:
            raise ValueError("scores name no bank vectors; take those of this bank's score()")
        xp, count = module_of(embeddings), len(embeddings)
        flat = scores.scores.reshape(count, -1)
        highest_at = list(range(count)), flat.argmax(1)
        highest = flat[highest_at]
        if len(self.vectors) == 1:
            return highest
        patches = embeddings.reshape(count, -1, self.dimensions)[highest_at]
        centre = scores.nearest.reshape(count, -1)[highest_at]
        group = self.neighbours(self.vectors[centre], self.reweighting)[1]
        distances = xp.linalg.norm(self.vectors[group] - patches[:, None], None, 2)
        # Duplicates may push m* out of its own group, so its distance is the numerator's alone.
        most = xp.amax(distances, 1)
        share = xp.exp(highest - most) / xp.exp(distances - most[:, None]).sum(1)
        return highest * (1 - share).clip(0)

    def check_origin(self, channels: int, images: int) -> None:
        """See that the bank can come from a network's embeddings of so many images.

        Args:
            channels: of all hooked layers together.
            images: training images, numbered from 0.

        Raises:
            ModelError: it can't; the message says what doesn't fit.
        """
        adaptive = self.embedding == "adaptive"
        check_fits(ADAPTIVE_DIMENSIONS if adaptive else channels, self.dimensions)
        low, high = int(self.origins[:, 0].min()), int(self.origins[:, 0].max())
        if low < 0 or high >= images:
            raise ModelError(f"its memory bank comes from training image {high}, of {images}")


@dataclass(frozen=True, eq=False)
class ArrayBank(Bank):
    """A memory bank of arrays, searched exactly; attributes as those of `Bank`."""

    vectors: NDArray[np.float32]
    origins: NDArray[np.int32]
    embedding: str
    reweighting: int
    spacing: NDArray[np.float32] | None = None


def scorer(tensors: dict[str, NDArray[Any]], settings: Mapping[str, Any]) -> ArrayBank:
    """The memory bank that was saved, for a model without torch.

    Args:
        tensors: as `MemoryBank.tensors` gave them.
        settings: the config's section `model`, by key; its `search` has no say here.

    Raises:
        ModelError: they aren't those of a memory bank.
    """
    check_bank(tensors)
    return ArrayBank(
        tensors["vectors"],
        tensors["origins"],
        settings["embedding"],
        settings["neighbours"],
        spacing_for(tensors, settings),
    )


def check_bank(tensors: Mapping[str, Array]) -> None:
    """See that saved tensors are those of a memory bank.

    Raises:
        ModelError: they aren't.
    """
    count = axis_length(tensors, "origins")
    spacing = {"spacing": ("float32", (count,))} if "spacing" in tensors else {}
    check_tensors(
        tensors,
        {
            "origins": ("int32", (-1, 3)),
            "vectors": ("float32", (count, -1)),
            "covering_radius": ("float64", ()),
            "exact": ("bool", ()),
            **spacing,
        },
    )


def spacing_for(tensors: Mapping[str, Array], settings: Mapping[str, Any]) -> Array | None:
    """The bank's spacing, if the settings want it.

    Args:
        tensors: of a memory bank, as it was saved.
        settings: the config's section `model`, by key.

    Raises:
        ModelError: it is missing.
    """
    if not settings["spacing_neighbours"] or len(tensors["vectors"]) < 2:
        return None
    if "spacing" not in tensors:
        raise ModelError(
            "its memory bank doesn't hold its vectors' spacing (model.spacing_neighbours); "
            "train again"
        )
    return tensors["spacing"]
