"""PatchCore's bank: selection, origins, scores, and the paper's image score."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_lists import PatchList
from scipy.spatial.distance import cdist

from anomaly.config.load import parse_config
from anomaly.errors import DataError
from anomaly.methods.base import PatchBatch, PatchScores
from anomaly.methods.patchcore.bank import MemoryBank, scorer
from anomaly.methods.patchcore.coreset import distances_to_nearest
from anomaly.methods.patchcore.fitter import MemoryBankFitter

GRIDS = [(6, 5), (6, 5), (4, 9), (6, 5), (4, 9), (3, 3), (6, 5)]


def images(
    dim: int = 24, grids: list[tuple[int, int]] = GRIDS, seed: int = 0
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    kinds = 4 * torch.randn(9, dim, generator=g)
    return [
        kinds[torch.randint(9, (h, w), generator=g)] + torch.randn(h, w, dim, generator=g)
        for h, w in grids
    ]


def batches(
    maps: list[torch.Tensor], first: int = 0, inside: torch.Tensor | None = None
) -> PatchList:
    """A batch for each image, numbered from `first`; `inside` (N, h, w) says what counts."""
    masks = [None] * len(maps) if inside is None else inside[:, None]
    return PatchList(
        PatchBatch(grid[None], (first + i,), inside=mask)
        for i, (grid, mask) in enumerate(zip(maps, masks, strict=True))
    )


def bank_of(maps: list[torch.Tensor], ratio: float, seed: int = 0) -> MemoryBank:
    return MemoryBankFitter(ratio, seed=seed).fit(batches(maps))


def assert_found_again(bank: MemoryBank, maps: list[torch.Tensor]) -> None:
    """Each vector is, once, where its origin says."""
    assert bank.origins.dtype == torch.int32
    for vector, (image, row, column) in zip(bank.vectors, bank.origins.tolist(), strict=True):
        assert torch.equal(vector, maps[image][row, column])
    assert len({tuple(o) for o in bank.origins.tolist()}) == len(bank.vectors)


def test_however_batches_are_split_a_seed_gives_one_bank() -> None:
    maps = images(dim=300)
    bank, other = bank_of(maps, 0.3), bank_of(maps, 0.3, seed=1)
    joined = [PatchBatch(torch.stack(maps[:2]), (0, 1)), *batches(maps).batches[2:]]
    again = MemoryBankFitter(0.3).fit(PatchList(joined))
    assert torch.equal(bank.vectors, again.vectors)
    assert torch.equal(bank.origins, again.origins)
    assert not torch.equal(bank.vectors, other.vectors)
    assert bank.vectors.shape == (math.floor(0.3 * sum(h * w for h, w in GRIDS)), 300)
    assert_found_again(bank, maps)


class MadeInInferenceMode(PatchList):
    """Batches as a network makes them: the mode is on between them, not after the last."""

    def __iter__(self) -> Iterator[PatchBatch]:
        with torch.inference_mode():
            for batch in super().__iter__():
                yield PatchBatch(batch.embeddings.clone(), batch.images)


def test_small_memory() -> None:
    """What doesn't fit is measured beside another reading, and costs little of the covering."""
    maps = images(dim=16, grids=[(20, 20)] * 30)
    fitter = MemoryBankFitter(0.02, memory_limit=4000 * 16 * 4)
    small = fitter.fit(batches(maps))
    assert len(small.vectors) == 240
    assert_found_again(small, maps)
    whole = bank_of(maps, 0.02)
    assert not torch.equal(small.vectors, whole.vectors)
    assert small.covering_radius <= 1.1 * whole.covering_radius
    made = fitter.fit(MadeInInferenceMode(batches(maps).batches))
    assert torch.equal(made.vectors, small.vectors)


def test_patches_that_do_not_count_are_not_there() -> None:
    maps = images(grids=[(6, 5)] * 4)
    inside = torch.rand(4, 6, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    corners = ((0, 0), (0, 5), (6, 0), (6, 5))  # four tiles of one image
    batches = [PatchBatch(torch.stack(maps), (3,) * 4, corners, inside)]
    bank = MemoryBankFitter(1.0).fit(PatchList(batches))
    assert len(bank.vectors) == int(inside.sum())
    mosaic = torch.stack(maps).view(2, 2, 6, 5, 24).permute(0, 2, 1, 3, 4).reshape(12, 10, 24)
    counts = inside.view(2, 2, 6, 5).permute(0, 2, 1, 3).reshape(12, 10)
    for vector, (image, row, column) in zip(bank.vectors, bank.origins.tolist(), strict=True):
        assert image == 3
        assert counts[row, column]
        assert torch.equal(vector, mosaic[row, column])


def literal_reweighting(bank: np.ndarray, patches: np.ndarray, b: int) -> float:
    """Roth et al. 2022, eq. 6 and 7, as written."""
    best, s_star, m_star = patches[0], -1.0, 0
    for patch in patches:
        distances = [math.dist(patch, m) for m in bank]
        if min(distances) > s_star:
            best, s_star, m_star = patch, min(distances), int(np.argmin(distances))
    order = sorted(range(len(bank)), key=lambda i: math.dist(bank[i], bank[m_star]))
    total = sum(math.exp(math.dist(best, bank[i])) for i in order[:b])
    return (1 - math.exp(s_star) / total) * s_star


def test_reweighting_as_in_the_paper() -> None:
    bank, queries = bank_of(images(), 0.4), torch.stack(images(seed=6)[:2])
    scored = bank.score(queries)
    vectors, patches = bank.vectors.double().numpy(), queries.flatten(1, 2).double().numpy()
    expected = [literal_reweighting(vectors, of_image, 3) for of_image in patches]
    assert bank.image_scores(queries, scored).tolist() == pytest.approx(expected, rel=1e-4)


def test_reweighting_of_large_distances_is_finite_and_of_one_vector_changes_nothing() -> None:
    """exp(1000) overflows; the weight doesn't need it."""
    bank = MemoryBank(1000 * torch.randn(50, 4), torch.zeros(50, 3, dtype=torch.int32), 0.0)
    queries = 5000 * torch.randn(2, 3, 3, 4)
    weighted = bank.image_scores(queries, bank.score(queries))
    assert bool((weighted >= 0).all() and weighted.isfinite().all())
    alone = replace(bank, vectors=bank.vectors[:1], origins=bank.origins[:1])
    scored = alone.score(queries)
    assert torch.equal(alone.image_scores(queries, scored), scored.scores.flatten(1).amax(1))
    with pytest.raises(ValueError, match="no bank vectors"):
        alone.image_scores(queries, PatchScores(scored.scores))


def test_what_cannot_be_a_bank_is_refused() -> None:
    bank = bank_of(images(), 0.05)
    with pytest.raises(DataError, match="25 channels"):
        bank.score(torch.zeros(1, 2, 2, 25))
    with pytest.raises(DataError, match="no training patches"):
        MemoryBankFitter().fit(PatchList([]))
    maps = images()
    maps[3][1, 1, 0] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        bank_of(maps, 0.1)


@settings(max_examples=25)
@given(
    grids=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5),
    ratio=st.floats(0.01, 1),
    seed=st.integers(0, 1000),
)
def test_any_grids(grids: list[tuple[int, int]], ratio: float, seed: int) -> None:
    """Every vector is where its origin says, and a training patch is within the radius."""
    maps = images(6, grids, seed)
    bank = bank_of(maps, ratio, seed=seed)
    assert_found_again(bank, maps)
    farthest = max(float(bank.score(m[None]).scores.max()) for m in maps)
    assert farthest == pytest.approx(bank.covering_radius, rel=1e-4, abs=1e-4)


def test_a_config_names_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    maps = images(grids=[(30, 40)] * 2)
    bank, queries = bank_of(maps, ratio=0.7), torch.stack(images(grids=[(30, 40)] * 2, seed=1))
    expected = bank.score(queries).scores
    for search in ("exact", "faiss", "ivf"):
        chosen = {"search": search, "spacing_neighbours": 0}
        settings = parse_config({"model": chosen}, "a test").model.model_dump()
        loaded = scorer(bank.tensors(), settings)
        found = loaded.score(queries).scores
        assert loaded.search == search
        assert bool((found >= expected).all())
        assert search == "ivf" or torch.equal(found, expected)
        made = [f.suffix for f in tmp_path.rglob("*") if f.is_file()]
        assert made == ([".index"] if search == "ivf" else [])


def spacing_of(vectors: torch.Tensor, count: int) -> np.ndarray:
    """Each vector's mean distance to its nearest others, by scipy."""
    apart = np.sort(cdist(vectors.double(), vectors.double()), axis=1)
    return apart[:, 1 : count + 1].mean(1)


@pytest.fixture
def spaced() -> MemoryBank:
    return MemoryBankFitter(0.4, spacing_neighbours=5).fit(batches(images()))


def test_image_scores_count_rare_kinds_less_and_maps_all_alike(spaced: MemoryBank) -> None:
    """By each vector's mean distance to its nearest others."""
    apart = spacing_of(spaced.vectors, 5)
    np.testing.assert_allclose(spaced.spacing, apart, rtol=1e-4)
    patches = spaced.score(images(seed=3)[0][None])
    by = np.maximum(1, apart / apart.mean())[patches.nearest]
    assert by.max() > 1
    np.testing.assert_allclose(spaced.weighted(patches), patches.scores.numpy() / by, rtol=1e-4)
    plain = replace(spaced, spacing=None)
    assert torch.equal(plain.weighted(patches), patches.scores)


def test_held_out_banks_know_the_spacing_of_what_stands_in(spaced: MemoryBank) -> None:
    fitter = MemoryBankFitter(0.4, spacing_neighbours=5)
    folds = [(0, 1, 2), (3, 4), (5, 6)]
    for _, bank in fitter.held_out(spaced, batches(images()), folds, grouped=False):
        known = {tuple(place) for place in spaced.origins.tolist()}
        new = torch.tensor([tuple(place) not in known for place in bank.origins.tolist()])
        expected = torch.from_numpy(spacing_of(bank.vectors, 5)).float()
        torch.testing.assert_close(bank.spacing[new], expected[new], rtol=1e-4, atol=1e-4)
        assert bool((bank.spacing > 0).all())


def test_vectors_that_lie_together_have_finite_scores() -> None:
    for count in (1, 6):
        origins = torch.zeros(count, 3, dtype=torch.int32)
        bank = MemoryBank(torch.ones(count, 4), origins, 0.0, spacing_neighbours=9).spaced()
        scores = bank.weighted(bank.score(torch.zeros(1, 2, 2, 4)))
        assert scores.tolist() == [[[2, 2], [2, 2]]]


def random_bank(count: int) -> MemoryBank:
    vectors = torch.randn(count, 24, generator=torch.Generator().manual_seed(0)) + 5
    return MemoryBank(vectors, torch.zeros(count, 3, dtype=torch.int32), 0.0)


@pytest.mark.parametrize("count", [1, 4096, 9000])  # blocks hold 4,096 vectors
def test_the_bank_goes_by_in_blocks(count: int) -> None:
    scorer = random_bank(count)
    patches = torch.randn(2, 3, 5, 24, generator=torch.Generator().manual_seed(1)) + 5
    patches[0, 0, 0] = scorer.vectors[-1]
    scores, nearest = scorer.graph()(patches)
    expected = scorer.score(patches)
    torch.testing.assert_close(scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(nearest, expected.nearest)
    assert nearest.dtype == torch.int64


def test_of_equal_vectors_the_first_is_named_and_nan_stays_nan() -> None:
    scorer = random_bank(4)
    twice = MemoryBank(scorer.vectors[[0, 1, 1, 2]], scorer.origins, 0.0)
    patches = twice.vectors[None, None, 2:3].clone()
    assert twice.graph()(patches)[1].item() == 1
    scores, nearest = twice.graph()(torch.full_like(patches, torch.nan))
    assert scores.isnan().all()
    assert nearest.item() < 4


FOLDS = [(0, 1), (2, 3, 4), (5,)]


def alike(seed: int = 0) -> list[torch.Tensor]:
    """Six images of 6×5 patches; neighbours and images are alike."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 5, 12, generator=g)
    return [base + 0.3 * torch.randn(6, 5, 12, generator=g) for _ in range(6)]


@pytest.mark.parametrize("share", [None, 0.7])
def test_a_fold_leaves_nothing_behind(share: float | None) -> None:
    maps, fitter = alike(), MemoryBankFitter(0.2, projection_dim=8)
    g = torch.Generator().manual_seed(1)
    inside = None if share is None else torch.rand(6, 6, 5, generator=g) < share
    patches = batches(maps, inside=inside)
    for fold, left in fitter.held_out(fitter.fit(patches), patches, FOLDS, grouped=False):
        assert not set(left.origins[:, 0].tolist()) & set(fold)
        assert_found_again(left, maps)
        assert inside is None or bool(inside[tuple(left.origins.long().T)].all())


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5])
def test_the_others_are_covered_as_closely_by_no_more_vectors_than_it_takes(ratio: float) -> None:
    """Against greedy k-center, a pick at a time, in float64."""
    maps, fitter = alike(5), MemoryBankFitter(ratio, projection_dim=8)
    patches = batches(maps)
    bank, projection = fitter.fit(patches), fitter.selection_matrix(12)
    places = [[*place] for place in np.ndindex(6, 6, 5)]
    every = torch.cat([grid.flatten(0, 1) @ projection for grid in maps]).double()
    images_of = torch.tensor(places)[:, 0]
    vectors = (bank.vectors @ projection).double()
    nearest = torch.cdist(every, vectors).argmin(1)
    added = []
    for fold, left in fitter.held_out(bank, patches, FOLDS, grouped=False):
        gone = torch.isin(bank.origins[:, 0], torch.tensor(fold))
        uncovered = (gone[nearest] & ~torch.isin(images_of, torch.tensor(fold))).nonzero()[:, 0]
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


def test_one_fold_is_refused_and_without_memory_nothing_stands_in() -> None:
    patches, fitter = batches(alike(4)), MemoryBankFitter(0.2, projection_dim=8)
    bank = fitter.fit(patches)
    with pytest.raises(ValueError, match="two folds"):
        next(fitter.held_out(bank, patches, [tuple(range(6))], grouped=False))
    known = bank.origins.tolist()
    without_memory = replace(fitter, memory_limit=0)
    for _, left in without_memory.held_out(bank, patches, FOLDS, grouped=False):
        assert all(origin in known for origin in left.origins.tolist())


OLD = images(12, [(4, 5)] * 10)
NEW = [grid + 1.5 for grid in images(12, [(4, 5)] * 7, seed=1)]


@pytest.mark.parametrize("limit", [1 << 20, 4 * 12 * 25])
def test_a_bank_grows_until_its_radius_covers_the_new_patches(limit: int) -> None:
    fitter = MemoryBankFitter(0.2, memory_limit=limit)
    bank, new = fitter.fit(batches(OLD)), batches(NEW, first=10)
    longer = fitter.incremental(bank, 10).fit(new)
    assert torch.equal(longer.vectors[: len(bank.vectors)], bank.vectors)
    assert_found_again(longer, OLD + NEW)
    added = longer.vectors[len(bank.vectors) :]
    assert 0 < len(added) < 7 * 4 * 5
    assert longer.covering_radius == bank.covering_radius
    # With the identity as projection the radius holds among the embeddings themselves.
    flat = torch.stack(NEW).flatten(0, 2)
    assert float(distances_to_nearest(flat, longer.vectors).max()) <= bank.covering_radius * 1.001
    # Each was beyond the radius of all that were there before it.
    for i in range(len(added)):
        before = torch.cat([bank.vectors, added[:i]])
        assert float(torch.cdist(added[i : i + 1], before).min()) > bank.covering_radius * 0.999
    # What is covered adds nothing.
    again = fitter.incremental(longer, 17).fit(new)
    assert torch.equal(again.vectors, longer.vectors)


def test_a_bank_that_grew_covers_the_other_folds_without_a_folds_images() -> None:
    fitter = MemoryBankFitter(0.2)
    base, new = fitter.fit(batches(OLD)), batches(NEW, first=10)
    growing = fitter.incremental(base, 10)
    whole, folds = growing.fit(new), [(10, 11, 12), (13, 14), (15, 16)]
    repaired = 0
    for fold, bank in growing.held_out(whole, new, folds, grouped=False):
        assert not torch.is_inference_mode_enabled()
        assert not {*fold} & {*bank.origins[:, 0].tolist()}
        assert torch.equal(bank.vectors[: len(base.vectors)], base.vectors)
        assert_found_again(bank, OLD + NEW)
        others = torch.cat([NEW[i - 10].flatten(0, 1) for i in range(10, 17) if i not in fold])
        reach = float(distances_to_nearest(others, bank.vectors).max())
        assert reach <= base.covering_radius * 1.001
        kept = int((~torch.isin(whole.origins[:, 0], torch.tensor(fold))).sum())
        repaired += len(bank.vectors) - kept
    assert repaired > 0
