"""The image score of a large image's tiles."""

import math

import pytest

from anomaly.scoring.pipeline import _TiledPatches


@pytest.mark.parametrize("batches", [[[1.0, 3.0, 2.0]], [[1.0, 3.0], [2.0]]])
def test_the_highest_tile_counts_and_one_without_a_score_leaves_the_image_without_one(
    batches: list[list[float]],
) -> None:
    tiling = _TiledPatches(1, 3)
    for scores in batches:
        tiling.put([], [], scores)
    assert tiling.best == 3.0
    tiling.put([], [], [math.nan])
    tiling.put([], [], [1.0])
    assert math.isnan(tiling.best)
