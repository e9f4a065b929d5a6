"""Scorers that learn more, against one that learns all at once."""

from __future__ import annotations

import pytest
import torch
from mean_embedding import MeanFitter
from patch_lists import PatchList

from anomaly.errors import ModelError
from anomaly.methods.base import PatchBatch
from anomaly.methods.padim import GaussianFitter
from anomaly.methods.patchcore.coreset import distances_to_nearest
from anomaly.methods.patchcore.fitter import MemoryBankFitter

GRID = (4, 5)
DIM = 12
CPU = torch.device("cpu")


def _patches(images: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    """(N, h, w, D) of places that differ, with variances that do."""
    places = torch.randn(1, *GRID, DIM, generator=torch.Generator().manual_seed(99))
    spread = torch.logspace(-1, 0.5, DIM)
    noise = torch.randn(images, *GRID, DIM, generator=torch.Generator().manual_seed(seed))
    return 3 + places + spread * noise + shift


def _batches(patches: torch.Tensor, first: int = 0, size: int = 4) -> PatchList:
    parts = torch.split(patches, size)
    return PatchList(
        PatchBatch(part, tuple(range(first + i * size, first + i * size + len(part))))
        for i, part in enumerate(parts)
    )


@pytest.mark.parametrize("limit", [1 << 20, 4 * DIM * 25])
def test_a_bank_grows_until_its_radius_covers_the_new_patches(limit: int) -> None:
    fitter = MemoryBankFitter(coreset_ratio=0.2, projection_dim=128, memory_limit=limit)
    old, new = _patches(10, 0), _patches(6, 1, shift=1.5)
    bank = fitter.fit(_batches(old))
    longer = fitter.incremental(bank, 10).fit(_batches(new, first=10))
    assert torch.equal(longer.vectors[: len(bank.vectors)], bank.vectors)
    added, origins = longer.vectors[len(bank.vectors) :], longer.origins[len(bank.origins) :]
    assert 0 < len(added) < new[..., 0].numel()
    assert longer.covering_radius == bank.covering_radius
    # With the identity as projection the radius holds among the embeddings themselves.
    flat = new.flatten(0, 2)
    assert float(distances_to_nearest(flat, longer.vectors).max()) <= bank.covering_radius * 1.001
    for vector, (image, row, column) in zip(added, origins.tolist(), strict=True):
        assert torch.equal(vector, new[image - 10, row, column])
    # Each was beyond the radius of all that were there before it.
    for i in range(len(added)):
        before = torch.cat([bank.vectors, added[:i]])
        assert float(torch.cdist(added[i : i + 1], before).min()) > bank.covering_radius * 0.999
    # What is covered adds nothing.
    again = fitter.incremental(longer, 16).fit(_batches(new, first=16))
    assert torch.equal(again.vectors, longer.vectors)


def test_a_bank_that_grew_covers_the_other_folds_without_a_folds_images() -> None:
    old, more = _patches(10, 0), _patches(7, 1, shift=1.5)
    new = _batches(more, first=10)
    fitter = MemoryBankFitter(coreset_ratio=0.2)
    base = fitter.fit(_batches(old))
    growing = fitter.incremental(base, 10)
    whole, folds = growing.fit(new), [(10, 11, 12), (13, 14), (15, 16)]
    repaired = 0
    for fold, bank in growing.held_out(whole, new, folds, grouped=False):
        assert not torch.is_inference_mode_enabled()
        assert not {*fold} & {*bank.origins[:, 0].tolist()}
        assert torch.equal(bank.vectors[: len(base.vectors)], base.vectors)
        others = more[[i - 10 for i in range(10, 17) if i not in fold]].flatten(0, 2)
        reach = float(distances_to_nearest(others, bank.vectors).max())
        assert reach <= base.covering_radius * 1.001
        kept = int((~torch.isin(whole.origins[:, 0], torch.tensor(fold))).sum())
        repaired += len(bank.vectors) - kept
        for vector, (image, row, column) in zip(bank.vectors, bank.origins.tolist(), strict=True):
            assert image < 10 or torch.equal(vector, more[image - 10, row, column])
    assert repaired > 0


@pytest.mark.parametrize(
    ("first", "more"), [(6, [3]), (9, [9]), (20, [7]), (20, [30]), (2, [1]), (20, [4] * 10)]
)
@pytest.mark.parametrize("dimensions", [8, 12])
def test_gaussians_that_learn_more_are_those_of_a_fit_on_all(
    first: int, more: list[int], dimensions: int
) -> None:
    fitter = GaussianFitter(dimensions).prepared(DIM, CPU)
    patches = torch.cat([_patches(first, 0), _patches(sum(more), 1, shift=0.7)])
    patches = patches @ fitter.projection
    known, grown = first, fitter.fit(_batches(patches[:first]))
    for count in more:
        part = _batches(patches[known : known + count], first=known)
        grown = fitter.incremental(grown, known).fit(part)
        known += count
    whole = fitter.fit(_batches(patches))
    shapes = [[t.shape for t in scorer.tensors().values()] for scorer in (grown, whole)]
    assert shapes[0] == shapes[1]
    asked = torch.cat([patches[:5], _patches(5, 77, shift=2.0) @ fitter.projection])
    scores = [scorer.score(asked).scores for scorer in (grown, whole)]
    torch.testing.assert_close(*scores, rtol=2e-3, atol=1e-4)


def test_a_method_that_cannot_says_so() -> None:
    fitter = MeanFitter()
    scorer = fitter.fit(_batches(_patches(3, 0)))
    with pytest.raises(ModelError, match="train again"):
        fitter.incremental(scorer, 3)
