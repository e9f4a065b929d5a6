"""Memory banks with more in them: of further images, or of other banks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.scorers.base import Fold
from anomaly.scorers.patchcore.coreset import pick_beyond
from anomaly.scorers.patchcore.held_out import (
    orphans,
    repaired,
    together,
    with_more,
)
from anomaly.scorers.patchcore.memory_bank import MemoryBank
from anomaly.scorers.patchcore.distances import squared_to_nearest
from anomaly.scorers.patchcore.projected import in_chunks
from anomaly.scorers.patches import PatchSet


def extended(
    bank: MemoryBank, patches: PatchSet, *, projection: Tensor, memory_limit: int
) -> MemoryBank:
    """A bank that covers further patches as closely as those that it was fitted on.

    Of the patches that are farther than the covering radius from their nearest vector, the
    farthest is added, until there are none. Parts like those it knows add next to nothing.

    Args:
        bank: the bank.
        patches: good ones; read twice.
        projection: (D, d), of the embeddings to what the bank was selected on.
        memory_limit: bytes of projected patches held at once.

    Raises:
        DataError: no patches, or some that hold NaN or infinite values.
    """
    picks: list[Tensor] = []
    with torch.inference_mode():
        centres = bank.vectors @ projection
        added = centres[:0]
        for points, bounds, places in _uncovered(bank, centres, patches, projection, memory_limit):
            if len(added):
                bounds = torch.minimum(bounds, squared_to_nearest(points, added))
            new = pick_beyond(points, bounds, bank.covering_radius)
            added = torch.cat([added, points[new]])
            picks.append(places[new])
        return with_more(bank, patches, torch.cat(picks))


def extended_without(
    bank: MemoryBank,
    known: int,
    patches: PatchSet,
    folds: Sequence[Fold],
    *,
    projection: Tensor,
) -> Iterator[MemoryBank]:
    """For each fold an extended bank as it would be without the fold's images.

    The fold's own vectors go. Where only these covered patches of another fold, as many of those
    are picked as it takes to cover them again.

    Args:
        bank: what `extended` has made of the patches.
        known: how many of its vectors were there before.
        patches: those that it was extended by; read twice.
        folds: disjoint sets of their images which together hold all of them.
        projection: (D, d), of the embeddings to what the bank was selected on.
    """
    fold_of = {image: k for k, fold in enumerate(folds) for image in fold}
    added = [fold_of[i] for i in bank.origins[known:, 0].tolist()]
    owners = torch.tensor([-1] * known + added, device=bank.vectors.device)
    with torch.inference_mode():
        before, after = torch.tensor_split(bank.vectors @ projection, [known])
        radius, picks = bank.covering_radius, []
        lost = orphans(
            patches, fold_of, after, owners[known:], projection, radius, partial(_within, radius)
        )
        for points, bounds, places in lost:
            bounds = torch.minimum(bounds, squared_to_nearest(points, before))
            picks.append(places[pick_beyond(points, bounds, radius)])
    # Not above: while a generator waits, a mode that it has switched on is on for its caller, too.
    yield from repaired(bank, owners, patches, picks)


def _within(radius: float, least: Tensor, places: Tensor) -> Tensor:
    return least <= radius**2


def _uncovered(
    bank: MemoryBank,
    centres: Tensor,
    patches: PatchSet,
    projection: Tensor,
    memory_limit: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The patches beyond a bank's radius, in portions that there is room for.

    Yields:
        Projected points (n, d), their squared distances (n,) to the nearest vector, and their
        places (n, 2), see `gather`.
    """
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    size, none = 0, True
    for points, places, _ in in_chunks(patches.projected(lambda _: projection)):
        bounds = squared_to_nearest(points, centres)
        # A NaN is kept, to be told of.
        far = ~(bounds <= bank.covering_radius**2)
        held.append((points[far], bounds[far], places[far]))
        size, none = size + held[-1][0].nbytes, False
        if size > memory_limit:
            yield together(held)
            held, size = [], 0
    if none:
        raise DataError("no training patches; check the training images")
    if held:
        yield together(held)


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
