from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anomaly.explain.pictures import (
    beside,
    colored,
    glowing,
    resized,
    shortened,
    signed,
    stacked,
    text_line,
)


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


def test_titles_and_stacks_keep_the_pictures() -> None:
    picture = np.zeros((5, 130, 3), np.uint8)
    titled = beside([("layer1", picture)], gap=2, narrowest=20)
    assert titled.shape == (18 + 5 + 2, 130 + 4, 3)
    np.testing.assert_array_equal(titled[18:23, 2:132], picture)
    assert (titled[:18] < 128).any()
    both = stacked([titled, picture[:, :10]])
    assert both.shape == (titled.shape[0] + 5, 134, 3)
    assert (both[-5:, 10:] == 255).all()


def _ink(picture: np.ndarray) -> np.ndarray:
    return np.flatnonzero((picture < 128).all(axis=2).any(axis=0))


@pytest.mark.parametrize("size", [(420, 167), (20, 3), (3, 900)])
def test_titles_stay_above_their_own_pictures_and_are_whole(size: tuple[int, int]) -> None:
    """Tall, tiny and wide pictures: no title is cut, none runs into its neighbour."""
    titles = ["what the network sees of its worst tile", "pixels that move the score: |gradient|"]
    blank = np.full((*size, 3), 200, np.uint8)
    both = beside([(title, blank) for title in titles], gap=8)
    words = [
        sum((text_line(word, 4000) < 128).all(axis=2).sum() for word in title.split())
        for title in titles
    ]
    column = (both.shape[1] - 8) // 2
    for i, ink in enumerate(words):
        panel = both[: -size[0] - 8, 8 + i * column : 8 + (i + 1) * column]
        assert (panel < 128).all(axis=2).sum() == pytest.approx(ink, rel=0.1)
        assert _ink(panel).max() < column - 8  # the gap stays free
    assert (both[-size[0] - 8 : -8] == 200).all(axis=2).sum() == 2 * size[0] * size[1]


def test_narrow_pictures_are_widened_for_their_title() -> None:
    narrow = beside([("channel 1234", np.full((120, 48, 3), 200, np.uint8))], narrowest=96)
    wide = beside([("channel 1234", np.full((120, 400, 3), 200, np.uint8))])
    assert narrow.shape[0] == wide.shape[0]
    assert (narrow[:18] < 128).sum() == (wide[:18] < 128).sum()


@given(st.text("abc 0123_-", min_size=1, max_size=120), st.integers(60, 400))
def test_shortened_text_fits_and_keeps_both_ends(text: str, width: int) -> None:
    short = shortened(text, width)
    ink = _ink(text_line(short, 4000))
    assert ink.size == 0 or ink.max() < width
    if short != text:
        beginning, _, end = short.partition("...")
        assert text.startswith(beginning)
        assert text.endswith(end)
        assert end


def test_enlarged_pixels_keep_their_edges() -> None:
    picture = np.array([[[0] * 3, [255] * 3]], np.uint8)
    np.testing.assert_array_equal(resized(picture, 2, 6), np.repeat(np.repeat(picture, 2, 0), 3, 1))


def test_what_is_high_glows_and_what_is_low_stays_grey() -> None:
    picture = np.full((40, 60, 3), (200, 100, 0), np.uint8)
    values = np.zeros((4, 6))
    values[2, 3] = 1
    shown = glowing(picture, values)
    assert shown.shape == picture.shape
    spread = np.ptp(shown.astype(int), axis=2)
    assert spread[5, 5] == 0  # grey
    assert spread[25, 35] > 50
    assert shown[25, 35].sum() > shown[5, 5].sum()


def test_signed_values_lie_around_mid_grey() -> None:
    values = np.array([[[-1.0, 0.0, 1.0], [-0.5, 0.5, 2.0]]])
    shown = signed(values)
    assert shown[0, 0, 1] == 128
    assert shown[0, 0, 0] < 128 < shown[0, 0, 2]
    assert (signed(np.zeros((2, 2, 3))) == 128).all()
