"""Legends: the colours of the heatmap at the scores they stand for, and pictures kept whole."""

import cv2
import numpy as np
import pytest

from anomaly.maps.heatmap import colour_bar, overlay, with_colour_bar


@pytest.mark.parametrize("height", [40, 400, 2000])
def test_the_bar_has_the_colours_that_the_heatmap_has(height: int) -> None:
    bar = colour_bar(height, 7.0, "distance")
    assert bar.shape[0] == height
    size = height / 400
    column = bar[:, round(34 * size) // 2 + round(10 * size)].astype(int)
    grey = np.full((1, 1, 3), 128, np.uint8)
    margin = round(34 * size)
    length = height - 2 * margin
    for share in (0.02, 0.3, 0.75, 0.98):
        score = np.full((1, 1), 14.0 * share, np.float32)
        seen = overlay(grey, score, 7.0)[0, 0] if share <= 0.5 else _coloured(14.0 * share)
        found = column[margin + round((1 - share) * (length - 1))]
        assert np.abs(found - seen.astype(int)).max() <= (40 if height == 40 else 12)


def _coloured(score: float) -> np.ndarray:
    """The overlay's colour in the middle of a wide area, away from its contour."""
    picture = np.full((41, 41, 3), 128, np.uint8)
    return np.asarray(overlay(picture, np.full((41, 41), score, np.float32), 7.0)[20, 20])


def test_side_by_side_keeps_every_pixel() -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
    marked = cv2.flip(picture, 0)
    plate = with_colour_bar(picture, np.asarray(marked, np.uint8), 3.0, "distance")
    assert plate.shape[0] == 60
    np.testing.assert_array_equal(plate[:, :80], picture)
    np.testing.assert_array_equal(plate[:, 82:162], marked)


def test_a_caption_fits_above() -> None:
    picture = np.full((300, 200, 3), 90, np.uint8)
    plain = with_colour_bar(picture, picture, 4.0, "distance", 3.0)
    assert not np.array_equal(plain, with_colour_bar(picture, picture, 4.0, "distance"))
    for caption in ("reject: score 5", "x" * 400):
        plate = with_colour_bar(picture, picture, 4.0, "distance", 3.0, caption)
        head = plate.shape[0] - 300
        assert 10 < head < 40
        np.testing.assert_array_equal(plate[head:], plain)
        assert plate[:head].min() < 200
