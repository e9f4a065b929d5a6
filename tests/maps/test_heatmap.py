"""Heatmaps: colours mean the same on every image, and marks lie where the map is high."""

import itertools

import cv2
import numpy as np
import pytest
from pixel_map import pixel_map

from anomaly.imaging.read import Image
from anomaly.maps import anomaly_map as map_module
from anomaly.maps.heatmap import OPACITY, colour_stops, display, encode_png, heatmap, overlay


def _grey(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 128, dtype=np.uint8)


def _drawn(
    picture: np.ndarray, scores: np.ndarray, threshold: float, review: float | None = None
) -> np.ndarray:
    """The heatmap of a picture of 8 bits."""
    return heatmap(Image(picture, 255.0, "rgb8", ""), pixel_map(scores), threshold, review)


def test_above_the_threshold_is_coloured_and_outlined() -> None:
    picture = _grey(100, 120)
    anomaly_map = np.zeros((100, 120), dtype=np.float32)
    anomaly_map[30:60, 40:80] = 1.5
    shown = _drawn(picture, anomaly_map, 1.0)
    changed = (shown != picture).any(-1)
    assert changed[30:60, 40:80].all()
    assert not changed[:27].any()
    assert not changed[:, 83:].any()
    assert shown[30, 60].min() > 200  # a white line, antialiased
    inside = shown[45, 60].astype(int)
    assert inside[0] > inside[2]  # inferno: warm, in RGB order


def test_what_is_for_review_is_outlined_fainter() -> None:
    picture = np.full((120, 120, 3), 90, np.uint8)
    scores = np.zeros((120, 120), np.float32)
    scores[20:60, 20:60] = 9.0
    scores[80:100, 80:100] = 12.0
    plain, seen = _drawn(picture, scores, 10.0), _drawn(picture, scores, 10.0, 8.0)
    changed = (plain != seen).any(axis=2)
    assert changed[20, 20:60].all()
    assert not changed[26:54, 26:54].any()
    assert (seen[20, 40] > plain[20, 40]).all()
    assert (seen[20, 40] < 255).all()
    assert (seen[80, 90] > 200).all()  # the own line of the threshold
    np.testing.assert_array_equal(_drawn(picture, scores, 10.0, 10.0), plain)


def test_strips_leave_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(0).uniform(6, 14, (120, 100)).astype(np.float32)
    scores = cv2.GaussianBlur(scores, (0, 0), 9)
    scores[:5] = np.nan
    limit = float(np.nanquantile(scores, 0.7))
    whole = _drawn(_grey(120, 100), scores, limit, 0.98 * limit)
    monkeypatch.setattr(map_module, "_STRIP_PIXELS", 40 * 100)
    np.testing.assert_array_equal(_drawn(_grey(120, 100), scores, limit, 0.98 * limit), whole)


def test_lines_show_on_any_ground() -> None:
    for side, ground in itertools.product((100, 900), (0, 128, 255)):
        picture = np.full((side, side, 3), ground, np.uint8)
        scores = np.zeros((side, side), np.float32)
        scores[side // 4 : side // 2, side // 4 : side // 2] = 7.4  # as yet without a colour
        np.testing.assert_array_equal(_drawn(picture, scores, 10.0), picture)
        assert np.ptp(_drawn(picture, scores, 10.0, 7.0).astype(int)) > 60
        assert np.ptp(_drawn(picture, scores / 7 * 10, 10.0).astype(int)) > 150


def test_equal_scores_look_equal_whatever_else_is_in_the_image() -> None:
    picture = _grey(50, 50)
    one = np.zeros((50, 50), dtype=np.float32)
    one[10:20, 10:20] = 0.9
    two = one.copy()
    two[30:40, 30:40] = 5.0
    np.testing.assert_array_equal(
        _drawn(picture, one, 1.0)[:25, :25], _drawn(picture, two, 1.0)[:25, :25]
    )


def test_what_the_network_did_not_see_is_darkened() -> None:
    anomaly_map = np.zeros((20, 20), dtype=np.float32)
    anomaly_map[:5] = np.nan
    shown = _drawn(_grey(20, 20), anomaly_map, 1.0)
    assert (shown[:5] == 64).all()
    assert (shown[5:] == 128).all()


def test_display_uses_the_declared_depth() -> None:
    for bits, kind in ((8, np.uint8), (12, np.uint16), (16, np.uint16)):
        top = 2**bits - 1
        pixels = np.array([[[top] * 3, [round(top / 2)] * 3]], kind)
        white, grey = display(Image(pixels, float(top), "", ""))[0].astype(int)
        assert white.tolist() == [255, 255, 255]
        assert abs(grey[0] - 128) <= 1


def test_colours_grow_evenly_lighter() -> None:
    """Equal steps of the score are about equal steps of lightness (CIELAB L*), always upwards."""
    stops = np.array(colour_stops(52), np.float32)
    lab = cv2.cvtColor(stops[None, :, :3] / 255, cv2.COLOR_RGB2LAB)[0, :, 0]
    steps = np.diff(lab)
    assert (steps > 0).all()
    assert steps.max() < 2.5 * np.median(steps)
    opacity = stops[:, 3]
    assert (np.diff(opacity) >= 0).all()
    assert (opacity[0], opacity[-1]) == (0, 1)


def test_the_layer_over_the_picture_is_the_overlay() -> None:
    rng = np.random.default_rng(1)
    picture = rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)
    anomaly_map = rng.uniform(0, 0.99, (50, 70)).astype(np.float32)
    rgba = overlay(anomaly_map, 1.0).astype(np.float64)
    opacity = rgba[..., 3:] / 255 * OPACITY
    blended = rgba[..., :3] * opacity + picture * (1 - opacity)
    assert np.abs(blended - _drawn(picture, anomaly_map, 1.0)).max() <= 3
    anomaly_map[0, 0] = np.nan
    assert overlay(anomaly_map, 1.0)[0, 0].tolist() == [0, 0, 0, 128]


@pytest.mark.parametrize("shape", [(13, 17, 3), (13, 17), (1, 5), (9, 1)])
def test_png_round_trip(shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = np.frombuffer(encode_png(picture), np.uint8)
    decoded = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(decoded[..., ::-1] if len(shape) == 3 else decoded, picture)
