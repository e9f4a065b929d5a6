"""The page for the line in a real browser: parts arrive, people answer, keys work."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from browser import Browser, running_browser
from running import Served, start

from anomaly.line.service import MOST_FOLLOWERS


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, served: Served) -> Iterator[Browser]:
    """The page, live; it asks nobody but its service, and complains of nothing."""
    window.events.clear()
    window.open(f"http://127.0.0.1:{served.port}/?lang=en")
    window.until("document.getElementById('state').textContent", "live")
    yield window
    assert window.complaints() == []
    assert all(url.startswith(f"http://127.0.0.1:{served.port}/") for url in window.requests())
    window.open("about:blank")


def text(page: Browser, element: str) -> str:
    return str(page.evaluate(f"document.getElementById('{element}').textContent"))


def contrast(page: Browser, element: str) -> float:
    """Contrast of an element's text with its own ground, 1 to 21 (WCAG 2.2)."""
    style = f"getComputedStyle(document.getElementById('{element}'))"
    lights = []
    for name in ("color", "backgroundColor"):
        parts = re.findall(r"\d+", str(page.evaluate(f"{style}.{name}")))[:3]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
                  for v in (int(part) / 255 for part in parts)]  # fmt: skip
        lights.append(float(np.dot(linear, (0.2126, 0.7152, 0.0722))))
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def arrive(served: Served, page: Browser, file: Path, name: str = "part.png") -> int:
    """Score a part; its number once the page shows it."""
    _, row = served.score(file.read_bytes(), f"?name={name}")
    answered = time.perf_counter()
    page.until("document.querySelector('#strip button')?.dataset.part", str(row["id"]), seconds=5)
    assert time.perf_counter() - answered < 1.0
    return int(row["id"])


def test_a_part_is_shown_as_it_comes(served: Served, page: Browser, product: Path) -> None:
    hostile = "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E"
    number = arrive(served, page, product / "test" / "spot" / "000.png", hostile)
    assert text(page, "word") == "REJECT"
    assert "<img src=x" in text(page, "description")
    page.until("document.getElementById('picture').naturalWidth > 0", True)
    page.until("document.querySelector('#counts div:nth-child(3) dd').textContent != '0'", True)
    assert page.evaluate("document.querySelectorAll('#chart circle').length") >= 1
    other = arrive(served, page, product / "test" / "good" / "000.png")
    assert text(page, "word") == "GOOD"
    _, unread = served.score(b"no picture")
    page.until("document.getElementById('word').textContent", "NOT READ")
    for scheme in ("dark", "light"):
        page.prefer(prefers_color_scheme=scheme)
        assert contrast(page, "verdict") >= 4.5
    # Keys: to and fro, and back to the newest.
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert text(page, "number").endswith(f"#{number}")
    arrive(served, page, product / "test" / "good" / "001.png")
    assert text(page, "number").endswith(f"#{number}")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert text(page, "number").endswith(f"#{unread['id']}")
    assert page.evaluate("document.getElementById('good').disabled")
    page.press("Home")
    assert int(text(page, "number").rpartition("#")[2]) > other


def test_people_answer_with_buttons_and_keys(served: Served, page: Browser, product: Path) -> None:
    number = arrive(served, page, product / "test" / "spot" / "001.png")
    page.press("g")  # too soon: the part before is meant
    page.until("document.getElementById('answer').textContent.slice(0, 9)", "Not noted")
    assert served.get(f"/v1/parts/{number}")["feedback"] is None
    time.sleep(0.7)
    page.press("n")
    page.evaluate("document.execCommand('insertText', false, 'a <b>scratch</b>')")
    newer = arrive(served, page, product / "test" / "good" / "000.png")
    assert text(page, "number").endswith(f"#{number}")  # what is written about stays
    page.press("Escape")
    page.press("d")
    page.until("document.getElementById('defect').className.includes('chosen')", True)
    said = served.get(f"/v1/parts/{number}")["feedback"]
    assert (said["verdict"], said["note"]) == ("defect", "a <b>scratch</b>")
    assert served.get(f"/v1/parts/{newer}")["feedback"] is None
    page.press("Home")
    time.sleep(0.7)
    page.click("#good")
    page.until("document.getElementById('good').className.includes('chosen')", True)
    assert served.get(f"/v1/parts/{newer}")["feedback"]["verdict"] == "good"


def test_a_part_that_is_written_about_outlives_the_newest_sixty(
    served: Served, page: Browser, product: Path
) -> None:
    number = arrive(served, page, product / "test" / "spot" / "001.png")
    page.press("n")
    page.evaluate("document.execCommand('insertText', false, 'scratch at')")
    data = (product / "test" / "good" / "000.png").read_bytes()
    newest = [served.score(data)[1]["id"] for _ in range(64)][-1]
    page.until("document.querySelector('#strip button')?.dataset.part", str(newest))
    assert text(page, "number").endswith(f"#{number}")
    shown = "[...document.querySelectorAll('#strip button')].map((b) => Number(b.dataset.part))"
    assert len(page.evaluate(shown)) == 60
    page.click("#filter")  # asks for the newest anew, as after a lost connection
    page.until(f"{shown}.at(-1) === {number} && {shown}.length < 60", True)
    page.click("#filter")
    page.until(f"{shown}.at(-1) === {number} && {shown}.length === 60", True)
    assert text(page, "number").endswith(f"#{number}")
    page.press("Escape")
    page.press("d")
    page.until("document.getElementById('defect').className.includes('chosen')", True)
    assert served.get(f"/v1/parts/{number}")["feedback"]["note"] == "scratch at"
    page.press("Home")
    assert text(page, "number").endswith(f"#{newest}")


def test_the_filter_shows_reviews_alone(served: Served, page: Browser, product: Path) -> None:
    arrive(served, page, product / "test" / "good" / "000.png")
    page.press("r")
    shown = "[...document.querySelectorAll('#strip button span:first-of-type')]"
    expected = len(served.get("/v1/parts?verdict=review")["parts"])
    page.until(f"{shown}.length", expected)
    page.press("r")
    page.until(f"{shown}.length > {expected}", True)


def test_it_fits_a_tablet_and_both_schemes(served: Served, page: Browser, product: Path) -> None:
    arrive(served, page, product / "test" / "spot" / "002.png")
    for scheme in ("light", "dark"):
        page.prefer(prefers_color_scheme=scheme)
        for width, height in ((1366, 768), (820, 1180), (390, 844)):
            page.resize(width, height)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            word = page.evaluate(
                "(({height}) => height)(document.getElementById('word').getBoundingClientRect())"
            )
            assert word >= 48  # readable from three metres
            size = "parseFloat(getComputedStyle(document.getElementById('ratio')).fontSize)"
            assert page.evaluate(size) >= 48
    page.prefer()


def test_it_follows_once_there_is_a_place(served: Served, page: Browser) -> None:
    page.open("about:blank")
    others = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(MOST_FOLLOWERS)]
    for other in others:
        other.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in other.recv(20)
    page.open(f"http://127.0.0.1:{served.port}/")
    page.until("document.getElementById('state').textContent.slice(0, 13)", "no connection")
    for other in others:
        other.close()
    page.until("document.getElementById('state').textContent", "live", seconds=10)
    page.events.clear()  # the browser complains of each 503


@pytest.mark.parametrize(
    ("language", "state", "verdict", "good", "point"),
    [("de", "verbunden", "AUSSCHUSS", "Gut", ","), ("zh", "已连接", "不合格", "合格", ".")],
)
def test_it_speaks_the_language_of_whoever_looks(
    served: Served, page: Browser, product: Path,
    language: str, state: str, verdict: str, good: str, point: str,
) -> None:  # fmt: skip
    arrive(served, page, product / "test" / "spot" / "000.png")
    address = f"http://127.0.0.1:{served.port}/"
    for where in (f"{address}?lang={language}", address):  # it is remembered
        page.open(where)
        page.until("document.getElementById('state').textContent", state)
        page.until("document.getElementById('word').textContent", verdict)
        assert text(page, "good").startswith(good)
        assert point in text(page, "ratio")
        assert page.evaluate("document.documentElement.lang") == language
    page.evaluate(
        "(() => { const s = document.getElementById('language'); s.value = 'en';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    page.until("document.getElementById('word').textContent", "REJECT")
    assert text(page, "good").startswith("Good")
    page.until("document.getElementById('state').textContent", "live")


def test_photograph_and_heatmap_can_be_looked_at_closely(
    served: Served, page: Browser, product: Path, tmp_path: Path
) -> None:
    part = cv2.imread(str(product / "test" / "spot" / "000.png"))
    cv2.imwrite(str(tmp_path / "part.tif"), part.astype(np.uint16) * 257)  # no browser shows it
    number = arrive(served, page, tmp_path / "part.tif")
    _, headers, file = served.ask("GET", f"/v1/parts/{number}/photograph")
    assert headers["content-type"] == "image/jpeg"
    shown = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(shown.astype(float) - part).mean() < 6
    assert served.ask("GET", "/v1/parts/999999/photograph")[0] == 404
    picture = "document.getElementById('picture')"
    for key, kind in (("h", "photograph"), ("h", "heatmap"), ("#switch", "photograph")):
        page.press(key) if len(key) == 1 else page.click(key)
        page.until(
            f"{picture}.src.includes('/{number}/{kind}') && {picture}.naturalWidth > 0", True
        )
    scale = f"new DOMMatrix(getComputedStyle({picture}).transform).a"
    page.press("+")
    page.click("#larger")
    page.press("h")
    assert page.evaluate(scale) == pytest.approx(2.25)  # whichever picture it is
    page.press("-")
    assert page.evaluate(scale) == pytest.approx(1.5)
    wheel = {"x": 400, "y": 400, "deltaX": 0, "deltaY": -100}
    page.call("Input.dispatchMouseEvent", type="mouseWheel", **wheel)
    page.until(f"{scale} > 2", True)
    place = page.evaluate(f"getComputedStyle({picture}).transform")
    for kind, x in (("mousePressed", 400), ("mouseMoved", 430), ("mouseReleased", 430)):
        mouse = {"x": x, "y": 400, "button": "left", "buttons": 1, "clickCount": 1}
        page.call("Input.dispatchMouseEvent", type=kind, **mouse)
    page.until(f"getComputedStyle({picture}).transform !== '{place}'", True)
    _, newer = served.score((product / "test" / "good" / "000.png").read_bytes())
    page.until("document.querySelector('#strip button')?.dataset.part", str(newer["id"]))
    assert text(page, "number").endswith(f"#{number}")  # what is looked at closely stays
    page.press("0")
    assert page.evaluate(scale) == 1


@pytest.fixture
def several(run_folder: Path, tmp_path: Path) -> Iterator[Served]:
    """A service with two models, and one that has failed."""
    for name in ("cup", "disc", "ring"):
        shutil.copytree(run_folder, tmp_path / "models" / name)
    (tmp_path / "models" / "ring" / "model" / "scorer.safetensors").unlink()
    served = start(tmp_path / "models")
    try:
        end, states = time.monotonic() + 300, [""]
        while sorted(states) != ["failed", "ready", "ready"]:
            assert time.monotonic() < end, states
            time.sleep(0.05)
            with suppress(OSError):  # it doesn't listen yet
                states = [model["state"] for model in served.get("/v1/models")["models"]]
        yield served
    finally:
        assert served.process.stdout is not None
        served.end()
        served.process.stdout.close()


def test_one_of_several_models_any_part_and_a_model_that_has_failed(
    several: Served, window: Browser, product: Path
) -> None:
    data = (product / "test" / "spot" / "000.png").read_bytes()
    first = several.score(data, model="cup")[1]["id"]
    for _ in range(62):
        several.score(data, model="disc")
    window.open(f"http://127.0.0.1:{several.port}/?lang=en")
    window.until("document.getElementById('state').textContent", "not ready")
    rejects = "document.querySelector('#counts div:nth-child(3) dd').textContent"
    window.until(rejects, "63")
    # Any part, by its number.
    window.press("/")
    window.evaluate(f"document.execCommand('insertText', false, '{first}')")
    window.press("Enter")
    window.until("document.getElementById('number').textContent.slice(-2)", f"#{first}")
    window.press("/")
    window.evaluate("document.execCommand('insertText', false, '4000')")
    window.press("Enter")
    window.until("document.getElementById('missing').textContent", "There is no part 4000.")
    window.press("Escape")
    # One model, until another is chosen.
    window.evaluate(
        "(() => { const s = document.getElementById('models'); s.value = 'cup';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    window.until(rejects, "1")
    strip = "[...document.querySelectorAll('#strip button')].map((b) => Number(b.dataset.part))"
    assert window.evaluate(strip) == [first]
    several.score(data, model="disc")
    second = several.score(data, model="cup")[1]["id"]
    window.until(f"{strip}.join()", f"{second},{first}")
    # Each alarm says what failed.
    listed = "[...document.querySelectorAll('#alarms li')]"
    assert window.evaluate(f"{listed}[0].className") == "error"
    assert "ring has failed" in window.evaluate(f"{listed}[0].textContent")
    window.open("about:blank")
