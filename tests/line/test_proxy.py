"""The line's page as people set it up: behind nginx, below a path, in a browser without storage."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from conftest import REPOSITORY
from running import Served, behind_nginx
from test_line_page import arrive

# As where a browser's settings forbid storage.
NO_STORAGE = """
Object.defineProperty(window, "localStorage", {
  get() { throw new DOMException("denied", "SecurityError"); }
});
"""


@pytest.fixture
def proxied(served: Served, tmp_path: Path) -> Iterator[str]:
    """The page's address behind nginx as docs/service.md configures it."""
    docs = (REPOSITORY / "docs" / "service.md").read_text("utf-8")
    location = docs[docs.index("location /plant/line/") :].partition("```")[0]
    location = location.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")
    config = "events {} http { server { listen 127.0.0.1:{port};\n" + location + "} }"
    with behind_nginx(config, tmp_path) as port:
        yield f"http://127.0.0.1:{port}/plant/line/"


@pytest.fixture
def page(window: Browser) -> Iterator[Browser]:
    """A page that may store nothing."""
    window.events.clear()
    added = window.call("Page.addScriptToEvaluateOnNewDocument", source=NO_STORAGE)
    yield window
    window.call("Page.removeScriptToEvaluateOnNewDocument", **added)
    window.open("about:blank")


def test_the_page_lives_behind_a_proxy_and_without_storage(
    served: Served, proxied: str, product: Path, page: Browser
) -> None:
    page.open(f"{proxied}?lang=en")
    page.until("document.getElementById('state').textContent", "live")
    for file in ("spot/000.png", "good/000.png"):
        number = arrive(served, page, product / "test" / file)
    page.until("document.getElementById('picture').naturalWidth > 0", True)
    time.sleep(0.7)  # a button means the part before, until then
    page.evaluate("document.getElementById('who').value = 'Ada'")
    page.click("#good")
    page.until("document.getElementById('good').className.includes('chosen')", True)
    page.evaluate("document.querySelector('a[href]').click()")
    page.until("location.pathname", "/plant/line/report")
    assert page.complaints() == []
    assert all(url.startswith(proxied) for url in page.requests())
    assert served.get(f"/v1/parts/{number}")["feedback"]["who"] == "Ada"


def test_events_come_at_once_behind_a_proxy(served: Served, proxied: str, product: Path) -> None:
    with urllib.request.urlopen(f"{proxied}v1/events", timeout=10) as events:
        before = events.readline(), events.readline()
        served.score((product / "test/good/000.png").read_bytes())
        after = events.readline()
    assert before[0].startswith(b"data: ")
    assert after.startswith(b"data: ")
    assert after != before[0]
