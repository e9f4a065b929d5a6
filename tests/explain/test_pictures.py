"""Pictures of explanations: colours, titles, and crops of patches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.explain import saliency as pictures
from anomaly.explain.evidence import MARK, patch_box, patch_crop
from anomaly.imaging.geometry import AxisView, View

VIEW = View((AxisView(300, 100, 10, 80),), (AxisView(200, 100, 10, 80),))


def test_colours_run_from_dark_to_bright() -> None:
    blue, green, yellow = pictures.colored(np.array([[0.0, 1.0, 2.0]]))[0].astype(int)
    assert blue.sum() < green.sum() < yellow.sum()
    assert blue[2] > blue[0]  # RGB, not BGR
    assert yellow[0] > yellow[2]
    with np.errstate(all="raise"):
        assert len(np.unique(pictures.colored(np.full((2, 2), 3.0)).reshape(-1, 3), axis=0)) == 1


def test_what_is_high_glows() -> None:
    values = np.zeros((4, 6))
    values[2, 3] = 1
    shown = pictures.glowing(np.full((40, 60, 3), (200, 100, 0), np.uint8), values)
    assert shown.shape == (40, 60, 3)
    spread = np.ptp(shown.astype(int), axis=2)
    assert spread[5, 5] == 0  # grey
    assert spread[25, 35] > 50
    assert shown[25, 35].sum() > shown[5, 5].sum()


def ink(picture: np.ndarray) -> np.ndarray:
    """The columns that text is in."""
    return np.flatnonzero((picture < 128).all(axis=2).any(axis=0))


@pytest.mark.parametrize("size", [(420, 167), (20, 3), (3, 900)])
def test_titles_stay_above_their_own_pictures_and_are_whole(size: tuple[int, int]) -> None:
    """Tall, tiny and wide pictures: no title is cut, none runs into its neighbour."""
    titles = ["what the network sees of its worst tile", "pixels that move the score: |gradient|"]
    blank = np.full((*size, 3), 200, np.uint8)
    both = pictures.beside([(title, blank) for title in titles], gap=8)
    edges = np.cumsum([8, *(pictures.beside([(title, blank)]).shape[1] - 8 for title in titles)])
    for i, title in enumerate(titles):
        words = [(pictures.text_line(word, 4000) < 128).all(axis=2).sum() for word in title.split()]
        panel = both[:18, edges[i] : edges[i + 1]]
        assert (panel < 128).all(axis=2).sum() == pytest.approx(sum(words), rel=0.1)
        assert ink(panel).max() < panel.shape[1] - 8  # the gap stays free
    assert (both[-size[0] - 8 : -8] == 200).all(axis=2).sum() == 2 * size[0] * size[1]
    under = pictures.stacked([both, blank[:, :2]])
    assert under.shape == (both.shape[0] + size[0], both.shape[1], 3)
    assert (under[-size[0] :, 2:] == 255).all()


def test_a_patch_box_is_in_the_images_own_pixels() -> None:
    # 80 network pixels are 10 patches of 8; the crop starts at 10; 3 (2) pixels each.
    assert patch_box(VIEW, (10, 10), 0, 0) == (30, 20, 54, 36)
    box = patch_box(VIEW, (10, 10), 9, 2)
    assert box == pytest.approx((246, 52, 270, 68))


@settings(max_examples=30)
@given(st.integers(0, 90), st.integers(0, 110))
def test_a_crop_shows_the_patch_in_its_middle_with_a_frame(top: int, left: int) -> None:
    picture = np.full((100, 120, 3), 90, np.uint8)
    picture[top : top + 10, left : left + 10] = (0, 200, 0)
    before = picture.copy()
    box = (top, left, top + 10, left + 10)
    crop = patch_crop(picture, box, 140)  # 70 pixels of the picture, twice as large
    assert crop.shape == (140, 140, 3)
    assert (crop[64:76, 64:76] == (0, 200, 0)).all()
    frame = (crop == MARK).all(axis=2)
    rows, columns = np.flatnonzero(frame.any(axis=1)), np.flatnonzero(frame.any(axis=0))
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (59, 59, 80, 80)
    if top < 20:
        assert (crop[:10] == 255).all()  # beyond the border
    assert patch_crop(picture, box, 50).shape == (50, 50, 3)  # shrunk
    np.testing.assert_array_equal(picture, before)
