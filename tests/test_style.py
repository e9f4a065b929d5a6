"""Words that users read: plain messages, first lines of docstrings, pages that lead on."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from conftest import REPOSITORY

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


def test_every_page_is_linked_from_the_index() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    names = {page.relative_to(DOCS).as_posix() for page in PAGES} - {"index.md"}
    assert [name for name in sorted(names) if f"]({name}" not in index] == []


def test_pages_are_plain_and_say_what_comes_next() -> None:
    for page in PAGES:
        for pattern in (HISTORY, AMERICAN):
            assert [line for line in prose(page).splitlines() if pattern.search(line)] == [], page
        if page.name not in GENERATED | {"index.md"}:
            last = page.read_text("utf-8").split("\n\n")[-1]
            assert re.match(r"\**Next:", last.strip()), page
