"""`MemoryBank` on numpy arrays, for exported models. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array
from anomaly.errors import DataError, ModelError
from anomaly.scorers.base import ArrayScorer, PatchScores, check_fits, check_tensors, leading
from anomaly.scorers.patchcore.search.array_index import ArrayIndex

ADAPTIVE_DIMENSIONS = 1024  # of embeddings, with `model.embedding: adaptive`


def scorer(tensors: dict[str, NDArray[Any]], settings: Mapping[str, Any]) -> ArrayBank:
    """The memory bank that was saved.

    Args:
        tensors: as `MemoryBank.tensors` gave them.
        settings: the config's section `model`, by key; its `search` has no say here.

    Raises:
        ModelError: they aren't those of a memory bank.
    """
    check_bank(tensors)
    return ArrayBank(
        tensors["vectors"], tensors["origins"], settings["embedding"], settings["neighbours"]
    )


@dataclass(frozen=True, eq=False)
class ArrayBank(ArrayScorer):
    """Good patches, and where each came from.

    Attributes:
        vectors: (M, D) float32.
        origins: (M, 3) int32: training image, patch row, patch column.
        embedding: how feature maps became embeddings: `concat` or `adaptive`.
        reweighting: b, bank vectors that the re-weighted image score looks at.
    """

    vectors: NDArray[np.float32]
    origins: NDArray[np.int32]
    embedding: str
    reweighting: int
    unit = "distance"

    @property
    def dimensions(self) -> int:
        """D, the channels of the embeddings that `score` takes."""
        return int(self.vectors.shape[1])

    @cached_property
    def _index(self) -> ArrayIndex:
        return ArrayIndex(self.vectors)

    def check_origin(self, channels: int, images: int) -> None:
        """See that the bank can come from a network's embeddings of so many images.

        Args:
            channels: of all hooked layers together.
            images: training images, numbered from 0.

        Raises:
            ModelError: it can't; the message says what doesn't fit.
        """
        check_origin(self.origins, self.dimensions, self.embedding, channels, images)

    def score(self, embeddings: NDArray[np.float32]) -> PatchScores:
        """The distance of each patch to its nearest bank vector (PatchCore, section 3.3).

        Args:
            embeddings: (B, h, w, D) float32.

        Raises:
            DataError: another number of channels than the bank has.
        """
        check_channels(embeddings, self.dimensions)
        shape = embeddings.shape[:3]
        distances, found = self._index.search(embeddings.reshape(-1, embeddings.shape[3]))
        return PatchScores(distances.reshape(shape), found.reshape(shape))

    def image_scores(
        self, embeddings: NDArray[np.float32], scores: PatchScores
    ) -> NDArray[np.float32]:
        """The paper's image score, see `MemoryBank.image_scores`.

        Args:
            embeddings: (B, h, w, D), those that were scored.
            scores: what `score` said about them; -inf on patches that don't count.

        Returns:
            (B,) float32, in score units.
        """
        assert scores.nearest is not None
        images = np.arange(len(embeddings))
        flat = scores.scores.reshape(len(images), -1)
        at = flat.argmax(axis=1)
        highest: NDArray[np.float32] = flat[images, at]
        if len(self.vectors) == 1:
            return highest
        patches = embeddings.reshape(len(images), -1, self.dimensions)[images, at]
        centre = scores.nearest.reshape(len(images), -1)[images, at]
        group = self._index.search(self.vectors[centre], self.reweighting)[1]
        distances = np.linalg.norm(self.vectors[group] - patches[:, None], axis=2)
        share = np.exp(highest - np.logaddexp.reduce(distances, axis=1))
        return np.asarray(highest * np.maximum(1 - share, 0), np.float32)


def check_bank(tensors: Mapping[str, Array]) -> None:
    """See that saved tensors are those of a memory bank.

    Raises:
        ModelError: they aren't.
    """
    check_tensors(
        tensors,
        {
            "origins": ("int32", (-1, 3)),
            "vectors": ("float32", (leading(tensors, "origins"), -1)),
            "covering_radius": ("float64", ()),
            "exact": ("bool", ()),
        },
    )


def check_origin(
    origins: Array, dimensions: int, embedding: str, channels: int, images: int
) -> None:
    """See that a bank can come from a network's embeddings of so many images.

    Args:
        origins: (M, 3), see `MemoryBank`.
        dimensions: D.
        embedding: how feature maps became embeddings.
        channels: of all hooked layers together.
        images: training images, numbered from 0.

    Raises:
        ModelError: it can't; the message says what doesn't fit.
    """
    check_fits(ADAPTIVE_DIMENSIONS if embedding == "adaptive" else channels, dimensions)
    low, high = int(origins[:, 0].min()), int(origins[:, 0].max())
    if low < 0 or high >= images:
        raise ModelError(f"its memory bank comes from training image {high}, of {images}")


def check_channels(embeddings: Array, dimensions: int) -> None:
    """See that embeddings (B, h, w, D) have as many channels as a bank's vectors.

    Raises:
        DataError: they haven't.
    """
    if embeddings.shape[3] != dimensions:
        raise DataError(
            f"embeddings have {embeddings.shape[3]} channels where the memory bank's have "
            f"{dimensions}; use the backbone and layers it was made with"
        )
