"""Training patches as points: projected to the few numbers in which a bank is selected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from anomaly.scorers.patchcore.coreset import random_projection
from anomaly.scorers.patchcore.distances import distances_to_nearest
from anomaly.scorers.patches import PatchSet

# Points that meet centres at once, at least: enough to be grouped, see `distances`.
_CHUNK = 1 << 17


class ProjectedPatches:
    """The points of all training patches, image by image; re-iterable.

    Args:
        patches: of the training images.
        dimensions: d of the points.
        generator: draws the projection.
    """

    def __init__(self, patches: PatchSet, dimensions: int, generator: torch.Generator) -> None:
        self._patches = patches
        self._dimensions = dimensions
        self._generator = generator
        self._matrix: Tensor | None = None
        self._pieces: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Tensor]:
        pieces = []
        for image, points in self._patches.projected(self._matrix_of):
            pieces.append((image, len(points)))
            yield points
        self._pieces = pieces

    def distances(self, centres: Tensor) -> Iterator[Tensor]:
        """Distances (n,) to the nearest of some centres (K, d), of what each step gives."""
        assert self._matrix is not None, "points are measured once they have been read"
        for found in self._patches.each(partial(_distances, self._matrix, centres)):
            for some, lengths in found:
                yield from torch.split(some, lengths)

    def places(self, picks: Tensor) -> Tensor:
        """Where points come from.

        Args:
            picks: (M,) int64, their numbers in the order in which they are read.

        Returns:
            (M, 2) int64: training image, and which of its patches that count.
        """
        lengths = [count for _, count in self._pieces]
        ends = torch.tensor(list(accumulate(lengths)), device=picks.device)
        before: dict[int, int] = {}  # of the same image
        origins = []
        for (image, count), end in zip(self._pieces, ends.tolist(), strict=True):
            first = before.get(image, 0)
            origins.append((image, end - count - first))
            before[image] = first + count
        piece = torch.searchsorted(ends, picks, right=True)
        places = torch.tensor(origins, device=picks.device)[piece]
        places[:, 1] = picks - places[:, 1]
        return places

    def _matrix_of(self, channels: int) -> Tensor:
        if self._matrix is None:
            self._matrix = random_projection(channels, self._dimensions, generator=self._generator)
        return self._matrix


def in_chunks(
    pieces: Iterable[tuple[int, Tensor]],
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Points of several images at once, at least 131,072 but for the last.

    Args:
        pieces: training images, and points (n, d) of each or of a part of it.

    Yields:
        Points (N, d), where they come from (N, 2), see `ProjectedPatches.places`, and how many
        came with each of the pieces.
    """
    seen: dict[int, int] = {}
    held: list[Tensor] = []
    places: list[Tensor] = []
    count = 0
    for image, points in pieces:
        first = seen.get(image, 0)
        seen[image] = first + len(points)
        rank = torch.arange(first, seen[image], device=points.device)
        places.append(torch.stack([torch.full_like(rank, image), rank], 1))
        held.append(points)
        count += len(points)
        if count >= _CHUNK:
            yield torch.cat(held), torch.cat(places), [len(some) for some in held]
            held, places, count = [], [], 0
    if held:
        yield torch.cat(held), torch.cat(places), [len(some) for some in held]


def _distances(
    matrix: Tensor, centres: Tensor, patches: PatchSet
) -> list[tuple[Tensor, list[int]]]:
    """Distances of some images' points to the nearest of some centres, and how many of each."""
    with torch.inference_mode():
        return [
            (distances_to_nearest(points, centres), lengths)
            for points, _, lengths in in_chunks(patches.projected(lambda _: matrix))
        ]
