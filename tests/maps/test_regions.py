"""Regions reach as far as defects do, and agree with SciPy's labels."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pixel_map import pixel_map
from scipy import ndimage

from anomaly.imaging.geometry import Sizing
from anomaly.maps import anomaly_map as marked
from anomaly.maps.anomaly_map import (
    FAINT,
    MARKED,
    SourceMap,
    marked_regions,
    outlined_areas,
    predicted_mask,
)

_EIGHT = np.ones((3, 3))
_PITCH = 16  # original pixels of a patch below: 512 are seen at 256, with a patch for each 8


def _level(scores: np.ndarray, threshold: float) -> np.ndarray:
    """`SourceMap.level` of a map with one patch a pixel, by SciPy."""
    usual = min(np.nanmedian(scores), threshold)
    counted = np.nan_to_num(scores, nan=-np.inf)
    peak = ndimage.maximum_filter(counted, 5, mode="constant", cval=-np.inf)
    return usual + 0.6 * (np.maximum(peak, threshold) - usual)


def _expected_mask(scores: np.ndarray, threshold: float) -> np.ndarray:
    labels, _ = ndimage.label(scores > _level(scores, threshold), _EIGHT)
    with_peak = np.unique(labels[scores > threshold])
    return np.isin(labels, with_peak[with_peak > 0])


def _expected_regions(scores: np.ndarray, mask: np.ndarray) -> set[tuple[float, ...]]:
    """Of each region x, y, width, height, area, peak score and the peak's x and y."""
    labels, _ = ndimage.label(mask, _EIGHT)
    expected = set()
    for number, (rows, columns) in enumerate(ndimage.find_objects(labels), 1):
        inside = labels == number
        y, x = ndimage.maximum_position(scores, labels, number)
        size = columns.stop - columns.start, rows.stop - rows.start
        peak = float(scores[inside].max()), int(x), int(y)
        expected.add((columns.start, rows.start, *size, int(inside.sum()), *peak))
    return expected


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.floats(0.01, 1),
    st.integers(1, 500),
)
def test_masks_and_regions_are_scipys(
    seed: int, size: tuple[int, int], threshold: float, strip: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = ndimage.gaussian_filter(rng.random(size), rng.uniform(0, 3)).astype(np.float32)
    scores *= np.float32(rng.uniform(1, 3))
    scores[rng.random(size) < 0.1] = np.nan
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(marked, "_STRIP_PIXELS", strip)
        mask = predicted_mask(pixel_map(scores), threshold)
        regions = marked_regions(mask, pixel_map(scores))
    if not (scores > threshold).any():
        assert not mask.any()
        assert regions == ()
        return
    np.testing.assert_array_equal(mask, 255 * _expected_mask(scores, threshold))
    measured = {astuple(region)[:8] for region in regions}
    assert measured == _expected_regions(scores, mask > 0)
    assert {(r.width_uncertainty, r.height_uncertainty) for r in regions} == {(1, 1)}
    assert [r.peak_score for r in regions] == sorted((r.peak_score for r in regions), reverse=True)


def _covered(start: float, stop: float) -> np.ndarray:
    """How much of each of 32 patches along an axis lies between two original pixels."""
    edges = _PITCH * np.arange(33)
    return np.clip(np.minimum(edges[1:], stop) - np.maximum(edges[:-1], start), 0, None) / _PITCH


def _map_of(x: float, y: float, width: float, height: float, strength: float) -> SourceMap:
    """The map of a defect on a part whose patches score 1 elsewhere, as a detector makes it."""
    share = np.outer(_covered(y, y + height), _covered(x, x + width))
    view = Sizing(None, None, 256, 16).view((512, 512))
    return SourceMap((1 + strength * share).astype(np.float32), view, 4.0, 0.5, None)


SIZES = st.floats(_PITCH, 160)


@settings(max_examples=50)
@given(SIZES, SIZES, st.floats(0, 1), st.floats(0, 1), st.floats(3, 9), st.floats(1.2, 1.5))
def test_a_defect_is_measured_to_within_a_patch(
    width: float, height: float, right: float, down: float, strength: float, threshold: float
) -> None:
    """Whatever it scores and wherever the threshold lies."""
    x, y = 24 + right * (464 - width), 24 + down * (464 - height)
    found = _map_of(x, y, width, height, strength)
    (region,) = marked_regions(predicted_mask(found, threshold), found)
    assert (region.width_uncertainty, region.height_uncertainty) == (_PITCH, _PITCH)
    # Within a patch; each of the two ends lies on a whole pixel, which adds up to one.
    assert region.width == pytest.approx(width, abs=_PITCH + 2)
    assert region.height == pytest.approx(height, abs=_PITCH + 2)
    assert region.x + region.width / 2 == pytest.approx(x + width / 2, abs=_PITCH / 2)
    assert region.y + region.height / 2 == pytest.approx(y + height / 2, abs=_PITCH / 2)


def test_two_defects_of_unequal_strength_keep_their_own_sizes() -> None:
    strong, weak = _map_of(64, 64, 48, 32, 8.0), _map_of(256, 64, 64, 128, 1.0)
    both = SourceMap(np.maximum(strong.scores, weak.scores), strong.view, 4.0, 0.5, None)
    first, second = marked_regions(predicted_mask(both, 1.5), both)
    assert (first.width, first.height) == pytest.approx((48, 32), abs=_PITCH)
    assert (second.width, second.height) == pytest.approx((64, 128), abs=_PITCH)


def test_an_image_that_is_anomalous_all_over_is_marked_all_over() -> None:
    scores = np.full((20, 30), 5.0)
    assert (predicted_mask(pixel_map(scores), 2.0) == 255).all()


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_the_fainter_line_is_around_what_is_for_review(scale: float) -> None:
    scores = np.zeros((60, 80))
    scores[10:20, 10:20], scores[40:50, 50:60] = 12, 9
    scores[:3] = np.nan
    found = pixel_map(scale * scores)
    areas = outlined_areas(found, 10.0, 8.0)
    peaks = areas[15, 15], areas[45, 55]
    assert peaks == {0.3: (0, 0), 1.0: (MARKED, FAINT), 3.0: (MARKED, MARKED)}[scale]
    np.testing.assert_array_equal(areas == MARKED, predicted_mask(found, 10.0) > 0)
    np.testing.assert_array_equal(areas > 0, predicted_mask(found, 8.0) > 0)
    rejected = outlined_areas(found, 10.0, 8.0, rejected=True)
    if areas.any():
        np.testing.assert_array_equal(rejected, areas)
    else:  # a rejected image has a line around its highest place
        np.testing.assert_array_equal(rejected > 0, scores == 12)
        assert rejected.max() == FAINT


def test_length_and_thickness_are_those_of_a_turned_box() -> None:
    scores = np.zeros((60, 60), np.float32)
    along = np.arange(30)
    for across in range(4):
        scores[10 + along + across // 2, 10 + along - (across + 1) // 2] = 1.0
    (region,) = marked_regions((scores > 0).astype(np.uint8), pixel_map(scores))
    assert region.length == pytest.approx(29 * 2**0.5 + 1, abs=1.5)
    assert region.thickness == pytest.approx(3, abs=1)
