"""Memory banks with more in them: of further images, or of other banks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.scorers.base import PatchBatch
from anomaly.scorers.patchcore.coreset import pick_beyond
from anomaly.scorers.patchcore.memory_bank import MemoryBank, gather


def extended(
    bank: MemoryBank, batches: Iterable[PatchBatch], *, projection: Tensor, memory_limit: int
) -> MemoryBank:
    """A bank that covers further patches as closely as those that it was fitted on.

    Of the patches that are farther than the covering radius from their nearest vector, the
    farthest is added, until there are none. Parts like those it knows add next to nothing.

    Args:
        bank: the bank.
        batches: good patches; read twice, the same each time.
        projection: (D, d), of the embeddings to what the bank was selected on.
        memory_limit: bytes of projected patches held at once.

    Raises:
        DataError: no patches, or some that hold NaN or infinite values.
    """
    with torch.inference_mode():
        projection = projection.to(bank.vectors.device)
        centres = bank.vectors @ projection
        picks, start = [], 0
        for points in _portions(projected(batches, projection), memory_limit):
            new = pick_beyond(points, centres, bank.covering_radius)
            centres = torch.cat([centres, points[new]])
            picks.append(new + start)
            start += len(points)
        chosen = torch.cat(picks)
        if not len(chosen):
            return bank
        vectors, origins = gather(batches, chosen)
        vectors = torch.cat([bank.vectors, vectors])
        origins = torch.cat([bank.origins, origins])
    return replace(bank, vectors=vectors, origins=origins, exact=False)


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


def _portions(stream: Iterable[Tensor], memory_limit: int) -> Iterator[Tensor]:
    """Points of a stream, so many together as there is room for; at least those of one image."""
    waiting: list[Tensor] = []
    for points in stream:
        if waiting and sum(p.nbytes for p in waiting) + points.nbytes > memory_limit:
            yield torch.cat(waiting)
            waiting = []
        waiting.append(points)
    if not waiting:
        raise DataError("no training patches; check the training images")
    yield torch.cat(waiting)
