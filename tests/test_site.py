"""The documentation as a site: built strictly, read from disk in a real browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, running_browser
from conftest import REPOSITORY

pytestmark = pytest.mark.slow
PAGES = ["index", "getting-started", "settings", "troubleshooting", "design", "how/patchcore"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="`make docs` installs what builds the site")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=REPOSITORY, check=True)
    return folder


@pytest.fixture
def browser(site: Path, tmp_path: Path) -> Iterator[Browser]:
    with running_browser(tmp_path / "profile") as window:
        yield window
        assert window.complaints() == []
        assert all(url.startswith(("file:", "blob:", "about:")) for url in window.requests())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_laptop_and_a_phone(browser: Browser, site: Path, scheme: str) -> None:
    browser.prefer(prefers_color_scheme=scheme)
    for name in PAGES:
        for width, height in ((1366, 768), (390, 844)):
            browser.open(site / f"{name}.html", width=width, height=height)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
            paper = "getComputedStyle(document.body).backgroundColor"
            assert (browser.evaluate(paper) == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_search_works_from_disk(browser: Browser, site: Path) -> None:
    browser.open(site / "how" / "maps.html")
    browser.evaluate(
        "(i => {i.focus(); i.value = 'no model at';"
        "i.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true, key: 't'}))})"
        "(document.querySelector('.md-search__input'))"
    )
    found = "document.querySelectorAll('.md-search-result__item').length > 0"
    browser.until(found, True, seconds=20)
    first = (
        "document.querySelector('.md-search-result__list').innerText.includes('Troubleshooting')"
    )
    assert browser.evaluate(first)
