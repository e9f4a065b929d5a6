"""The patches of some of the training images."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from anomaly.imaging.geometry import AnyView
from anomaly.scorers.patches import MatrixOf, PatchBatch, PatchSet, Result

if TYPE_CHECKING:
    from anomaly.model.training_patches import TrainingPatches


@dataclass(frozen=True, eq=False)
class Part(PatchSet):
    """Some of the training images' patches; re-iterable.

    Attributes:
        patches: of all.
        images: the numbers of those.
    """

    patches: TrainingPatches
    images: Container[int]

    def __iter__(self) -> Iterator[PatchBatch]:
        return self.patches.read(self.images)

    @property
    def count(self) -> int:
        """How many patches they have."""
        return self.patches.count_of(self.images)

    @property
    def views(self) -> dict[int, AnyView]:
        """How each file of the whole set was turned into the network's input, by its index."""
        return self.patches.views

    def only(self, images: Container[int]) -> Part:
        """The patches of some of them."""
        return self.patches.only(images)

    def projected(self, matrix_of: MatrixOf) -> Iterator[tuple[int, Tensor]]:
        """An image's index and its points (n, d) float32, image by image."""
        return self.patches.read_projected(self.images, matrix_of)

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """What a function makes of the patches, for each part of the images that lies apart."""
        return self.patches.each_of(self.images, function)
