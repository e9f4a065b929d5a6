"""Small pictures of a test split: right in size, place and outline."""

import re
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from pixel_map import pixel_map

from anomaly.imaging.read import Image
from anomaly.maps.encoding import pixels_for
from anomaly.maps.heatmap import outlines
from anomaly.report.category import _PIXELS, Tile, Tiles, svg_path


def _tile(size: tuple[int, int], mask: np.ndarray | None, count: int = 1500) -> Tile:
    pixels = np.full((*size, 3), 120, np.uint8)
    anomaly_map = np.zeros(size, np.float32)
    anomaly_map[: size[0] // 2] = 2.0
    with Tiles(count, 1.0, 1) as tiles:
        image = Image(pixels, 255.0, "rgb8", "png", "")
        prediction = SimpleNamespace(index=3, image=image, source_map=pixel_map(anomaly_map))
        tiles.add(prediction, anomaly_map, mask)  # type: ignore[arg-type]
        return tiles.finished()[3]


def _decoded(data: bytes) -> np.ndarray:
    picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    assert picture is not None
    return picture


def test_the_more_images_the_smaller_the_pictures() -> None:
    pixels = [pixels_for(n, _PIXELS) for n in (1, 100, 1500, 6000, 10**6)]
    assert pixels == sorted(pixels, reverse=True)
    assert pixels[2] == 80_000
    assert pixels[-1] == 96 * 96


def test_a_usual_set_of_tall_images_keeps_every_pixel() -> None:
    assert _tile((1254, 500), None, count=190).size == (500, 1254)
    assert _decoded(_tile((1254, 500), None, count=190).photo).shape == (1254, 500, 3)


def test_a_tall_image_keeps_its_shape_and_a_small_one_its_size() -> None:
    tall = _tile((1200, 600), None)
    assert tall.size == (200, 400)
    assert tall.source == (600, 1200)
    assert _decoded(tall.photo).shape == (400, 200, 3)
    assert _tile((90, 50), None).size == (50, 90)


def test_the_heat_lies_where_the_map_is_high() -> None:
    alpha = _decoded(_tile((400, 400), None).heat)[..., 3]
    half = alpha.shape[0] // 2
    assert (alpha[: half - 2] > 250).all()
    assert (alpha[half + 2 :] < 5).all()


def test_a_defect_of_one_pixel_still_shows() -> None:
    mask = np.zeros((2000, 2000), bool)
    mask[1000, 500] = True
    tile = _tile((2000, 2000), mask)
    x, y = map(float, re.findall(r"M([\d.]+) ([\d.]+)", tile.truth)[0])
    assert (x / tile.size[0], y / tile.size[1]) == pytest.approx((0.25, 0.5), abs=0.01)


def test_paths_enclose_their_area() -> None:
    area = np.zeros((60, 80), bool)
    area[10:30, 20:60] = True
    path = svg_path(outlines(area))
    start = np.array([float(v) for v in re.findall(r"M([\d.]+) ([\d.]+)", path)[0]])
    steps = np.array([[int(a), int(b)] for a, b in re.findall(r"l(-?\d+) (-?\d+)", path)])
    corners = np.vstack([start, start + np.cumsum(steps, axis=0)])
    assert corners.min(axis=0).tolist() == [20.5, 10.5]
    assert corners.max(axis=0).tolist() == [59.5, 29.5]
    assert svg_path([]) == ""
