"""Banks without some images: nothing of these is left, and what went is made up for."""

from dataclasses import replace

import pytest
import torch
from patch_lists import PatchList

from anomaly.methods.base import PatchBatch
from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.methods.patchcore.fitter import MemoryBankFitter

FOLDS = [(0, 1), (2, 3, 4), (5,)]


def _batches(seed: int = 0, inside: bool = False) -> PatchList:
    """Six images of 6×5 patches, two at a time; neighbours and images are alike."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 6, 5, 12, generator=g)
    batches = []
    for first in (0, 2, 4):
        embeddings = base + 0.3 * torch.randn(2, 6, 5, 12, generator=g)
        mask = torch.rand(2, 6, 5, generator=g) < 0.7 if inside else None
        batches.append(PatchBatch(embeddings, (first, first + 1), inside=mask))
    return PatchList(batches)


def _fit(batches: PatchList, ratio: float) -> tuple[MemoryBankFitter, MemoryBank]:
    fitter = MemoryBankFitter(coreset_ratio=ratio, projection_dim=8)
    return fitter, fitter.fit(batches)


@pytest.mark.parametrize("inside", [False, True])
def test_a_fold_leaves_nothing_behind(inside: bool) -> None:
    batches = _batches(inside=inside)
    fitter, bank = _fit(batches, 0.2)
    for fold, left in fitter.held_out(bank, batches, FOLDS, grouped=False):
        images = left.origins[:, 0].tolist()
        assert not set(images) & set(fold)
        assert len(set(map(tuple, left.origins.tolist()))) == len(left.origins)
        for vector, (image, row, column) in zip(left.vectors, left.origins.tolist(), strict=True):
            batch = batches.batches[image // 2]
            torch.testing.assert_close(vector, batch.embeddings[image % 2, row, column])
            assert batch.inside is None or bool(batch.inside[image % 2, row, column])


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5])
def test_the_others_are_covered_as_closely_by_no_more_vectors_than_it_takes(ratio: float) -> None:
    """Against greedy k-center, a pick at a time, in float64."""
    batches = _batches(5)
    fitter, bank = _fit(batches, ratio)
    places, points = [], []
    for batch in batches:
        for image, grid in zip(batch.images, batch.embeddings, strict=True):
            places += [[image, r, c] for r in range(grid.shape[0]) for c in range(grid.shape[1])]
            points.append((grid.flatten(0, 1) @ fitter.selection_matrix(12)).double())
    every, images = torch.cat(points), torch.tensor(places)[:, 0]
    vectors = (bank.vectors @ fitter.selection_matrix(12)).double()
    nearest = torch.cdist(every, vectors).argmin(1)
    added = []
    for fold, left in fitter.held_out(bank, batches, FOLDS, grouped=False):
        gone = torch.isin(bank.origins[:, 0], torch.tensor(fold))
        uncovered = (gone[nearest] & ~torch.isin(images, torch.tensor(fold))).nonzero()[:, 0]
        away = torch.cdist(every, vectors[~gone]).amin(1)[uncovered]
        expected: list[list[int]] = []
        while len(expected) < int(gone.sum()) and away.max() > 0.95 * bank.covering_radius:
            pick = uncovered[away.argmax()]
            expected.append(places[int(pick)])
            away = torch.minimum(away, torch.cdist(every[uncovered], every[pick][None])[:, 0])
        kept = bank.origins[~gone].tolist()
        assert left.origins.tolist() == kept + expected
        added.append((len(expected), int(gone.sum())))
    # A bank of few vectors has as many again for those that went, a larger one fewer.
    assert any(new < went for new, went in added) == (ratio > 0.1), added


def test_one_fold_is_refused() -> None:
    batches = _batches()
    fitter, bank = _fit(batches, 0.2)
    with pytest.raises(ValueError, match="two folds"):
        next(fitter.held_out(bank, batches, [tuple(range(6))], grouped=False))


def test_of_a_share_of_no_patch_nothing_is_drawn_in_the_place_of_what_went() -> None:
    batches = _batches(4)
    fitter, bank = _fit(batches, 0.2)
    known = bank.origins.tolist()
    without_memory = replace(fitter, memory_limit=0)
    for _, left in without_memory.held_out(bank, batches, FOLDS, grouped=False):
        assert all(origin in known for origin in left.origins.tolist())
