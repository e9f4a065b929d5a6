"""Text that pages carry stays text, and the index adds up what may be added up.

The policy of pages is tested in tests/report/test_report_browser.py.
"""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import HOSTILE, case, limits

from anomaly.report.index import folder_name, index_html
from anomaly.report.page import embedded, page
from anomaly.report.tables import metrics_json, passed_in_evaluation, scores_csv, table


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


PLAIN = case(0, name="x", thresholds=limits())


@settings(max_examples=30)
@given(st.text() | st.sampled_from(HOSTILE))
def test_no_text_adds_an_element_to_the_index(text: str) -> None:
    before = index_html([PLAIN], {"x": "x"}, {"x": "x"})
    hostile = case(0, name=text, thresholds=limits())
    after = index_html([hostile], {text: text}, {text: text})
    assert tags(after) == tags(before)
    assert tags(page(text, "", styles=())) == tags(page("x", "", styles=()))


@given(st.text(max_size=100))
def test_folder_names_are_plain(name: str) -> None:
    folder = folder_name(name)
    assert re.fullmatch(r"[\w.-]+", folder)
    assert not folder.startswith(".")


def test_models_on_one_test_split_are_not_added_up() -> None:
    first = replace(
        case(40, thresholds=limits()), date="2026-11-22 01:00 UTC", data_folder="<disc>"
    )
    second = replace(first, evaluation=replace(first.evaluation, name="second"))
    text = index_html([first, second], {}, {})
    assert "2026-11-22 01:00 UTC" in text
    assert "&lt;disc&gt;" in text
    assert "sum of counts" not in text
    assert "evaluated on the same images" in text
    assert "2 of 2 models evaluated" in text
    evaluations = [first.evaluation, second.evaluation]
    assert json.loads(metrics_json(evaluations))["mean"] is None
    assert not [line for line in table(evaluations).splitlines() if line.startswith("mean")]


def test_categories_of_their_own_images_are_added_up() -> None:
    categories = [case(40, name=name, thresholds=limits()) for name in ("first", "second")]
    text = index_html(categories, {}, {})
    assert '<th scope="row">Mean, and sum of counts</th><td>40</td><td>40</td>' in text
    assert "2 of 2 categories evaluated" in text
    assert json.loads(metrics_json([c.evaluation for c in categories]))["mean"]


def test_what_passed_is_repeated_for_the_same_thresholds_alone() -> None:
    category = case(40, thresholds=limits(11.0, review=8.5))
    scores, passed = scores_csv([category.evaluation]), category.verdicts.escapes  # type: ignore[union-attr]
    said = passed_in_evaluation(scores, limits(11.0, review=8.5))
    assert said == f"in evaluation, {passed} of 20 defects passed as good at these thresholds"
    assert passed_in_evaluation(scores, limits(11.0, review=8.6)) == ""
