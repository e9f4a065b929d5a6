"""Packed patches as each bank sees them, patch by patch and part by part."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from packed_patches import COARSE, FINE, coarse_of, halved, in_batches, random_packed
from patch_lists import PatchList

from anomaly.scorers.patchcore.bank_pair import doubled
from anomaly.scorers.patchcore.levels import Coarse, Fine, Level
from anomaly.scorers.patches import PatchBatch, PatchSet, PointsOf, Result

# Turned copies of tiles, with rows from 65,536 times their turn on.
CORNERS = ((0, 0), (6, 12), (3 * 65536, 0), (7 * 65536 + 18, 4))
# The same where grids have half as many rows and columns.
HALVED = ((0, 0), (3, 6), (3 * 65536, 0), (7 * 65536 + 9, 2))


def _inside(images: int, grid: tuple[int, int], share: float, seed: int = 0) -> torch.Tensor:
    return torch.rand(images, *grid, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("share", [None, 0.0, 0.05, 0.3, 1.0])
def test_views_of_a_batch(share: float | None) -> None:
    embeddings = random_packed(4)
    inside = None if share is None else _inside(4, (6, 4), share)
    batch = PatchBatch(embeddings, (3, 3, 7, 9), CORNERS, inside)
    fine, coarse = Fine(FINE)(batch), Coarse(FINE)(batch)
    assert torch.equal(fine.embeddings, embeddings[..., :FINE])
    assert (fine.images, fine.corners, fine.inside) == (batch.images, CORNERS, inside)
    torch.testing.assert_close(coarse.embeddings, coarse_of(embeddings).float())
    assert (coarse.images, coarse.corners) == (batch.images, HALVED)
    if inside is None:
        assert coarse.inside is None
    else:
        assert coarse.inside is not None
        assert coarse.inside.dtype == torch.bool
        assert torch.equal(coarse.inside, halved(inside))
    plain = PatchBatch(embeddings, (3, 3, 7, 9))
    assert (Coarse(FINE)(plain).corners, Fine(FINE)(plain).corners) == (None, None)


def test_coarse_patches_count_where_they_move_a_score_that_counts() -> None:
    """Each patch of a grid counts alone once; each coarse score is moved once."""
    height, width = grid = (6, 8)
    inside = torch.eye(height * width, dtype=torch.bool).view(-1, *grid)
    batch = PatchBatch(torch.zeros(len(inside), *grid, FINE + 1), tuple(range(48)), inside=inside)
    counted = Coarse(FINE)(batch).inside
    assert counted is not None
    for row in range(height // 2):
        for column in range(width // 2):
            scores = torch.ones(1, height // 2, width // 2)
            before = doubled(scores)
            scores[0, row, column] += 1
            moved = (doubled(scores) != before).flatten()
            assert torch.equal(counted[:, row, column], moved)


@pytest.mark.parametrize("view", [Fine(FINE), Coarse(FINE)], ids=["fine", "coarse"])
def test_a_level_is_the_packed_patches_seen(view: Fine | Coarse) -> None:
    inside = _inside(5, (6, 4), 0.6)
    batches = in_batches(random_packed(5), size=2, inside=inside)
    level = Level(batches, view)
    for _ in range(2):  # it can be read again
        for found, batch in zip(level, batches, strict=True):
            _same(found, view(batch))
    some = list(level.only({1, 4}))
    assert [batch.images for batch in some] == [(1,), (4,)]
    for found, batch in zip(some, batches.only({1, 4}), strict=True):
        _same(found, view(batch))
    matrices: list[int] = []

    def matrix_of(channels: int) -> torch.Tensor:
        matrices.append(channels)
        return torch.arange(channels * 3).view(channels, 3).float().sin()

    points = list(level.projected(PointsOf(matrix_of)))
    assert matrices == [FINE if isinstance(view, Fine) else COARSE + FINE]
    assert [image for image, _ in points] == [0, 1, 2, 3, 4]
    for image, found in points:
        batch = view(batches.batches[image // 2])
        assert batch.inside is not None
        kept = batch.embeddings[image % 2][batch.inside[image % 2]]
        torch.testing.assert_close(found, kept @ matrix_of(kept.shape[1]))


def _same(found: PatchBatch, expected: PatchBatch) -> None:
    assert torch.equal(found.embeddings, expected.embeddings)
    assert (found.images, found.corners) == (expected.images, expected.corners)
    assert found.inside is not None
    assert expected.inside is not None
    assert torch.equal(found.inside, expected.inside)


def test_a_level_counts_its_own_patches() -> None:
    batches = in_batches(random_packed(5), size=2)
    for view, count in ((Fine(FINE), 5 * 24), (Coarse(FINE), 5 * 6)):
        level = Level(batches, view)
        assert level.count == count
        assert sum(batch.embeddings[..., 0].numel() for batch in level) == count
        assert level.only({0, 3}).count == count * 2 // 5


class _Elsewhere(PatchList):
    """Patches in parts that functions are sent to, as on a cluster."""

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        for batch in self.batches:
            yield pickle.loads(pickle.dumps(function))(PatchList([batch]))


def _shapes(patches: PatchSet) -> list[tuple[Sequence[int], int]]:
    return [(batch.embeddings.shape, patches.count) for batch in patches]


def test_functions_of_a_level_are_sent_to_where_the_patches_are() -> None:
    batches = _Elsewhere(in_batches(random_packed(5), size=2).batches)
    fine = list(Level(batches, Fine(FINE)).each(_shapes))
    assert fine == [[((n, 6, 4, FINE), 24 * n)] for n in (2, 2, 1)]
    coarse = list(Level(batches, Coarse(FINE)).each(_shapes))
    assert coarse == [[((n, 3, 2, COARSE + FINE), 6 * n)] for n in (2, 2, 1)]


def test_views_are_compared_by_what_they_are() -> None:
    """Kept points are found by their view, which may have come from another process."""
    for view in (Fine(FINE), Coarse(FINE)):
        assert pickle.loads(pickle.dumps(view)) == view
        assert view != type(view)(FINE + 1)
    assert Fine(FINE) != Coarse(FINE)
