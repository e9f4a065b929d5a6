"""Small pictures of a test split: right in size, place and outline."""

import base64
import re
from typing import Any

import cv2
import numpy as np
import pytest
from report_cases import LIMIT, tile


def drawn(
    size: tuple[int, int], mask: np.ndarray | None = None, count: int = 1500
) -> dict[str, Any]:
    """The small picture of an image that is anomalous in its upper half."""
    anomaly_map = np.zeros(size, np.float32)
    anomaly_map[: size[0] // 2] = 2 * LIMIT
    return tile(np.full((*size, 3), 120, np.uint8), anomaly_map, mask, count)


def decoded(data: str) -> np.ndarray:
    read = np.frombuffer(base64.b64decode(data), np.uint8)
    picture = cv2.imdecode(read, cv2.IMREAD_UNCHANGED)
    assert picture is not None
    return picture


def test_the_more_images_the_smaller_the_pictures() -> None:
    assert drawn((1254, 500), count=190)["size"] == (500, 1254)  # a usual set keeps every pixel
    sizes = [drawn((800, 400), count=count)["size"] for count in (1500, 1_000_000)]
    pixels = [width * height for width, height in sizes]
    assert pixels == pytest.approx([80_000, 96 * 96], rel=0.06)
    tall = drawn((1200, 600))
    assert (tall["size"], tall["source"]) == ((200, 400), (600, 1200))
    assert decoded(tall["photo"]).shape == (400, 200, 3)
    assert drawn((90, 50))["size"] == (50, 90)


def test_the_heat_lies_where_the_map_is_high() -> None:
    alpha = decoded(drawn((400, 400))["heat"])[..., 3]
    half = alpha.shape[0] // 2
    assert (alpha[: half - 2] > 250).all()
    assert (alpha[half + 2 :] < 5).all()


def test_a_defect_of_one_pixel_still_shows() -> None:
    mask = np.zeros((1200, 1200), bool)
    mask[600, 300] = True
    small = drawn((1200, 1200), mask)
    x, y = map(float, re.findall(r"M([\d.]+) ([\d.]+)", small["truth"])[0])
    assert (x / small["size"][0], y / small["size"][1]) == pytest.approx((0.25, 0.5), abs=0.01)
