"""Memory banks with more in them: of further images, or of other banks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.scorers.base import Fold, PatchBatch
from anomaly.scorers.patchcore.coreset import pick_beyond
from anomaly.scorers.patchcore.held_out import squared_to_parts
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
    picks: list[Tensor] = []
    with torch.inference_mode():
        centres = bank.vectors @ projection
        added = centres[:0]
        for points, bounds, places in _uncovered(bank, centres, batches, projection, memory_limit):
            if len(added):
                bounds = torch.minimum(bounds, squared_to_parts(points, [added])[:, 0])
            new = pick_beyond(points, bounds, bank.covering_radius)
            added = torch.cat([added, points[new]])
            picks.append(places[new])
        return _with(bank, [bank.vectors], [bank.origins], batches, torch.cat(picks))


def extended_without(
    bank: MemoryBank,
    known: int,
    batches: Iterable[PatchBatch],
    folds: Sequence[Fold],
    *,
    projection: Tensor,
) -> Iterator[MemoryBank]:
    """For each fold an extended bank as it would be without the fold's images.

    The fold's own vectors go. Where only these covered patches of another fold, as many of those
    are picked as it takes to cover them again.

    Args:
        bank: what `extended` has made of the batches.
        known: how many of its vectors were there before.
        batches: the patches that it was extended by; read twice.
        folds: disjoint sets of their images which together hold all of them.
        projection: (D, d), of the embeddings to what the bank was selected on.
    """
    fold_of = {image: k for k, fold in enumerate(folds) for image in fold}
    added = [fold_of[i] for i in bank.origins[known:, 0].tolist()]
    owners = torch.tensor([-1] * known + added, device=bank.vectors.device)
    with torch.inference_mode():
        centres = bank.vectors @ projection
        parts = [centres[owners == k] for k in range(len(folds))]
        orphans = _orphans(bank, parts, batches, fold_of, projection)
        picks = []
        for points, bounds, places in orphans:
            bounds = torch.minimum(bounds, squared_to_parts(points, [centres[:known]])[:, 0])
            picks.append(places[pick_beyond(points, bounds, bank.covering_radius)])
        for k, chosen in enumerate(picks):
            stay = owners != k
            yield _with(bank, [bank.vectors[stay]], [bank.origins[stay]], batches, chosen)


def _with(
    bank: MemoryBank,
    vectors: list[Tensor],
    origins: list[Tensor],
    batches: Iterable[PatchBatch],
    chosen: Tensor,
) -> MemoryBank:
    """A bank of some vectors and of the patches at the places `chosen`."""
    if len(chosen):
        more = gather(batches, chosen)
        vectors, origins = [*vectors, more[0]], [*origins, more[1]]
    return replace(bank, vectors=torch.cat(vectors), origins=torch.cat(origins), exact=False)


def _uncovered(
    bank: MemoryBank,
    centres: Tensor,
    batches: Iterable[PatchBatch],
    projection: Tensor,
    memory_limit: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The patches beyond a bank's radius, in portions that there is room for.

    Yields:
        Projected points (n, d), their squared distances (n,) to the nearest vector, and their
        places (n,) among all patches.
    """
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    start = size = 0
    for batch in batches:
        points = torch.cat(list(projected([batch], projection)))
        bounds = squared_to_parts(points, [centres])[:, 0]
        # A NaN is kept, to be told of.
        far = (~(bounds <= bank.covering_radius**2)).nonzero()[:, 0]
        held.append((points[far], bounds[far], far + start))
        start, size = start + len(points), size + points[far].nbytes
        if size > memory_limit:
            yield _together(held)
            held, size = [], 0
    if not start:
        raise DataError("no training patches; check the training images")
    if held:
        yield _together(held)


def _orphans(
    bank: MemoryBank,
    parts: Sequence[Tensor],
    batches: Iterable[PatchBatch],
    fold_of: Mapping[int, int],
    projection: Tensor,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each fold the patches of others that of all vectors added only its own cover.

    Yields:
        Projected points (n, d), their squared distances (n,) to the nearest vector of another
        fold, and their places (n,) among all patches.
    """
    none = (
        parts[0][:0],
        parts[0][:0, 0],
        torch.empty(0, dtype=torch.int64, device=parts[0].device),
    )
    found = [[none] for _ in parts]
    covered, start = bank.covering_radius**2, 0
    for batch in batches:
        every = list(projected([batch], projection))
        points = torch.cat(every)
        own = torch.cat(
            [
                torch.full((len(p),), fold_of[image], device=points.device)
                for p, image in zip(every, batch.images, strict=True)
            ]
        )
        squared = squared_to_parts(points, parts)
        least, nearest = squared.min(1)
        others = squared.scatter_(1, nearest[:, None], torch.inf).amin(1)
        lost = (nearest != own) & (least <= covered) & (others > covered)
        for k, those in enumerate(found):
            rows = (lost & (nearest == k)).nonzero()[:, 0]
            those.append((points[rows], others[rows], rows + start))
        start += len(points)
    yield from map(_together, found)


def _together(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    points, bounds, places = (torch.cat(each) for each in zip(*parts, strict=True))
    return points, bounds, places


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
