"""The page that `infer` writes: all that was scored counts, what matters most is shown."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import cv2
import numpy as np
import pytest
from browser import Browser, running_browser
from report_cases import HOSTILE, limits

from anomaly.inference.rows import Row
from anomaly.maps.encoding import SHOWN, Thumbnails
from anomaly.report.gallery import Run, _picture, gallery_html

REVIEW, REJECT = 8.5, 10.0


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """The window; whatever a test does in it must be silent and stay inside the page."""
    window.events.clear()
    yield window
    assert window.complaints() == []
    assert all(url.startswith("file://") and url.endswith(".html") for url in window.requests())


EMPTY: dict[Any, Any] = {str: "", float: 0.0, int: 0}
BLANK = {name: EMPTY.get(kind) for name, kind in get_type_hints(Row).items()}


def row(name: str, score: float | None, **values: Any) -> Row:
    """A row of which only the page's columns matter."""
    status = "ok" if score is not None else "unreadable"
    return Row(**BLANK | {"path": name, "status": status, "image_score": score} | values)


def rows(count: int, seed: int = 0) -> list[Row]:
    scores = np.random.default_rng(seed).normal(8, 1.5, count)
    return [row(f"/in/line {i % 3}/{i:06}.png", float(s)) for i, s in enumerate(scores)]


def written(folder: Path, found: list[Row]) -> Path:
    run = Run(
        "disc", "PatchCore", "distance", limits(REJECT, REVIEW), "runs/disc", "0123", "/in", {}
    )
    file = folder / "results.html"
    file.write_text(gallery_html(run, found, folder, Thumbnails(len(found))), "utf-8")
    return file


def data_of(page: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def outcomes(browser: Browser) -> dict[str, int]:
    return dict(
        browser.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.outcome')].map((n) => "
            "[n.dataset.outcome, Number(n.querySelector('b').textContent)]))"
        )
    )


def expected(found: list[Row], review: float, reject: float) -> dict[str, int]:
    known = [r for r in found if r.image_score is not None]
    rejected = sum((r.image_score or 0.0) > reject for r in known)
    good = sum((r.image_score or 0.0) <= review and not r.reason for r in known)
    return {"reject": rejected, "review": len(known) - rejected - good, "good": good}


def test_verdicts_of_all_images_follow_both_sliders(browser: Browser, tmp_path: Path) -> None:
    odd = [row(f"/in/{score}.png", score, reason="too dark") for score in (1.0, 9.8, 20.0)]
    found = [*rows(3 * SHOWN), *odd, row("/in/x.png", None)]
    page = written(tmp_path, found)
    browser.open(page)
    assert outcomes(browser) == expected(found, REVIEW, REJECT)
    score = sorted(r.image_score or 0 for r in found)[-50]
    for review, reject in ((7.25, REJECT), (7.25, score), (7.25, 9.5)):
        browser.evaluate(
            f"for (const [side, value] of [['review', {review!r}], ['reject', {reject!r}]]) {{"
            "const n = document.getElementById(`${side}-number`); n.value = value;"
            "n.dispatchEvent(new Event('input')); }"
        )
        assert outcomes(browser) == expected(found, review, reject)
    command = browser.evaluate("document.getElementById('command').value")
    assert "--threshold 9.5 --review-threshold 7.25" in command


def test_only_what_matters_most_has_a_picture(browser: Browser, tmp_path: Path) -> None:
    found = [*rows(5000), row("/in/dark.png", 1.0, reason="too dark")]
    page = written(tmp_path, found)
    browser.open(page)
    names = browser.evaluate("[...document.querySelectorAll('.tile')].map((n) => n.title)")
    highest = sorted(found[:-1], key=lambda r: -(r.image_score or 0))[: SHOWN - 1]
    assert names == [*(r.path for r in highest), "/in/dark.png"]
    said = browser.evaluate("document.getElementById('shown').textContent")
    assert said.startswith(f"{SHOWN} of {SHOWN} images")
    assert "the highest scores of 5001 images" in said


def test_a_hundred_thousand_images_stay_small_and_quick(browser: Browser, tmp_path: Path) -> None:
    found = rows(100_000)
    page = written(tmp_path, found)
    assert page.stat().st_size < 1.4e6
    assert browser.open(page) < 5
    assert sum(outcomes(browser).values()) == 100_000


def test_heatmaps_are_in_the_page_and_named_on_disk(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "heatmaps").mkdir()
    picture = np.random.default_rng(0).integers(60, 200, (1254, 500, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "heatmaps" / "a #1.png"), picture)
    (tmp_path / "heatmaps" / "torn.png").write_bytes(b"\x89PNG")
    found = [
        row("/in/a/a #1.png", 9.0, heatmap="heatmaps/a #1.png"),
        row("/in/b/torn.png", 8.0, heatmap="heatmaps/torn.png"),
        row("/in/b/gone.png", 7.0, heatmap="heatmaps/gone.png"),
        row("/in/b/none.png", 6.0),
    ]
    browser.open(written(tmp_path, found))
    files = browser.evaluate("[...document.querySelectorAll('.file')].map((n) => n.textContent)")
    assert files == ["a/a #1.png", "b/torn.png", "b/gone.png", "b/none.png"]
    frames = browser.evaluate("[...document.querySelectorAll('.frame')].map((n) => n.textContent)")
    assert frames == ["", "no picture", "no picture", "no picture"]
    browser.evaluate("document.querySelector('.tile').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.getElementById('viewer-file').getAttribute('href')") == (
        "heatmaps/a%20%231.png"
    )
    browser.press("z")
    browser.until("document.querySelector('#viewer .photo').naturalHeight", 1254)
    box = "document.querySelector('#viewer .stack').getBoundingClientRect()"
    assert browser.evaluate(f"[{box}.width, {box}.height]") == [500, 1254]
    for _ in range(3):
        browser.evaluate("document.getElementById('next').click()")
    assert browser.evaluate("document.getElementById('full').offsetParent === null")
    assert browser.evaluate("document.getElementById('viewer-file').offsetParent === null")


def test_failed_images_say_why(browser: Browser, tmp_path: Path) -> None:
    bad = [row(f"/in/{i}.png", None, reason=f"broken in row {i}") for i in range(300)]
    browser.open(written(tmp_path, [*rows(5), *bad]))
    text = browser.evaluate("document.getElementById('refused').textContent")
    assert "Not scored: 300" in text
    assert "/in/7.png – unreadable: broken in row 7" in text
    assert "and 100 more, all in results.csv" in text
    browser.evaluate("document.querySelector('#shown a').click()")
    assert "300 not scored" in browser.evaluate("document.getElementById('shown').textContent")


def test_a_run_without_a_single_score_still_has_a_page(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, [row("/in/x.png", None, reason="empty file")]))
    assert "No image was scored" in browser.evaluate("document.getElementById('shown').textContent")


def test_only_what_fits_images_without_labels_is_there(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, rows(20)))
    gone = ["types", "tab-curves", "opacity", "outline", "type-filter", "viewer-outline"]
    for name in gone:
        assert browser.evaluate(f"document.getElementById('{name}').offsetParent === null"), name
    chips = browser.evaluate("[...document.querySelectorAll('.chip')].map((n) => n.textContent)")
    assert [re.sub(r" \d+$", "", chip) for chip in chips] == [
        "All",
        "Rejected",
        "To review",
        "Good",
    ]
    browser.evaluate("document.getElementById('tab-images').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate("document.activeElement.id") == "tab-model"
    for width in (360, 768, 1366):
        browser.resize(width, 768)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    found = [row(f"/in/{name}", 9.0, heatmap=f"heatmaps/{name}") for name in HOSTILE]
    found += [row(f"/in/{name}", None, reason=name) for name in HOSTILE]
    browser.open(written(tmp_path, found))
    for _ in HOSTILE:
        browser.evaluate("document.querySelector('.tile').click()")
        browser.press("ArrowRight")
    assert browser.evaluate("window.hacked === undefined")
    assert browser.evaluate("document.querySelectorAll('script').length") == 2


def test_what_has_a_reason_for_review_is_flagged_by_the_promise(tmp_path: Path) -> None:
    found = [
        row("a.png", 8.0),
        row("b.png", 9.0),
        row("c.png", 11.0),
        row("d.png", 7.0, reason="?"),
    ]
    flagged, rejected = data_of(written(tmp_path, found))["promise"]["rows"]
    assert (flagged[-1], rejected[-1]) == ("75 % (3)", "25 % (1)")


def test_the_page_hangs_on_the_rows_alone(tmp_path: Path) -> None:
    found = [row(f"/in/{i}.png", 5.0) for i in range(3 * SHOWN)]
    once, again = data_of(written(tmp_path, found)), data_of(written(tmp_path, found))
    once.pop("provenance"), again.pop("provenance")
    assert once == again
    assert [image["name"] for image in once["images"]] == [r.path for r in found[:SHOWN]]


def test_a_heatmap_of_an_earlier_part_is_no_bomb(tmp_path: Path) -> None:
    """On `--resume` heatmaps are read again: one that was exchanged is left out undecoded."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(30_000 * 3751))),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    ]
    file = tmp_path / "heatmap.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert _picture(file, 10_000) is None
    assert _picture(tmp_path / "gone.png", 10_000) is None
    cv2.imwrite(str(file), np.full((200, 400, 3), (0, 0, 255), np.uint8))
    assert _picture(file, 10_000) is not None
