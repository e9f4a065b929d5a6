"""The pages' words: the same in every language, all of them used, and no text beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anomaly.line

LINE = Path(anomaly.line.__file__).parent
ASSETS = LINE / "assets"
LANGUAGES = ["en", "de", "es", "zh"]


def test_every_word_is_used_and_there_in_all_languages() -> None:
    table = json.loads((ASSETS / "words.json").read_text("utf-8"))
    for key, texts in table.items():
        assert list(texts) == LANGUAGES, key
        assert all(text.strip() == text != "" for text in texts.values()), key
        names = {tuple(sorted(re.findall(r"\{(\w*)\}", text))) for text in texts.values()}
        assert len(names) == 1, (key, names)
    pages = "".join(file.read_text("utf-8") for file in ASSETS.glob("*.html"))
    scripts = [*ASSETS.glob("*.js"), LINE / "service.py"]
    program = "".join(file.read_text("utf-8") for file in scripts)
    named = set(re.findall(r'data-(?:word|label|hint)="(.*?)"', pages))
    named |= set(re.findall(r'\bword\("(.*?)"', program))
    assert named <= table.keys() <= named | set(re.findall(r'"(\w+)"', program))


def test_the_pages_hold_no_text_of_their_own() -> None:
    for file in ASSETS.glob("*.html"):
        page = re.sub(r"<kbd>.*?</kbd>|<!.*?>", "", file.read_text("utf-8"))
        assert not re.search(r"[^\W\d_]", re.sub(r"<[^>]*>", "", page)), file
        assert not re.search(r'\s(title|aria-label|alt|placeholder)="[^"]', page), file
