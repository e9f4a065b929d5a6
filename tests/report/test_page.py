"""Text that pages carry stays text, and figures add up what may be added up.

The policy of pages is tested in tests/report/test_report_browser.py.
"""

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import HOSTILE, case, limits

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
