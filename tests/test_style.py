"""Words that users read: plain messages, first lines of docstrings, pages that lead on."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY

from anomaly import cli
from anomaly.cli.help import COMMANDS

DOCS = REPOSITORY / "docs"
GENERATED = {"settings.md", "licences.md", "api.md"}
PAGES = sorted(DOCS.rglob("*.md"))
SOURCES = sorted((REPOSITORY / "anomaly").rglob("*.py"))
# Words that name nothing by themselves, and turns of phrase that have to be read twice.
RIDDLES = re.compile(
    r"\b(all the same|be it|of which (?!\d)|as told|is told|are told|told by|the rest|vouch\w*"
    r"|is said to|are said to|may promise|promise too much|taken for|one in (?!another|\d)|but for"
    r"|be had|nothing says|knows no)\b(?! of\b| \d)"
)
AMERICAN = re.compile(
    r"\b(colou?rize\w*|color\w*|gray\w*|normaliz\w*|initializ\w*|optimiz(?!er)\w*|recogniz\w*"
    r"|organiz\w*|behavior\w*|(?<!k-)center(?:s|ed|ing)?|visualiz\w*|analyz\w*|maximiz\w*"
    r"|minimiz\w*(?! the maximum)|favor\w*|summariz\w*|quantiz\w*|labeled|labeling|modeled"
    r"|catalog|neighbor\w*|license[sd]?(?=\s))\b"
)
HISTORY = re.compile(r"\b(since (?:\d{1,2} )?(?:[A-Z]\w+ )?20\d\d|earlier version|as of \d)", re.I)
LONGEST = 30  # words in a sentence of a message


def words(node: ast.expr) -> str:
    """The text of a string in the source, `…` for what varies."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(words, parts))
    return "…"


@cache
def texts() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(place, text) of strings that read as sentences, and of public docstrings' first lines."""
    messages, first_lines = [], []
    for file in SOURCES:
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        inner = {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in n.values}
        silent = {id(n.value) for n in nodes if isinstance(n, ast.Expr)} | inner
        for node in nodes:
            place = f"{file.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                first_lines.append((place, (ast.get_docstring(node) or "").partition("\n")[0]))
            elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in silent:
                text = words(node)
                if not re.search(r"[<|]", text) and len(re.findall(r"[a-z]{2,} ", text)) > 3:
                    messages.append((place, text))
    return messages, first_lines


def prose(page: Path) -> str:
    """A page without code, links' targets and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text("utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", text)


def sentences(text: str) -> list[str]:
    return re.split(r"[.;:?!](?:\s|$)|\n| - ", re.sub(r"`[^`]*`|\([^()]*\)|'[^']+'", "…", text))


def test_messages_and_docstrings_are_plain() -> None:
    messages, first_lines = texts()
    for pattern in (RIDDLES, AMERICAN):
        found = [(at, pattern.search(text)) for at, text in messages + first_lines]
        assert [f"{at}: {match[0]}" for at, match in found if match] == []
    long = [
        f"{at}: {len(words)}: {text}"
        for at, text in messages
        for words in (re.findall(r"[\w…%'-]*\w[\w…%'-]*", s) for s in sentences(text))
        if len(words) > LONGEST
    ]
    assert long == []


def test_every_option_has_help() -> None:
    for command in COMMANDS:
        actions = cli._parser(command)._actions
        (commands,) = (a.choices for a in actions if isinstance(a.choices, dict))
        assert [action.dest for action in commands[command]._actions if not action.help] == []


def test_every_page_is_in_the_menu_under_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    generate = importlib.import_module("generate")
    menu = dict(_menu(yaml.load((REPOSITORY / "mkdocs.yml").read_text(), _Plain)["nav"]))
    menu |= {page: title for title, page in generate.IN_PRODUCTION.items()}
    index = (DOCS / "index.md").read_text("utf-8")
    for page in PAGES:
        name = page.relative_to(DOCS).as_posix()
        title = re.search(r"^# (.+)$", page.read_text("utf-8"), re.MULTILINE)
        if name != "index.md":
            assert title, name
            assert menu[name] == title[1], name
            assert f"]({name}" in index, f"{name} isn't linked from docs/index.md"


class _Plain(yaml.SafeLoader):
    """YAML whose tags of Python are passed over."""


_Plain.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def _menu(entries: list[Any]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        for title, below in entry.items():
            yield from [(below, title)] if isinstance(below, str) else _menu(below)


def test_a_page_says_whom_it_is_for_and_what_comes_next() -> None:
    for page in PAGES:
        blocks = [b for b in page.read_text("utf-8").split("\n\n") if not b.startswith("<!--")]
        if page.name not in GENERATED and page != DOCS / "index.md":
            assert re.match(r"(For|If|When|Read this|Use this)\b", blocks[1]), page
            assert re.match(r"\**Next:", blocks[-1].strip()), page
        for pattern in (HISTORY, AMERICAN, RIDDLES)[: 2 if page.name in GENERATED else 3]:
            assert [line for line in prose(page).splitlines() if pattern.search(line)] == [], page
