"""The page for the line in a real browser: parts arrive, people answer, keys work."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, running_browser
from running import Served

from anomaly.line.service import MOST_FOLLOWERS


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, served: Served) -> Iterator[Browser]:
    """The page, live; it asks nobody but its service, and complains of nothing."""
    window.events.clear()
    window.open(f"http://127.0.0.1:{served.port}/")
    window.until("document.getElementById('state').textContent", "live")
    yield window
    assert window.complaints() == []
    assert all(url.startswith(f"http://127.0.0.1:{served.port}/") for url in window.requests())
    window.open("about:blank")


def text(page: Browser, element: str) -> str:
    return str(page.evaluate(f"document.getElementById('{element}').textContent"))


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
    assert "<img src=x" in text(page, "said")
    page.until("document.getElementById('picture').naturalWidth > 0", True)
    page.until("document.querySelector('#counts div:nth-child(3) dd').textContent != '0'", True)
    assert page.evaluate("document.querySelectorAll('#chart circle').length") >= 1
    other = arrive(served, page, product / "test" / "good" / "000.png")
    assert text(page, "word") == "GOOD"
    _, unread = served.score(b"no picture")
    page.until("document.getElementById('word').textContent", "NOT READ")
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
    page.prefer()


def test_it_says_what_readiness_says(served: Served, page: Browser) -> None:
    told = "{ready: false, reason: 'disc has failed', record: 'it was removed', scene: {}}"
    answer = f"Promise.resolve(new Response(JSON.stringify({told}), {{status: 503}}))"
    page.evaluate(
        "(() => { const real = window.fetch; window.fetch = (url, more) => "
        f"url === '/v2/health/ready' ? {answer} : real(url, more); }})()"
    )
    page.until("document.getElementById('state').textContent", "not ready", seconds=10)
    assert page.evaluate("document.getElementById('state').className") == "soft"
    assert text(page, "alarm").startswith("disc has failed · it was removed")


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
