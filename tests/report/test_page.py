"""Pages allow nothing but themselves, and whatever text they carry stays text."""

import base64
import hashlib
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from report_cases import HOSTILE, case, limits

from anomaly.report.document import report_html
from anomaly.report.index import Failure, folder_name, index_html
from anomaly.report.page import embedded, page


class _Tags(HTMLParser):
    """Counts elements and collects the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


@given(st.dictionaries(st.text(), st.text() | st.sampled_from(HOSTILE)))
def test_embedded_json_comes_back_and_never_ends_its_element(data: dict[str, str]) -> None:
    text = embedded(data)
    assert json.loads(text) == data
    assert not set("<>&") & set(text)
    assert text.isascii()


def test_the_policy_names_these_very_styles_and_scripts() -> None:
    text = report_html(case(4, thresholds=limits()))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    parts = {
        "style-src": re.search(r"<style>(.*?)</style>", text, re.DOTALL),
        "script-src": re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL),
    }
    for directive, found in parts.items():
        assert found
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "img-src data:;" in policy[1]


@given(st.text() | st.sampled_from(HOSTILE))
def test_no_text_adds_an_element_to_the_index(text: str) -> None:
    plain = case(0, name="x", thresholds=limits())
    hostile = case(0, name=text, thresholds=limits())
    before = index_html([plain], [Failure("x", "x")], {"x": "x"})
    after = index_html([hostile], [Failure(text, text)], {text: text})
    assert _Tags(after).tags == _Tags(before).tags


def test_titles_are_escaped() -> None:
    assert "<title>&lt;b&gt;</title>" in page("<b>", "", styles=())


@given(st.text(max_size=100))
def test_folder_names_are_plain(name: str) -> None:
    folder = folder_name(name)
    assert re.fullmatch(r"[\w.-]+", folder)
    assert not folder.startswith(".")


def test_the_command_that_sets_thresholds_holds_in_any_folder() -> None:
    text = report_html(case(4, thresholds=limits()))
    (command,) = re.findall(r'"command": ?("(?:[^"\\]|\\.)*")', text)
    words = shlex.split(json.loads(command))
    assert words == ["anomaly", "calibrate", "--model", str(Path.cwd() / "runs" / "my disc")]
