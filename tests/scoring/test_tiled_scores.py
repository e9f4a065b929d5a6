"""The image score of a large image's tiles."""

from __future__ import annotations

import math

import pytest

from anomaly.scoring.pipeline import _TiledPatches


@pytest.mark.parametrize("scores", [[1.0, math.nan], [math.nan, 1.0], [math.nan, math.nan]])
def test_one_tile_without_a_score_leaves_the_image_without_one(scores: list[float]) -> None:
    together, apart = _TiledPatches(1, 2), _TiledPatches(1, 2)
    together.put([], [], scores)
    for score in scores:
        apart.put([], [], [score])
    assert math.isnan(together.best)
    assert math.isnan(apart.best)


def test_the_highest_tile_counts() -> None:
    tiling = _TiledPatches(2, 2)
    tiling.put([], [], [1.0, 3.0])
    tiling.put([], [], [2.0, 0.5])
    assert tiling.best == 3.0
