"""The page for labelling in a real browser: keys, marks by mouse and finger, undo, a reload."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, running_browser
from conftest import write_part
from running import Served, serving
from test_labelling import drawn, pixels_of

VISIBLE = "document.getElementById('marks').getAttribute('visibility')"
# Where the photograph is: its left and top edge, and how many pixels each of its own takes.
SHOWN = """(({x, y, width, height}, {naturalWidth: w, naturalHeight: h}) => {
  const scale = Math.min(width / w, height / h);
  return [x + (width - scale * w) / 2, y + (height - scale * h) / 2, scale];
})(picture.getBoundingClientRect(), picture)"""


def text(page: Browser, element: str) -> str:
    return str(page.evaluate(f"document.getElementById('{element}').textContent"))


def drag(page: Browser, points: list[tuple[int, int]], finger: bool) -> None:
    """A mouse or a finger that goes down, from point to point, and up."""
    if finger:
        for kind, at in [("touchStart", points[:1]), *(("touchMove", [p]) for p in points[1:])]:
            touches = [{"x": x, "y": y} for x, y in at]
            page.call("Input.dispatchTouchEvent", type=kind, touchPoints=touches)
        page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        return
    kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
    for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
        page.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1
        )


def judged(served: Served) -> list[tuple[str, str, str, bytes | None]]:
    """Path, verdict, kind and mask of all that was said, in order."""
    with closing(sqlite3.connect(served.folder.parent / "line.sqlite")) as db:
        return db.execute(
            "SELECT json_extract (line, '$.path'), feedback.verdict, defect_type, png FROM feedback"
            " JOIN parts ON parts.id = part LEFT JOIN marks ON marks.feedback = feedback.id"
            " ORDER BY feedback.id"
        ).fetchall()


@pytest.mark.parametrize(
    ("language", "size", "to_judge", "called"),
    [
        ("en", (1366, 768), "{} to judge", "Called a defect (scratch)"),
        ("de", (820, 1180), "{} zu beurteilen", "Als fehlerhaft beurteilt (scratch)"),
    ],
)
def test_parts_are_judged_and_marked(
    run_folder: Path,
    tmp_path: Path,
    language: str,
    size: tuple[int, int],
    to_judge: str,
    called: str,
) -> None:
    models, finger = tmp_path / "models", language == "de"
    shutil.copytree(run_folder, models / "disc")
    with (
        running_browser(tmp_path / "profile") as page,
        serving(models, "--record", str(tmp_path / "line.sqlite")) as served,
    ):
        for i in range(4):
            write_part(tmp_path / f"{i}.png", seed=500 + i, mark=(20 + 9 * i, 50))
            served.score((tmp_path / f"{i}.png").read_bytes(), f"?name={i}.png")
        order = [part["path"] for part in served.get("/v1/labelling")["parts"]]
        address = f"http://127.0.0.1:{served.port}/label?lang={language}"
        page.call("Emulation.setTouchEmulationEnabled", enabled=finger)
        page.open(address, width=size[0], height=size[1])
        page.until("document.getElementById('left').textContent", to_judge.format(4))
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        page.until(VISIBLE, "visible")
        page.press("g")
        page.until("document.getElementById('left').textContent", to_judge.format(3))
        page.until(VISIBLE, "visible")
        if not finger:  # a closer look
            middle = {"x": size[0] // 3, "y": size[1] // 2, "deltaX": 0, "deltaY": -60}
            page.call("Input.dispatchMouseEvent", type="mouseWheel", **middle)
            page.until("document.getElementById('layers').style.transform.includes('(1.2')", True)
        left, top, scale = page.evaluate(SHOWN)

        def on_screen(*points: tuple[float, float]) -> list[tuple[int, int]]:
            return [(round(left + scale * x), round(top + scale * y)) for x, y in points]

        box = on_screen((20.3, 15.6), (50.2, 40.4))
        way = on_screen((70, 60), (90.5, 50), (90.5, 80))
        page.press("h")  # the heatmap, as large as it is, has the same marks
        drag(page, box, finger)
        page.press("b")
        drag(page, way, finger)
        drag(page, on_screen((30, 50), (40, 60)), finger)
        page.press("u")  # the last stroke
        page.press("g")
        page.until("document.getElementById('answer').textContent.slice(0, 1) === '#'", False)
        page.evaluate("document.getElementById('type').value = 'scratch'")
        page.press("d")
        page.until("document.getElementById('answer').textContent.slice(4)", called)
        page.until(VISIBLE, "visible")
        undo = {"key": "z", "code": "KeyZ", "windowsVirtualKeyCode": 90, "modifiers": 2}
        page.call("Input.dispatchKeyEvent", type="rawKeyDown", **undo)
        page.until("document.getElementById('left').textContent", to_judge.format(3))
        page.until(VISIBLE, "visible")
        assert page.evaluate("document.querySelectorAll('#drawn > *').length") == 2
        page.press("d")
        page.until("document.getElementById('left').textContent", to_judge.format(2))
        page.until(VISIBLE, "visible")
        page.press("1")  # the kind that was just named
        page.press("ArrowRight")
        page.until(
            f"document.getElementById('description').textContent.includes('{order[3]}')", True
        )
        page.open(address, width=size[0], height=size[1])  # goes on with what is left
        page.until(VISIBLE, "visible")
        assert order[2] in text(page, "description")
        page.press("1")
        page.press("d")
        page.until("document.getElementById('left').textContent", to_judge.format(1))
        page.until("document.getElementById('golden').hidden", False)
        page.press("k")
        page.until("document.getElementById('golden').hidden", True, seconds=20)
        assert page.complaints() == []
        rows = judged(served)
    said = [(order[0], "good", ""), (order[1], "defect", "scratch"), (order[1], "", ""),
            (order[1], "defect", "scratch"), *[(order[2], "defect", "scratch")] * 2]  # fmt: skip
    assert [row[:3] for row in rows] == said
    assert [bool(row[3]) for row in rows] == [False, True, False, True, False, False]
    assert rows[1][3] == rows[3][3] != b""
    # Each pixel is marked where the box touches it, or its middle is near the brush's way.
    (x0, y0), (x1, y1), *points = (((x - left) / scale, (y - top) / scale) for x, y in [*box, *way])
    mask, brush = pixels_of(rows[1][3] or b""), 3 / 200 * 120
    least, most = (
        drawn((96, 120), [[x0, y0, x1, y1]], [(brush + slack, points)]) for slack in (-0.1, 0.1)
    )
    assert least.sum() > 700
    assert not (least & ~mask).any()
    assert not (mask & ~most).any()
    assert np.count_nonzero(most) - np.count_nonzero(least) < 60
