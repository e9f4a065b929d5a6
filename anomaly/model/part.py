"""The patches of some of the training images."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from anomaly.imaging.geometry import AnyView
from anomaly.scorers.patches import PatchBatch, PatchSet, PointsOf, Result

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

    def projected(self, projection: PointsOf) -> Iterator[tuple[int, Tensor]]:
        """An image's index and its points (n, d) float32, image by image."""
        return self.patches.read_projected(self.images, projection)

    def will_project(self, projections: Sequence[PointsOf]) -> None:
        """Say by what `projected` is going to be asked for."""
        self.patches.will_project(projections)

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """What a function makes of the patches, for each part of the images that lies apart."""
        return self.patches.each_of(self.images, function)
