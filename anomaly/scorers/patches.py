"""The patches of training images, as fitters read them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

# D, the channels of embeddings -> a matrix (D, d) float32 that they are multiplied by.
MatrixOf: TypeAlias = "Callable[[int], Tensor]"
Result = TypeVar("Result")


@dataclass(frozen=True)
class PatchBatch:
    """The patch embeddings of a few images that share one grid.

    Attributes:
        embeddings: (B, h, w, D) float32.
        images: the B training-image indices.
        corners: row and column by which each grid's first patch is known in its image: (0, 0) but
            in tiles, and in turned copies (see `anomaly.imaging.loading.turned_corner`).
        inside: (B, h, w) bool, which patches count; None for all.
    """

    embeddings: Tensor
    images: tuple[int, ...]
    corners: tuple[tuple[int, int], ...] | None = None
    inside: Tensor | None = None

    def counted(self) -> Iterator[Tensor]:
        """The patches (n, D) that count, of one image after the other.

        A sum's or product's rounding depends on its shape. What is computed image by image doesn't
        depend on which of them share a batch.
        """
        for i, patches in enumerate(self.embeddings.flatten(1, 2)):
            yield patches if self.inside is None else patches[self.inside[i].flatten()]


class PatchSet(Protocol):
    """The patches of all training images; re-iterable, the same each time."""

    @property
    def count(self) -> int:
        """How many patches all images have."""
        ...

    def __iter__(self) -> Iterator[PatchBatch]: ...

    def only(self, images: Container[int]) -> PatchSet:
        """The patches of some of the images."""
        ...

    def projected(self, matrix_of: MatrixOf) -> Iterator[tuple[int, Tensor]]:
        """The patches that count, projected; where images are read once alone, by this.

        Args:
            matrix_of: called once before the first patches, with their D; gives (D, d).

        Yields:
            A training image, and its points (n, d) float32, or some of them: a tile's. Images
            ascend where the whole set is read from files.
        """
        matrix: Tensor | None = None
        for batch in self:
            if matrix is None:
                matrix = matrix_of(batch.embeddings.shape[3]).to(batch.embeddings.device)
            for image, patches in zip(batch.images, batch.counted(), strict=True):
                yield image, patches @ matrix

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """What a function makes of the patches: of all of them, unless parts lie elsewhere.

        Args:
            function: of a set of patches; on a cluster it is pickled, and called where each part
                is, with the images ascending from part to part.
        """
        yield function(self)
