"""Memory banks with more in them: of further images, or of other banks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.scorers.base import PatchBatch
from anomaly.scorers.patchcore.coreset import distances_to_nearest, pick_beyond
from anomaly.scorers.patchcore.memory_bank import MemoryBank, gather


def extensions(
    bank: MemoryBank,
    batches: Iterable[PatchBatch],
    without: Sequence[Collection[int]],
    *,
    projection: Tensor,
    memory_limit: int,
) -> Iterator[MemoryBank]:
    """A bank that covers further patches as closely as those that it was fitted on.

    Of the patches that are farther than the covering radius from their nearest vector, the
    farthest is added, until there are none. Parts like those it knows add next to nothing.

    Args:
        bank: the bank.
        batches: good patches; read twice, the same each time.
        without: sets of images that are left out, each for a bank of its own.
        projection: (D, d), of the embeddings to what the bank was selected on.
        memory_limit: bytes of projected patches held at once.

    Raises:
        DataError: no patches, or some that hold NaN or infinite values.
    """
    with torch.inference_mode():
        picks = _picks(bank, batches, without, projection.to(bank.vectors.device), memory_limit)
        unique, places = torch.unique(torch.cat(picks), return_inverse=True)
        vectors, origins = bank.vectors[:0], bank.origins[:0]
        if len(unique):
            vectors, origins = gather(batches, unique)
    for some in torch.split(places, [len(p) for p in picks]):
        yield replace(
            bank,
            vectors=torch.cat([bank.vectors, vectors[some]]),
            origins=torch.cat([bank.origins, origins[some]]),
            exact=bank.exact and not len(some),
        )


def _picks(
    bank: MemoryBank,
    batches: Iterable[PatchBatch],
    without: Sequence[Collection[int]],
    projection: Tensor,
    memory_limit: int,
) -> list[Tensor]:
    """For each set of images left out, the places (n,) among all patches of those to add."""
    picks = [projection.new_empty(0, dtype=torch.int64) for _ in without]
    centres = [projection[:0] for _ in without]
    for points, bounds, images, places in _uncovered(bank, batches, projection, memory_limit):
        for k, out in enumerate(without):
            stay = torch.tensor([image not in out for image in images.tolist()], dtype=torch.bool)
            mine, own = points[stay], bounds[stay]
            if len(centres[k]) and len(mine):
                own = torch.minimum(own, distances_to_nearest(mine, centres[k]).square())
            new = pick_beyond(mine, own, bank.covering_radius)
            centres[k] = torch.cat([centres[k], mine[new]])
            picks[k] = torch.cat([picks[k], places[stay][new]])
    return picks


def _uncovered(
    bank: MemoryBank, batches: Iterable[PatchBatch], projection: Tensor, memory_limit: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The patches beyond a bank's radius, in portions that there is room for.

    Yields:
        Projected points (n, d), their squared distances (n,) to the nearest vector, the images
        (n,) that they are of, and their places (n,) among all patches.
    """
    centres = bank.vectors @ projection
    held: list[tuple[Tensor, ...]] = []
    start = size = 0
    for batch in batches:
        every = list(projected([batch], projection))
        counts = torch.tensor([len(points) for points in every])
        points = torch.cat(every)
        images = torch.tensor(batch.images).repeat_interleave(counts).to(points.device)
        distances = distances_to_nearest(points, centres)
        far = (distances > bank.covering_radius).nonzero()[:, 0]
        held.append((points[far], distances[far].square(), images[far], far + start))
        start, size = start + len(points), size + points[far].nbytes
        if size > memory_limit:
            yield _together(held)
            held, size = [], 0
    if not start:
        raise DataError("no training patches; check the training images")
    if held:
        yield _together(held)


def _together(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    points, bounds, images, places = (torch.cat(each) for each in zip(*parts, strict=True))
    return points, bounds, images, places


def joined(banks: Sequence[MemoryBank], numbers: Sequence[Mapping[int, int]]) -> MemoryBank:
    """All vectors of several banks; of a patch that more than one has kept, one.

    Args:
        banks: made with the same settings.
        numbers: of each, which training image of the new bank an image of its own is.
    """
    places: dict[tuple[int, int, int], int] = {}
    count = 0
    for bank, known in zip(banks, numbers, strict=True):
        for image, row, column in bank.origins.tolist():
            places.setdefault((known[image], row, column), count)
            count += 1
    vectors = torch.cat([bank.vectors for bank in banks])[list(places.values())]
    origins = torch.tensor(list(places), dtype=torch.int32, device=vectors.device)
    radius = max(bank.covering_radius for bank in banks)
    return replace(banks[0], vectors=vectors, origins=origins, covering_radius=radius, exact=False)


def projected(batches: Iterable[PatchBatch], projection: Tensor) -> Iterator[Tensor]:
    """The patches (n, d) of each image in turn that count, projected."""
    for batch in batches:
        # One image at a time: a product's rounding depends on its shape, and which images share a
        # batch must not change the bank.
        for i, image in enumerate(batch.embeddings.flatten(1, 2)):
            counted = image if batch.inside is None else image[batch.inside[i].flatten()]
            yield counted @ projection
