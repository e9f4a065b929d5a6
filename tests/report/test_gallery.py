"""The page that `infer` writes: all that was scored counts, what matters most is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import cv2
import numpy as np
from browser import Browser
from report_cases import HOSTILE, limits

from anomaly.inference.results import Row
from anomaly.maps.heatmap import SHOWN, Thumbnails
from anomaly.report.page import About, gallery_html

REVIEW, REJECT = 8.5, 10.0
EMPTY: dict[Any, Any] = {str: "", float: 0.0, int: 0}
BLANK = {name: EMPTY.get(kind) for name, kind in get_type_hints(Row).items()}


def row(name: str, score: float | None, **values: Any) -> Row:
    """A row of which only the page's columns matter."""
    status = "ok" if score is not None else "unreadable"
    return Row(**BLANK | {"path": name, "status": status, "image_score": score} | values)


def rows(count: int) -> list[Row]:
    scores = np.random.default_rng(0).normal(8, 1.5, count)
    return [row(f"/in/line {i % 3}/{i:06}.png", float(s)) for i, s in enumerate(scores)]


def written(folder: Path, found: list[Row]) -> Path:
    thresholds = limits(REJECT, REVIEW)
    about = About("PatchCore", "distance", thresholds, "runs/disc", "0123", {})
    page = gallery_html(
        "disc", about, "/in", found, folder, Thumbnails(len(found)), {}, frozenset()
    )
    file = folder / "results.html"
    file.write_text(page, "utf-8")
    return file


def outcomes(browser: Browser) -> list[int]:
    """How many are rejected, to review and good."""
    return [int(text) for text in browser.texts(".outcome b")]


def expected(found: list[Row], review: float, reject: float) -> list[int]:
    known = [r for r in found if r.image_score is not None]
    rejected = sum((r.image_score or 0.0) > reject for r in known)
    good = sum((r.image_score or 0.0) <= review and not r.reason for r in known)
    return [rejected, len(known) - rejected - good, good]


def test_all_scores_count_and_the_highest_have_a_picture(browser: Browser, tmp_path: Path) -> None:
    odd = [row(f"/in/{score}.png", score, reason="too dark") for score in (1.0, 9.8, 20.0)]
    found = [*rows(20_000), *odd, row("/in/x.png", None)]
    page = written(tmp_path, found)
    assert page.stat().st_size < 12 * len(found) + 300_000
    browser.open(page)
    browser.fits(360, 768, 1366)
    assert outcomes(browser) == expected(found, REVIEW, REJECT)
    chips = ["All 200", "Rejected ", "To review ", "Good "]  # what labels would tell isn't there
    assert all(map(str.startswith, browser.texts(".chip"), chips))
    for name in ("types", "tab-curves", "type-filter"):
        assert browser.evaluate(f"document.getElementById('{name}').offsetParent === null"), name
    score = sorted(r.image_score or 0 for r in found)[-50]
    for review, reject in ((7.25, REJECT), (7.25, score), (7.25, 9.5)):
        browser.set("review-number", review)
        browser.set("reject-number", reject)
        assert outcomes(browser) == expected(found, review, reject)
    command = browser.evaluate("document.getElementById('command').value")
    assert "--threshold 9.5 --review-threshold 7.25" in command
    names = browser.evaluate("[...document.querySelectorAll('.tile')].map((n) => n.title)")
    highest = sorted(found[:20_000], key=lambda r: -(r.image_score or 0))[: SHOWN - len(odd)]
    assert set(names) == {r.path for r in (*highest, *odd)}
    assert browser.text("shown").startswith(f"{SHOWN} of {SHOWN} images")
    assert "the highest scores of 20003 images" in browser.text("shown")


def test_heatmaps_are_in_the_page_and_named_on_disk(browser: Browser, tmp_path: Path) -> None:
    """On `--resume` they are read again: one that was exchanged for what is none is left out."""
    (tmp_path / "heatmaps").mkdir()
    picture = np.random.default_rng(0).integers(60, 200, (1254, 500, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "heatmaps" / "a #1.png"), picture)
    (tmp_path / "heatmaps" / "torn.png").write_bytes(b"\x89PNG")
    found = [
        row("/in/a/a #1.png", 9.0, heatmap="heatmaps/a #1.png"),
        row("/in/b/torn.png", 8.0, heatmap="heatmaps/torn.png"),
        row("/in/b/gone.png", 7.0, heatmap="heatmaps/gone.png"),
        row("/in/b/none.png", 1.0),
    ]
    browser.open(written(tmp_path, found))
    shown = ["a/a #1.png", "b/torn.png", "b/gone.png", "b/none.png"]
    assert browser.texts(".file") == shown
    assert browser.texts(".frame") == ["", *["no picture"] * 3]
    browser.evaluate("document.querySelector('.tile').focus()")
    browser.press("Enter")
    file = browser.evaluate("document.getElementById('viewer-file').getAttribute('href')")
    assert file == "heatmaps/a%20%231.png"
    browser.press("z")
    browser.until("document.querySelector('#viewer .photo').naturalHeight", 1254)
    box = "document.querySelector('#viewer .stack').getBoundingClientRect()"
    assert browser.evaluate(f"[{box}.width, {box}.height]") == [500, 1254]
    for _ in range(3):
        browser.evaluate("document.getElementById('next').click()")
    for name in ("full", "viewer-file"):
        assert browser.evaluate(f"document.getElementById('{name}').offsetParent === null")


def test_failed_images_say_why(browser: Browser, tmp_path: Path) -> None:
    bad = [row(f"/in/{i}.png", None, reason=f"broken in row {i}") for i in range(300)]
    hostile = [row(f"/in/{name}", None, reason=name) for name in HOSTILE]
    browser.open(written(tmp_path, [*rows(5), *bad[len(hostile) :], *hostile]))
    assert browser.evaluate("window.hacked === undefined")
    text = browser.text("refused")
    assert "Not scored: 300" in text
    assert "/in/7.png – unreadable: broken in row 7" in text
    assert "and 100 more, all in results.csv" in text
    assert "300 not scored" in browser.text("shown")
    browser.open(written(tmp_path, bad))
    assert "No image was scored" in browser.text("shown")
