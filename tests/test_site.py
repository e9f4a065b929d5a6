"""The documentation as a site: built strictly, read from disk in a real browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from browser import running_browser
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


def test_pages_fit_a_laptop_and_a_phone_and_the_search_works_from_disk(
    site: Path, tmp_path: Path
) -> None:
    with running_browser(tmp_path / "profile") as browser:
        for name in PAGES:
            browser.open(site / f"{name}.html")
            browser.fits(1366, 390)
        browser.open(site / "how" / "maps.html")
        browser.evaluate(
            "(i => {i.focus(); i.value = 'no model at';"
            "i.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true, key: 't'}))})"
            "(document.querySelector('.md-search__input'))"
        )
        found = "document.querySelector('.md-search-result__list').innerText"
        browser.until(f"{found}.includes('Troubleshooting')", True, seconds=20)
        assert browser.complaints() == []
        assert all(url.startswith(("file:", "blob:", "about:")) for url in browser.requests())
