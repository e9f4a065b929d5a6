from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anomaly.explain.evidence import patch_box
from anomaly.explain.pictures import MARK, Box, absent, fitted, patch_crop
from anomaly.imaging.geometry import AxisView, View

VIEW = View(AxisView(300, 100, 10, 80), AxisView(200, 100, 10, 80))


def test_a_patch_box_is_in_the_images_own_pixels() -> None:
    # 80 network pixels are 10 patches of 8; the crop starts at 10; 3 (2) pixels each.
    assert patch_box(VIEW, (10, 10), 0, 0) == Box(30, 20, 54, 36)
    box = patch_box(VIEW, (10, 10), 9, 2)
    assert (box.top, box.left, box.bottom, box.right) == pytest.approx((246, 52, 270, 68))


@given(st.integers(0, 9), st.integers(0, 9))
def test_boxes_tile_what_the_network_sees(row: int, column: int) -> None:
    box = patch_box(VIEW, (10, 10), row, column)
    if row < 9:
        assert patch_box(VIEW, (10, 10), row + 1, column).top == pytest.approx(box.bottom)
    assert 30 <= box.top < box.bottom <= 270 + 1e-9
    assert 20 <= box.left < box.right <= 180 + 1e-9


@given(st.integers(0, 90), st.integers(0, 110))
def test_a_crop_shows_the_patch_in_its_middle_with_a_frame(top: int, left: int) -> None:
    picture = np.full((100, 120, 3), 90, np.uint8)
    box = Box(top, left, top + 10, left + 10)
    picture[top : top + 10, left : left + 10] = (0, 200, 0)
    crop = patch_crop(picture, box, 140)  # 70 pixels of the picture, twice as large
    assert crop.shape == (140, 140, 3)
    assert (crop[64:76, 64:76] == (0, 200, 0)).all()
    frame = (crop == MARK).all(axis=2)
    rows, columns = np.flatnonzero(frame.any(axis=1)), np.flatnonzero(frame.any(axis=0))
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (59, 59, 80, 80)
    if top < 20:
        assert (crop[:10] == 255).all()  # beyond the border


def test_large_boxes_are_shrunk_and_the_picture_stays_as_it_is() -> None:
    picture = np.random.default_rng(0).integers(0, 255, (900, 900, 3), dtype=np.uint8)
    before = picture.copy()
    assert patch_crop(picture, Box(400, 400, 500, 500), 50).shape == (50, 50, 3)
    np.testing.assert_array_equal(picture, before)


@pytest.mark.parametrize(("shape", "expected"), [((40, 80), (60, 120)), ((800, 400), (120, 60))])
def test_pictures_fit_the_page(shape: tuple[int, int], expected: tuple[int, int]) -> None:
    picture = np.full((*shape, 3), 90, np.uint8)
    assert fitted(picture, 120).shape == (*expected, 3)
    assert (fitted(picture, 120) == 90).all()


@pytest.mark.parametrize("reason", ["not found", "changed since training"])
def test_what_is_absent_says_why(reason: str) -> None:
    tile = absent(reason)
    assert tile.shape == (150, 150, 3)
    assert (tile < 150).any()
