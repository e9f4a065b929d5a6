"""The page for drawing where to look: by mouse and by keys, and what it says is a config's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from browser import Browser
from conftest import Says

from anomaly.config.load import parse_config
from anomaly.imaging.read import Decoding
from anomaly.report.page import region_page

CONFIG = ["--config", "folder", "--region"]
WIDTH, HEIGHT = 3000, 1500


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("region")
    picture = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    cv2.circle(picture, (WIDTH // 2, HEIGHT // 2), 600, (60, 160, 220), -1)
    cv2.imwrite(str(folder / "a <b> part.png"), picture)
    page = folder / "r.html"
    page.write_text(region_page(folder / "a <b> part.png", Decoding()), "utf-8")
    return page


def press_at(browser: Browser, *spots: tuple[float, float]) -> None:
    """The mouse's button at original pixels of the picture; let go at the last spot."""
    screen = "document.getElementById('picture').getScreenCTM()"
    places = [browser.evaluate(f"new DOMPoint({x}, {y}).matrixTransform({screen}).toJSON()")
              for x, y in spots]  # fmt: skip
    (x, y), *_, end = [(place["x"], place["y"]) for place in (places[0], places[-1])]
    browser.mouse(x, y, to=end)


def shown(browser: Browser) -> dict[str, Any]:
    text = browser.evaluate("document.getElementById('yaml').value")
    values = yaml.safe_load(text) or {}
    parse_config(values, "the page")  # a config takes it as it is
    return dict(values.get("image", {}))


def test_polygons_by_mouse(browser: Browser, page: Path) -> None:
    browser.open(page)
    for corner in [(300, 300), (2700, 300), (1500, 1200), (300, 300)]:  # the first one closes
        press_at(browser, corner)
    (shares,) = shown(browser)["region"]["polygons"]
    np.testing.assert_allclose(shares, [(0.1, 0.2), (0.9, 0.2), (0.5, 0.8)], atol=0.003)
    press_at(browser, (1500, 1200), (1500, 900))  # a corner is moved
    (polygon,) = shown(browser)["region"]["polygons"]
    np.testing.assert_allclose(polygon[2], (0.5, 0.6), atol=0.003)
    browser.click("[data-kind=ignore]")
    for corner in [(1000, 400), (1200, 400), (1200, 600)]:
        press_at(browser, corner)
    assert "ignore" not in shown(browser)  # still open
    browser.press("Enter")
    found = shown(browser)
    assert len(found["ignore"]["polygons"]) == len(found["region"]["polygons"]) == 1
    browser.click("#list li:first-child button")
    assert list(shown(browser)) == ["ignore"]


def test_polygons_by_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.getElementById('picture').focus()")
    for keys in (["ArrowLeft"], ["ArrowUp"] * 2, ["ArrowRight"] * 3):
        for key in keys:
            browser.press(key, shift=True)
        browser.press(" ")
    browser.press("Enter")
    x, y = WIDTH // 2, HEIGHT // 2
    corners = [[x - 10, y], [x - 10, y - 20], [x + 20, y - 20]]
    (polygon,) = shown(browser)["region"]["polygons"]
    np.testing.assert_allclose(polygon, np.divide(corners, (WIDTH, HEIGHT)), atol=1e-5)
    browser.press(" ")
    browser.press("Backspace")
    browser.press("Enter")  # no polygon of fewer than three corners
    assert len(shown(browser)["region"]["polygons"]) == 1


def test_what_cannot_be_drawn_on(tmp_path: Path, says: Says) -> None:
    broken, wide = tmp_path / "broken.png", tmp_path / "wide.png"
    broken.write_bytes(b"no picture")
    assert "broken.png: it is a text file" in says(2, "check", [*CONFIG, broken])
    cv2.imwrite(str(wide), np.full((200, 12600), 90, np.uint8))  # 63 times as wide as high
    said = says(0, "check", [*CONFIG, wide])
    page = Path(said.partition("draw in ")[2].partition(",")[0])
    assert (page.name, page.is_file()) == ("region.html", True)
    shutil.rmtree(page.parent)
