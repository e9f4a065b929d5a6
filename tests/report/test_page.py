"""Text that pages carry stays text, figures add up, and small pictures are right.

The policy of pages is tested in tests/report/test_report_browser.py.
"""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import HOSTILE, LIMIT, case, limits, tile

from anomaly.report.page import embedded, table_page
from anomaly.report.report import folder_name, metrics_json, passed_in_evaluation, scores_csv, table


def tags(text: str) -> list[str]:
    """The elements of a page, in order."""
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    return found


@settings(max_examples=50)
@given(st.dictionaries(st.text(), st.text() | st.sampled_from(HOSTILE)))
def test_embedded_json_comes_back_and_never_ends_its_element(data: dict[str, str]) -> None:
    text = embedded(data)
    assert json.loads(text) == data
    assert not set("<>&") & set(text)
    assert text.isascii()


@settings(max_examples=30)
@given(st.text() | st.sampled_from(HOSTILE))
def test_no_text_adds_an_element_to_a_page(text: str) -> None:
    assert tags(table_page(text, text, "", "")) == tags(table_page("x", "x", "", ""))


@given(st.text(max_size=100))
def test_folder_names_are_plain(name: str) -> None:
    folder = folder_name(name)
    assert re.fullmatch(r"[\w.-]+", folder)
    assert not folder.startswith(".")


def test_commands_name_the_run_from_anywhere_and_no_export() -> None:
    about = case(4, thresholds=limits()).about
    assert about.run == Path("runs/my disc").absolute()
    assert replace(about, engine="onnx").run is None


def test_figures_of_several_categories_are_averaged() -> None:
    both = [case(count, name=name).evaluation for count, name in ((40, "one"), (60, "two"))]
    figures = json.loads(metrics_json(both))
    areas = [figures["categories"][name]["image_auroc"] for name in ("one", "two")]
    assert figures["mean"]["image_auroc"] == pytest.approx(sum(areas) / 2)
    assert table(both).splitlines()[-1].split()[:2] == ["mean", f"{sum(areas) / 2:.4f}"]
    assert "mean" not in table(both[:1])


def test_what_passed_is_repeated_for_the_same_thresholds_alone() -> None:
    category = case(40, thresholds=limits(11.0, review=8.5))
    scores, passed = scores_csv([category.evaluation]), category.verdicts.escapes  # type: ignore[union-attr]
    said = passed_in_evaluation(scores, limits(11.0, review=8.5))
    assert said == f"in evaluation, {passed} of 20 defects passed as good at these thresholds"
    assert passed_in_evaluation(scores, limits(11.0, review=8.6)) == ""


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
