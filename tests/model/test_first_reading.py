"""Points that the first reading keeps: found by what a bank sees and its matrix, of all files."""

import pickle
from pathlib import Path

import pytest
import torch
from packed_patches import COARSE, FINE, coarse_batches, fine_batches, in_batches, random_packed
from patch_lists import PatchList

from anomaly.model.first_reading import KeptPoints, kept_by, matrix_hash
from anomaly.scorers.patchcore.levels import Coarse, Fine
from anomaly.scorers.patches import PointsOf

VIEWS = (Fine(FINE), Coarse(FINE), None)


def _matrix(channels: int) -> torch.Tensor:
    return torch.randn(channels, 5, generator=torch.Generator().manual_seed(channels))


def _kept(folder: Path, batches: PatchList) -> list[KeptPoints]:
    kept = [KeptPoints(folder, PointsOf(_matrix, view), shared=True) for view in VIEWS]
    for batch in batches:
        for one in kept:
            written = one.add(batch)
            assert written == sum(4 * 5 * len(some) for some in _counted(one, batch))
    return kept


def _counted(kept: KeptPoints, batch: object) -> list[torch.Tensor]:
    seen = PatchList([batch])  # type: ignore[list-item]
    if isinstance(kept.view, Coarse):
        seen = coarse_batches(seen)
    elif isinstance(kept.view, Fine):
        seen = fine_batches(seen)
    return list(seen.batches[0].counted())


@pytest.mark.parametrize("masked", [False, True])
def test_points_of_several_views_and_shards_are_told_apart(tmp_path: Path, masked: bool) -> None:
    inside = None
    if masked:
        inside = torch.rand(6, 6, 4, generator=torch.Generator().manual_seed(0)) < 0.1
        inside[1] = False  # a tile that lies outside the region
    batches = in_batches(random_packed(6), inside=inside)
    # Of the first shard no image can be used.
    shards = [PatchList([]), batches.only(range(4)), batches.only(range(4, 6))]
    here = [one for shard in shards for one in _kept(tmp_path, shard)]
    there = pickle.loads(pickle.dumps(here))
    for k, (view, channels) in enumerate(
        zip(VIEWS, (FINE, COARSE + FINE, FINE + COARSE // 4), strict=True)
    ):
        assert {one.channels for one in here[k::3]} == {channels, 0}
        for all_of_them in (here, there):
            found = kept_by(all_of_them, PointsOf(_matrix, view))
            assert found == all_of_them[k::3]
            points = [piece for one in found for piece in one.read(range(6))]
            wanted = [some @ _matrix(channels) for b in batches for some in _counted(here[k], b)]
            assert [i for i, _ in points] == [i for i, some in enumerate(wanted) if len(some)]
            for image, some in points:
                torch.testing.assert_close(some, wanted[image])
        assert kept_by(here, PointsOf(lambda d: 2 * _matrix(d), view)) == []
    assert kept_by(here, PointsOf(_matrix, Fine(FINE - 1))) == []
    assert kept_by([], PointsOf(_matrix)) == []
    assert kept_by(here[:3], PointsOf(_matrix)) == []
    for one in here:
        one.close()


def test_a_matrix_is_asked_for_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def matrix_of(channels: int) -> torch.Tensor:
        asked.append(channels)
        return _matrix(channels)

    kept = KeptPoints(tmp_path, PointsOf(matrix_of, Coarse(FINE)), shared=False)
    for batch in in_batches(random_packed(6)):
        kept.add(batch)
    assert asked == [COARSE + FINE]
    assert kept.made_with == matrix_hash(_matrix(COARSE + FINE))
    kept.close()
