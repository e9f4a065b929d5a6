"""Whatever text pages carry stays text: tests/report/test_report_browser.py has their policy."""

import json
import re
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import HOSTILE, case, limits

from anomaly.report.index import Failure, folder_name, index_html
from anomaly.report.page import embedded, page


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
    before = index_html([PLAIN], [Failure("x", "x")], {"x": "x"})
    hostile = case(0, name=text, thresholds=limits())
    after = index_html([hostile], [Failure(text, text)], {text: text})
    assert tags(after) == tags(before)
    assert tags(page(text, "", styles=())) == tags(page("x", "", styles=()))


@given(st.text(max_size=100))
def test_folder_names_are_plain(name: str) -> None:
    folder = folder_name(name)
    assert re.fullmatch(r"[\w.-]+", folder)
    assert not folder.startswith(".")
