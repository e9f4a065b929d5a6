"""Maps against SciPy and PyTorch; marks come back where they were planted."""

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import most_bytes
from scipy.ndimage import gaussian_filter, maximum_filter
from torch.nn import functional as F

from anomaly.imaging.alignment import Motion, Pose
from anomaly.imaging.geometry import AxisView, Polygons, Region, Sizing, View
from anomaly.maps.anomaly_map import SourceMap, source_map, without_halo
from anomaly.scoring.model import image_scores, network_map


def test_network_map_is_bilinear_and_scipys_gaussian() -> None:
    for grid in ((28, 28), (14, 20), (3, 2), (1, 5)):
        scores = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0))
        size = (grid[0] * 8, grid[1] * 8)
        up = F.interpolate(scores[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
        torch.testing.assert_close(network_map(scores, size, 0.0), up, atol=1e-6, rtol=0)
        expected = gaussian_filter(up.double().numpy(), sigma=(0, 4, 4))
        np.testing.assert_allclose(network_map(scores, size, 4.0), expected, atol=2e-6)


def test_halo_is_damped_by_the_share_of_the_highest_of_nine() -> None:
    scores = np.random.default_rng(1).random((2, 7, 9), dtype=np.float32)
    highest = maximum_filter(scores, size=(1, 3, 3), mode="nearest")
    for damping in (0.5, 2.0):
        expected = scores * (scores / highest) ** damping
        for given_ in (scores, torch.from_numpy(scores)):
            np.testing.assert_allclose(without_halo(given_, damping), expected, rtol=1e-6)
    assert without_halo(scores, 0) is scores


def test_damping_keeps_peaks_plateaus_zeros_and_what_does_not_count() -> None:
    scores = np.full((5, 6), 2, np.float32)
    scores[:, 4:] = 0
    scores[2, 0] = np.nan
    np.testing.assert_array_equal(without_halo(scores, 0.5), scores)
    beside = np.array([[np.nan, 4, 1, 0]], np.float32)
    np.testing.assert_allclose(without_halo(beside, 0.5), [[np.nan, 4, 0.5, 0]])


def test_patches_of_two_tiles_are_no_neighbours() -> None:
    tiles = np.random.default_rng(2).random((2, 3, 4, 5), dtype=np.float32)
    mosaic = tiles.swapaxes(1, 2).reshape(8, 15)
    each = without_halo(tiles, 1.0).swapaxes(1, 2).reshape(8, 15)
    np.testing.assert_array_equal(without_halo(mosaic, 1.0, (2, 3)), each)
    tiling = Sizing(None, None, 64, 8, tile=64, overlap=16).view((112, 160))
    rows, columns = (len(pieces) for pieces in tiling.axes)
    scores = np.random.default_rng(3).random((rows * 8, columns * 8), dtype=np.float32)
    shown = SourceMap(scores, tiling, 4.0, 1.0, None)
    damped = without_halo(scores, 1.0, (rows, columns))
    np.testing.assert_array_equal(shown(), source_map(damped, tiling, 4.0))
    np.testing.assert_allclose(shown(slice(20, 30)), shown()[20:30], rtol=1e-6)


def test_source_map_of_an_unresized_image_is_the_network_map() -> None:
    view = Sizing(64, None, 256, 8).view((64, 64))
    scores = np.random.default_rng(0).random((8, 8), dtype=np.float32)
    expected = network_map(torch.from_numpy(scores)[None], (64, 64), 4.0)[0]
    np.testing.assert_allclose(source_map(scores, view, 4.0), expected, atol=1e-6)


@given(
    height=st.integers(40, 1200),
    width=st.integers(40, 1200),
    crop=st.sampled_from([None, 224, 192]),
    at=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_peak_comes_back_to_the_pixel_it_stands_for(
    height: int, width: int, crop: int | None, at: tuple[float, float]
) -> None:
    view = Sizing(256, crop, 256, 8).view((height, width))
    grid = view.rows[0].size // 8, view.columns[0].size // 8
    row, column = int(at[0] * (grid[0] - 1)), int(at[1] * (grid[1] - 1))
    scores = np.zeros(grid, dtype=np.float32)
    scores[row, column] = 1
    anomaly_map = source_map(scores, view, 0.0)
    assert anomaly_map.shape == (height, width)
    found = np.unravel_index(np.nanargmax(anomaly_map), anomaly_map.shape)
    expected = (
        view.rows[0].to_source(np.array([row * 8 + 4.0]))[0],
        view.columns[0].to_source(np.array([column * 8 + 4.0]))[0],
    )
    # The patch centre lies between pixels, and an outer patch is as high up to its border.
    for axis, got, want, index, count in zip(
        (view.rows[0], view.columns[0]), found, expected, (row, column), grid, strict=True
    ):
        pixel = axis.source / axis.resized
        slack = 5 * pixel if index in (0, count - 1) else max(pixel, 1.0)
        assert abs(got + 0.5 - want) <= slack


def test_outside_the_crop_is_nan_and_nothing_else() -> None:
    view = Sizing(256, 224, 256, 8).view((512, 1024))
    anomaly_map = source_map(np.ones((28, 28), dtype=np.float32), view, 4.0)
    inside = np.zeros((512, 1024), dtype=bool)
    inside[32:480, 64:960] = True
    np.testing.assert_array_equal(np.isnan(anomaly_map), ~inside)
    np.testing.assert_allclose(anomaly_map[inside], 1, atol=1e-5)


def test_image_scores() -> None:
    scores = torch.arange(400.0).reshape(2, 10, 20)
    maps = network_map(scores, (80, 160), 4.0)
    assert image_scores(scores, maps, "max").tolist() == [199, 399]
    assert image_scores(scores, maps, "top_percent").tolist() == [198.5, 398.5]
    assert image_scores(scores, maps, "map_max").tolist() == maps.amax((1, 2)).tolist()
    best = np.sort(maps.flatten(1).numpy())[:, -128:].mean(1)  # 1 % of 80 × 160
    np.testing.assert_allclose(image_scores(scores, maps, "map_top_percent"), best, rtol=1e-6)


def test_the_highest_percent_is_of_what_counts() -> None:
    scores = torch.arange(400.0).reshape(1, 20, 20)
    counts = scores < 200
    maps = network_map(scores, (160, 160), 4.0, counts)
    shown = maps[~maps.isnan()]
    best = shown.sort().values[-round(len(shown) / 100) :].mean()
    assert image_scores(scores, maps, "map_top_percent")[0] == pytest.approx(float(best))


def test_a_relative_score_is_over_the_median_of_what_counts() -> None:
    scores = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(0))
    counts = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    counts[2] = False
    maps = network_map(scores, (72, 72), 4.0, counts)
    counted = torch.where(counts, scores, torch.nan)
    best = image_scores(counted, maps, "map_top_percent")
    found = image_scores(counted, maps, "map_top_relative")
    for i in range(2):
        kept = np.sort(scores[i][counts[i]].numpy())
        assert float(found[i]) == pytest.approx(float(best[i]) / kept[(len(kept) - 1) // 2])
    assert float(found[2]) == -np.inf


def test_the_map_of_a_long_strip_takes_little_memory() -> None:
    """Whole, the matrix of its longer axis would take 4 GB."""
    tiling = Sizing(None, None, 256, 8, None, 1024, 128).view((200_000, 40))
    grid = tuple(len(pieces) * pieces[0].size // 8 for pieces in tiling.axes)
    scores = np.ones(grid, np.float32)
    scores[grid[0] // 2] = 3
    with most_bytes(400e6):
        found = source_map(scores, tiling, 4.0)
    assert found.shape == (200_000, 40)
    assert 90_000 < int(found.max(axis=1).argmax()) < 110_000
    np.testing.assert_array_equal(
        source_map(scores, tiling, 4.0, slice(99_000, 99_500)), found[99_000:99_500]
    )


@pytest.mark.parametrize("moved", [False, True])
def test_the_map_for_a_picture_is_the_map_shrunk(moved: bool) -> None:
    size, drawn = (300, 420), (128, 179)
    corners = np.array([(60, 30), (400, 50), (250, 290)]) / (420, 300)
    region = Region(Polygons((tuple(map(tuple, corners.tolist())),)), None)
    pose = Pose(Motion(0.2, 12.0, -7.0), size) if moved else None
    view = View((AxisView(300, 64, 0, 64),), (AxisView(420, 64, 0, 64),), pose)
    scores = np.random.default_rng(0).random((8, 8), np.float32)
    whole = SourceMap(scores, view, 4.0, 0.5, region)
    small = whole.shrunk()
    assert small.view.source == drawn
    expected = cv2.resize(whole(), drawn[::-1], interpolation=cv2.INTER_AREA)
    both = np.isfinite(expected) & np.isfinite(small())
    np.testing.assert_allclose(small()[both], expected[both], atol=0.01)
    assert np.isfinite(small()).mean() == pytest.approx(np.isfinite(whole()).mean(), abs=0.01)
    assert small.shrunk() is small
