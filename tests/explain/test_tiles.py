from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anomaly.explain.tiles import captioned, colored, grid, resized, stacked


def test_colours_run_from_dark_to_bright_and_mark_what_is_not_finite() -> None:
    picture = colored(np.array([[0.0, 1.0, 2.0, np.nan, np.inf]]))
    assert picture.shape == (1, 5, 3)
    assert picture.dtype == np.uint8
    brightness = picture.astype(int).sum(axis=2)[0]
    assert brightness[0] < brightness[1] < brightness[2]
    assert picture[0, 3:].tolist() == [[128] * 3] * 2
    blue, yellow = picture[0, 0], picture[0, 2]
    assert blue[2] > blue[0]  # RGB, not BGR
    assert yellow[0] > yellow[2]


@pytest.mark.parametrize("value", [0.0, 3.0, np.nan])
def test_a_constant_array_is_drawn_without_warnings(value: float) -> None:
    with np.errstate(all="raise"):
        assert len(np.unique(colored(np.full((2, 2), value)).reshape(-1, 3), axis=0)) == 1


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_every_tile_is_found_where_the_grid_puts_it(n: int, columns: int, gap: int) -> None:
    tiles = [np.full((3, 2, 3), i, np.uint8) for i in range(n)]
    sheet = grid(tiles, columns, gap)
    assert sheet.shape[1] == columns * (2 + gap) + gap
    for i in range(n):
        y, x = gap + i // columns * (3 + gap), gap + i % columns * (2 + gap)
        np.testing.assert_array_equal(sheet[y : y + 3, x : x + 2], tiles[i])
    assert (sheet == 255).sum() == sheet.size - n * 18


def test_captions_and_stacks_keep_the_pictures() -> None:
    picture = np.zeros((5, 30, 3), np.uint8)
    labelled = captioned(picture, "layer1")
    np.testing.assert_array_equal(labelled[-5:], picture)
    assert (labelled[:-5] < 128).any()
    both = stacked([labelled, picture[:, :10]])
    assert both.shape == (labelled.shape[0] + 5, 30, 3)
    assert (both[-5:, 10:] == 255).all()


def test_enlarged_pixels_keep_their_edges() -> None:
    picture = np.array([[[0] * 3, [255] * 3]], np.uint8)
    np.testing.assert_array_equal(resized(picture, 2, 6), np.repeat(np.repeat(picture, 2, 0), 3, 1))
