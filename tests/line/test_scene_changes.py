"""A lamp that fails: what `infer`, the service and its page say of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from browser import Browser, running_browser
from conftest import Command, write_part
from running import Served

from anomaly.inference.journal import RunJournal

CHANGED = "scene changed: brightness is 3"


def write_parts(folder: Path, first: int, count: int, light: float = 1.0) -> list[Path]:
    """Good parts of the tiny product under some light."""
    files = [folder / f"{i:03}.png" for i in range(first, first + count)]
    for i, file in enumerate(files, first):
        write_part(file, seed=500 + i)
        picture = cv2.imread(str(file)).astype(np.float64)
        cv2.imwrite(str(file), np.clip(picture * light, 0, 255).astype(np.uint8))
    return files


def test_infer_calls_the_scene_changed_and_goes_on_where_it_was(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, out = tmp_path / "parts", tmp_path / "out"
    journals: list[str] = []
    finish = RunJournal.finish

    def keeping(journal: RunJournal, *arguments: Any) -> None:
        journals.append(journal.file.read_text())
        finish(journal, *arguments)

    monkeypatch.setattr(RunJournal, "finish", keeping)
    for first, count, light in ((0, 10, 1.0), (10, 12, 0.65), (22, 12, 1.0)):
        write_parts(parts, first, count, light)
    arguments = ["--model", run_folder, "--input", parts, "--output", out, "--heatmap", "none"]
    code, _, err = command("infer", arguments)
    assert code == 0
    assert "scene changed at part 17: brightness is 3" in err
    assert "anomaly update teaches" in err
    assert "the scene looks right again since part 30" in err
    text = (out / "results.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    changed = [CHANGED in row["reason"] for row in rows]
    assert changed == [False] * 16 + [True] * 13 + [False] * 5
    assert {row["verdict"] for row in rows[16:29]} == {"review"}
    assert all(row["image_score"] > 0 for row in rows)
    # Broken off amid it, and gone on with: what is said of the rest is the same.
    (out / "results.done.json").unlink()
    lines = journals[0].splitlines(keepends=True)
    kept = 1 + next(i for i in range(1, len(lines)) if _images(lines[1 : 1 + i]) > 20)
    assert _images(lines[1:kept]) < 29
    (out / "results.partial.jsonl").write_text("".join(lines[:kept]))
    assert command("infer", [*arguments, "--resume"])[0] == 0
    again = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in again] == [row["reason"] for row in rows]


def test_subfolders_are_no_parts_in_a_row(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    """Kinds of defect, one after the other, look alike in a row and are no change of the scene."""
    for kind in ("dark", "usual"):
        write_parts(tmp_path / "parts" / kind, 0, 10, 0.65 if kind == "dark" else 1.0)
    out = tmp_path / "out"
    arguments = ["--model", run_folder, "--input", tmp_path / "parts", "--output", out]
    code, _, err = command("infer", arguments)
    assert code == 0
    assert CHANGED not in err
    assert CHANGED not in (out / "results.jsonl").read_text()


def _images(lines: list[str]) -> int:
    return sum(len(json.loads(line)["images"]) for line in lines)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_the_service_says_that_the_scene_is_changed(served: Served, tmp_path: Path) -> None:
    dark, usual = write_parts(tmp_path, 100, 10, 0.65), write_parts(tmp_path, 200, 10)
    answers = [served.score(file.read_bytes())[1] for file in dark]
    last = answers[-1]
    assert (last["verdict"], last["reason"].startswith(CHANGED)) == ("review", True)
    assert not answers[3]["reason"].startswith("scene")
    assert served.get(f"/v1/parts/{last['id']}")["reason"] == last["reason"]  # the record's
    health = served.get("/v2/health/ready")
    assert health["ready"]
    assert f"scene changed: {health['scene']['disc']}; brightness 0.2" in last["reason"]
    assert b'anomaly_scene_changed{model="disc"} 1.0' in served.ask("GET", "/metrics")[2]
    after = [served.score(file.read_bytes())[1] for file in usual]
    assert after[0]["reason"].startswith(CHANGED)
    assert (after[-1]["verdict"], after[-1]["reason"]) == ("good", "")
    assert served.get("/v2/health/ready")["scene"] == {}
    assert b'anomaly_scene_changed{model="disc"} 0.0' in served.ask("GET", "/metrics")[2]


def test_the_page_says_that_the_scene_is_changed(
    served: Served, window: Browser, tmp_path: Path
) -> None:
    window.open(f"http://127.0.0.1:{served.port}/")
    for file in write_parts(tmp_path, 300, 10, 0.65):
        served.score(file.read_bytes())
    alarm = "document.getElementById('alarms')"
    text = "disc: THE SCENE HAS CHANGED, not the parts: bri"
    window.until(f"{alarm}.textContent.includes('{text}')", True)
    assert CHANGED in str(window.evaluate("document.getElementById('reason').textContent"))
    for file in write_parts(tmp_path, 400, 10):
        served.score(file.read_bytes())
    window.until(f"{alarm}.textContent.includes('THE SCENE')", False)
