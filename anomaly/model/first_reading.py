"""What the first reading of training images leaves behind, for all that read them again."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import UnusableImage
from anomaly.model.appearance import Appearance
from anomaly.model.tensor_file import Piece, TensorFile
from anomaly.scorers.patches import MatrixOf, PatchBatch


class KeptPoints:
    """What `PatchSet.projected` gives, so that embeddings aren't made and multiplied once more.

    Args:
        folder: on the disk that the file is to be on.
        shared: see `TensorFile`.

    Attributes:
        channels: D of the embeddings.
        made_with: `matrix_hash` of what they were multiplied by.
    """

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self._file = TensorFile(folder, shared=shared)
        self._matrix: Tensor | None = None
        self.channels = 0
        self.made_with = ""

    def add(self, batch: PatchBatch, matrix_of: MatrixOf) -> int:
        """Project the patches of some images that count.

        Returns:
            How many bytes that takes on the disk.

        Raises:
            OutputError: no room.
        """
        if self._matrix is None:
            self.channels = batch.embeddings.shape[3]
            matrix = matrix_of(self.channels)
            self._matrix, self.made_with = matrix.to(batch.embeddings.device), matrix_hash(matrix)
        written = 0
        for image, patches in zip(batch.images, batch.counted(), strict=True):
            points = patches @ self._matrix
            if len(points):  # of a tile outside the region none count
                self._file.write((Piece(image, 0, 0),), [points])
            written += points.nbytes
        return written

    def read(self, images: Container[int]) -> Iterator[tuple[int, Tensor]]:
        """The points (n, d) of some images, ascending, a tile after the other."""
        for (piece,), (points,) in self._file.read(images, ascending=True):
            yield piece.image, points

    def close(self) -> None:
        """Delete the file, unless it is shared."""
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_matrix": None}  # a copy only reads


@dataclass(frozen=True)
class FirstReading:
    """What the first reading of images has found; see `TrainingPatches`.

    Attributes:
        file: their features.
        points: their projected patches, where a fitter selects by these.
        refused: files that couldn't be used.
        hashes: sha256 of each file used.
        views: how each file used was turned into the network's input.
        looks: what each file used looks like as a whole.
        counts: how many patches each has.
    """

    file: TensorFile
    points: KeptPoints | None
    refused: list[UnusableImage]
    hashes: dict[int, str]
    views: dict[int, AnyView]
    looks: dict[int, Appearance]
    counts: dict[int, int]


def matrix_hash(matrix: Tensor) -> str:
    """What tells a matrix (D, d) float32 from others: sha256 of its bytes."""
    return hashlib.sha256(matrix.cpu().contiguous().numpy().data).hexdigest()
