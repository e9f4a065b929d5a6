"""Defects that were called good: their pictures are kept, and versions that miss them refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Says, run_command, train_arguments, write_part
from running import serving

from anomaly.desk.golden import keep_missed
from anomaly.line.record import confirmed_parts


@pytest.fixture
def faint(tmp_path: Path) -> Path:
    """A part that the model calls good; somebody calls it defective."""
    write_part(tmp_path / "faint.png", seed=4242)
    return tmp_path / "faint.png"


def test_the_picture_of_a_part_that_people_judge_is_kept(
    run_folder: Path, tmp_path: Path, faint: Path
) -> None:
    """Of a good part, too, so that an update learns of a defect that was called good."""
    run = Path(shutil.copytree(run_folder, tmp_path / "models" / "disc"))
    with serving(run.parent, goods=0) as served:
        for verdict in ("defect", "good"):  # the second one is scored, but not judged
            row = served.score(faint.read_bytes() + b"\0" * (verdict == "good"))[1]
            assert row["verdict"] == "good"
            if verdict == "defect":
                judged = f"/v1/parts/{row['id']}/feedback"
                assert served.post(judged, verdict="defect", who="Ada")[0] == 200
    found = confirmed_parts(run.parent / "line.sqlite", [row["model_id"]], tmp_path / "found")
    (defect,) = found.defects
    assert defect.path.read_bytes() == faint.read_bytes()
    assert (found.past, found.lost) == ([], 0)


def test_a_version_that_loses_a_known_defect_isnt_deployed(
    run_folder: Path,
    tmp_path: Path,
    faint: Path,
    says: Says,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the line's model misses as well is no reason; known defects go along, and back."""
    run = Path(shutil.copytree(run_folder, tmp_path / "line"))
    new = Path(shutil.copytree(run_folder, tmp_path / "new"))
    kept = keep_missed(run / "model", "faint.png", faint.read_bytes()).name
    arguments = ["--to", run, "--model"]
    assert "holds this model already; nothing was changed" in says(0, "deploy", [*arguments, new])
    by_hand = ["--model", new, "--yes", "--threshold", 9.0]
    says(0, "calibrate", by_hand)
    out = says(1, "deploy", [*arguments, new])
    assert "add --yes" in out
    assert "known defects caught: 3 of 4 before, 0 after" in out
    assert "3 known defects now caught would be called good (test/spot/000.png" in caplog.text
    assert not (run / "earlier").exists()
    says(0, "deploy", [*arguments, new, "--yes"])
    assert (run / "golden" / "missed" / kept).read_bytes() == faint.read_bytes()
    assert json.loads((run / "golden" / "golden.json").read_text())["images"] == {}
    write_part(tmp_path / "other.png", seed=4343)
    later = keep_missed(run / "model", "other.png", (tmp_path / "other.png").read_bytes()).name
    # The one before misses only what this one misses, too: it needs no word.
    assert "Still missed, as before: 2." in says(0, "deploy", ["--to", run, "--back"])
    assert sorted(p.name for p in (run / "golden" / "missed").iterdir()) == sorted([kept, later])


def test_another_products_model_isnt_deployed(
    run_folder: Path, tmp_path: Path, says: Says, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the line has no golden parts that would be flagged."""
    (tmp_path / "stripes").mkdir()
    for i in range(12):
        stripes = np.full((96, 120), 40 + 120 * (np.arange(120) // 6 % 2), np.uint8)
        noise = np.random.default_rng(i).normal(0, 6, (96, 120, 3))
        picture = np.clip(stripes[..., None] + noise, 0, 255).astype(np.uint8)
        cv2.imwrite(str(tmp_path / "stripes" / f"{i}.png"), picture)
    settings = ["data.format=folder", "data.category=null", f"data.root={tmp_path / 'stripes'}"]
    run_command("train", train_arguments(tmp_path, tmp_path / "other", *settings))
    line = tmp_path / "line"
    shutil.copytree(run_folder / "model", line / "model")
    arguments = ["--model", tmp_path / "other", "--to", line]
    assert "add --yes" in says(1, "deploy", arguments)
    assert "has learned other parts than the present model: another product?" in caplog.text
