"""The page for the line in a real browser: parts arrive, people answer, keys work."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from browser import Browser
from running import Served, serving

import anomaly.line

LINE = Path(anomaly.line.__file__).parent
STRIP = "[...document.querySelectorAll('#strip button')].map((b) => Number(b.dataset.part))"
REJECTS = "document.querySelector('#counts div:nth-child(3) dd').textContent"


def opened(page: Browser, served: Served, state: str, query: str = "?lang=en") -> None:
    page.open(f"http://127.0.0.1:{served.port}/{query}")
    shows(page, "state", state)


@pytest.fixture
def page(window: Browser, served: Served) -> Iterator[Browser]:
    """The page, live; it asks nobody but its service, and complains of nothing."""
    window.events.clear()
    window.prefer()
    opened(window, served, "live")
    yield window
    assert window.complaints() == []
    assert all(url.startswith(f"http://127.0.0.1:{served.port}/") for url in window.requests())
    window.open("about:blank")


def shows(page: Browser, element: str, text: str, seconds: float = 5.0) -> None:
    """Wait until an element's text begins like this."""
    beginning = f"document.getElementById('{element}').textContent.slice(0, {len(text)})"
    page.until(beginning, text, seconds=seconds)


def number(page: Browser) -> int:
    """The number of the part that is shown."""
    return int(page.text("number").rpartition("#")[2])


def arrive(served: Served, page: Browser, file: Path, query: str = "", model: str = "disc") -> int:
    """Score a part; its number once the page shows it."""
    _, row = served.score(file.read_bytes(), query, model)
    page.until(f"{STRIP}[0]", row["id"])
    return int(row["id"])


def find(page: Browser, part: int) -> None:
    page.press("/")
    page.evaluate(f"document.execCommand('insertText', false, '{part}')")
    page.press("Enter")


def test_a_part_is_shown_as_it_comes(served: Served, page: Browser, product: Path) -> None:
    spot, good = product / "test" / "spot" / "000.png", product / "test" / "good" / "000.png"
    first = arrive(served, page, spot, "?name=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    assert page.text("word") == "REJECT"
    assert "<img src=x" in page.text("description")
    page.until("document.getElementById('picture').naturalWidth > 0", True)
    page.until(f"{REJECTS} != '0'", True)
    assert page.evaluate("document.querySelectorAll('#chart circle').length") >= 1
    arrive(served, page, good)
    assert page.text("word") == "GOOD"
    _, unread = served.score(b"no picture")
    shows(page, "word", "NOT READ")
    for scheme in ("dark", "light"):
        page.prefer(prefers_color_scheme=scheme)
        assert page.faint("#verdict *") == []
        for width, height in ((1366, 768), (820, 1180), (390, 844)):  # down to a phone
            page.resize(width, height)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            word = "document.getElementById('word').getBoundingClientRect().height"
            ratio = "parseFloat(getComputedStyle(document.getElementById('ratio')).fontSize)"
            assert page.evaluate(f"Math.min({word}, {ratio})") >= 48  # readable from three metres
    # Keys: to and fro, and back to the newest.
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert number(page) == first
    page.evaluate("((now) => { performance.now = () => now; })(performance.now())")
    newest = arrive(served, page, good)
    assert number(page) == first
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert number(page) == unread["id"]
    assert page.evaluate("document.getElementById('good').disabled")
    page.press("Home")
    assert number(page) == newest
    page.press("g")  # too soon: the part before is meant
    shows(page, "answer", "Not noted")
    assert served.get(f"/v1/parts/{newest}")["feedback"] is None
    page.evaluate("delete performance.now")
    reviews = len(served.get("/v1/parts?verdict=review")["parts"])
    page.press("r")  # the parts to review alone
    page.until(f"{STRIP}.length", reviews)
    page.press("r")
    page.until(f"{STRIP}.length > {reviews}", True)


def test_it_speaks_the_language_of_whoever_looks(
    served: Served, page: Browser, product: Path
) -> None:
    arrive(served, page, product / "test" / "spot" / "000.png")
    for query in ("?lang=de", ""):  # it is remembered
        opened(page, served, "verbunden", query)
        shows(page, "word", "AUSSCHUSS")
        assert page.text("good").startswith("Gut")
        assert "," in page.text("ratio")
        assert page.evaluate("document.documentElement.lang") == "de"
    page.set("language", "en", "change")
    shows(page, "word", "REJECT")
    assert page.text("good").startswith("Good")
    shows(page, "state", "live")


def test_photograph_and_heatmap_can_be_looked_at_closely(
    served: Served, page: Browser, product: Path, tmp_path: Path
) -> None:
    part = cv2.imread(str(product / "test" / "spot" / "000.png"))
    cv2.imwrite(str(tmp_path / "part.tif"), part.astype(np.uint16) * 257)  # no browser shows it
    looked_at = arrive(served, page, tmp_path / "part.tif")
    _, headers, file = served.ask("GET", f"/v1/parts/{looked_at}/photograph")
    assert headers["content-type"] == "image/jpeg"
    shown = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(shown.astype(float) - part).mean() < 6
    assert served.ask("GET", "/v1/parts/999999/photograph")[0] == 404
    picture = "document.getElementById('picture')"
    for key, kind in (("h", "photograph"), ("h", "heatmap"), ("#switch", "photograph")):
        page.press(key) if len(key) == 1 else page.click(key)
        source = f"{picture}.src.includes('/{looked_at}/{kind}') && {picture}.naturalWidth > 0"
        page.until(source, True)
    scale = f"new DOMMatrix(getComputedStyle({picture}).transform).a"
    page.press("+")
    page.click("#larger")
    page.press("h")
    assert page.evaluate(scale) == pytest.approx(2.25)  # whichever picture it is
    place = page.evaluate(f"getComputedStyle({picture}).transform")
    page.mouse(400, 400, to=(430, 400))
    page.until(f"getComputedStyle({picture}).transform !== '{place}'", True)
    arrive(served, page, product / "test" / "good" / "000.png")
    assert number(page) == looked_at  # it stays
    page.press("0")
    assert page.evaluate(scale) == 1


@pytest.fixture
def several(run_folder: Path, tmp_path: Path) -> Iterator[Served]:
    """A service with two models, and one that has failed."""
    for name in ("cup", "disc", "ring"):
        shutil.copytree(run_folder, tmp_path / "models" / name)
    (tmp_path / "models" / "ring" / "model" / "scorer.safetensors").unlink()
    with serving(tmp_path / "models") as served:
        yield served


def test_what_is_written_about_is_kept_and_any_part_can_be_found(
    several: Served, window: Browser, product: Path
) -> None:
    page, spot = window, product / "test" / "spot" / "000.png"
    opened(page, several, "not ready")
    first = arrive(several, page, spot, model="cup")
    page.press("n")
    page.evaluate("document.execCommand('insertText', false, 'a <b>scratch</b>')")
    newest = [several.score(spot.read_bytes())[1]["id"] for _ in range(62)][-1]
    page.until(f"{STRIP}[0]", newest)
    assert number(page) == first
    assert len(page.evaluate(STRIP)) == 60
    page.click("#filter")  # asks for the newest anew, as after a lost connection
    page.until(f"{STRIP}.join()", f"{first}")
    page.click("#filter")
    page.until(f"{STRIP}.at(-1) === {first} && {STRIP}.length === 60", True)
    assert number(page) == first
    page.press("Escape")
    page.press("d")
    page.until("document.getElementById('defect').className.includes('chosen')", True)
    said = several.get(f"/v1/parts/{first}")["feedback"]
    assert (said["verdict"], said["note"]) == ("defect", "a <b>scratch</b>")
    page.press("Home")
    assert number(page) == newest
    # Any part, by its number.
    find(page, first)
    page.until("document.getElementById('number').textContent.endsWith('#1')", True)
    find(page, 4000)
    shows(page, "missing", "There is no part 4000.")
    page.press("Escape")
    assert number(page) == first
    # One model, until another is chosen.
    page.until(REJECTS, "63")
    page.set("models", "cup", "change")
    page.until(REJECTS, "1")
    assert page.evaluate(STRIP) == [first]
    several.score(spot.read_bytes())
    second = several.score(spot.read_bytes(), model="cup")[1]["id"]
    page.until(f"{STRIP}.join()", f"{second},{first}")
    # Each alarm says what failed.
    assert page.evaluate("document.querySelector('#alarms li').className") == "error"
    assert "ring has failed" in page.texts("#alarms li")[0]
    page.open("about:blank")


def test_every_word_is_used_and_there_in_all_languages() -> None:
    assets = LINE / "assets"
    table = json.loads((assets / "words.json").read_text("utf-8"))
    for key, texts in table.items():
        assert list(texts) == ["en", "de", "es", "zh"], key
        assert all(text.strip() == text != "" for text in texts.values()), key
        names = {tuple(sorted(re.findall(r"\{(\w*)\}", text))) for text in texts.values()}
        assert len(names) == 1, (key, names)
    pages = "".join(file.read_text("utf-8") for file in assets.glob("*.html"))
    scripts = [*assets.glob("*.js"), *LINE.glob("*.py")]
    program = "".join(file.read_text("utf-8") for file in scripts)
    named = set(re.findall(r'data-(?:word|label|hint)="(.*?)"', pages))
    named |= set(re.findall(r'\bword\("(.*?)"', program))
    assert named <= table.keys() <= named | set(re.findall(r'"(\w+)"', program))
