"""Packed patches as each of two banks sees them; see `anomaly.scorers.patchcore.bank_pair`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from anomaly.imaging.turning import turn_of, turned_corner
from anomaly.scorers.patchcore.bank_pair import coarse_patches, fine_patches
from anomaly.scorers.patches import PatchBatch, PatchSet, PointsOf, Result, View


@dataclass(frozen=True)
class Fine:
    """Batches of packed patches -> of the finer layers' numbers.

    Attributes:
        channels: F, of the finer layers.
    """

    channels: int

    def __call__(self, batch: PatchBatch) -> PatchBatch:
        """The same patches, with fewer numbers."""
        return replace(batch, embeddings=fine_patches(batch.embeddings, self.channels))


@dataclass(frozen=True)
class Coarse:
    """Batches of packed patches -> of patches twice as long and wide.

    Attributes:
        channels: F, of the finer layers.
    """

    channels: int

    def __call__(self, batch: PatchBatch) -> PatchBatch:
        """A quarter as many patches. All count that have a say in a fine one that counts."""
        corners = batch.corners and tuple(_halved(*corner) for corner in batch.corners)
        inside = None if batch.inside is None else _around(batch.inside)
        coarse = coarse_patches(batch.embeddings, self.channels)
        return PatchBatch(coarse, batch.images, corners, inside)


def fine_corner(row: int, column: int) -> tuple[int, int]:
    """Row and column of the first fine patch of a coarse one, whose image may be turned."""
    turn, row = turn_of(row)
    return turned_corner(2 * row, 2 * column, turn)


def _halved(row: int, column: int) -> tuple[int, int]:
    turn, row = turn_of(row)
    return turned_corner(row // 2, column // 2, turn)


def _around(inside: Tensor) -> Tensor:
    """The coarse patches (B, h / 2, w / 2) that bilinear scores of fine ones are made of.

    A fine patch takes from its own coarse one, and from those beside its half of that.
    """
    counted = inside[:, None].float()
    reach = F.max_pool2d(counted, 3, stride=1, padding=1)
    return F.max_pool2d(reach, 2)[:, 0] > 0


@dataclass(frozen=True, eq=False)
class Level(PatchSet):
    """Training patches as one of the banks sees them.

    Attributes:
        patches: packed.
        view: of them.
    """

    patches: PatchSet
    view: View

    @property
    def count(self) -> int:
        """How many patches all images have; of coarse ones a few more where not all count."""
        return self.patches.count // (4 if isinstance(self.view, Coarse) else 1)

    def __iter__(self) -> Iterator[PatchBatch]:
        return map(self.view, self.patches)

    def only(self, images: Container[int]) -> Level:
        """The patches of some of the images."""
        return Level(self.patches.only(images), self.view)

    def projected(self, projection: PointsOf) -> Iterator[tuple[int, Tensor]]:
        """A training image, and its points (n, d) float32, or some of them: a tile's."""
        return self.patches.projected(replace(projection, view=self.view))

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """What a function makes of the patches, in the parts in which the packed ones lie."""
        return self.patches.each(partial(_seen, self.view, function))


def _seen(view: View, function: Callable[[PatchSet], Result], patches: PatchSet) -> Result:
    return function(Level(patches, view))
