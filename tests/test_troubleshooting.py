"""The page of remedies has every message that the package raises, as the code has them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "troubleshooting.md"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    return importlib.import_module("messages")


def test_the_messages_on_the_page_are_those_of_the_code(messages: ModuleType) -> None:
    page = PAGE.read_text("utf-8")
    assert page == messages.with_messages(page, REPOSITORY / "anomaly"), (
        "run `python docs/generate.py`"
    )
    assert page.count("\n| `") > 400


def test_every_section_says_what_to_do() -> None:
    remedies, _, _ = PAGE.read_text("utf-8").partition("## All messages")
    sections = re.split(r"^## ", remedies, flags=re.MULTILINE)[1:]
    assert len(sections) > 20
    for section in sections:
        title, _, text = section.partition("\n")
        assert len(text.split()) > 8, title


def test_messages_are_found_however_they_are_raised(messages: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text(
        'class Base(Exception):\n    "All errors."\n'
        'class Wrong(Base):\n    "It is wrong."\n'
        "class Worse(Wrong): ...\n"
    )
    (tmp_path / "code.py").write_text(
        "def broken(what) -> Wrong:\n    return Wrong(f'{file}: {what}')\n"
        "def a(x):\n"
        "    raise Wrong(f'{x} is wrong; ' 'mend it')\n"
        "def b(x):\n"
        "    text = f'{x} is odd' if x else 'there is | nothing'\n"
        "    raise errors.Base(text) from None\n"
        "def c(x):\n    raise broken('it is cut ' + 'short')\n"
        "def d(x):\n    raise ValueError(str(x))\n"
    )
    assert messages.messages(tmp_path) == {
        "It is wrong.": {"… is wrong; mend it", "it is cut short"},
        "All errors.": {"… is odd", "there is | nothing"},
    }
    page = messages.with_messages("# Remedies\n", tmp_path)
    assert "| `… is wrong` | `mend it` |" in page
    assert "| `there is \\| nothing` |  |" in page
    assert messages.with_messages(page, tmp_path) == page
