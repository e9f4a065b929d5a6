"""A missed defect: which threshold would have caught it, and how it binds later versions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Says, write_part
from scipy.stats import binomtest

import anomaly
from anomaly.desk.golden import Answer, keep_missed, moved_since
from anomaly.errors import DataError
from anomaly.files.writing import sha256_of
from anomaly.storage.models import load_model


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    """A run of our own; its golden parts are ours, too."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


@pytest.fixture
def faint(tmp_path: Path) -> Path:
    """A part that the model calls good; somebody calls it defective."""
    write_part(tmp_path / "line" / "faint.png", seed=4242)
    return tmp_path / "line" / "faint.png"


def arguments(image: Path, run: Path, *options: object) -> list[object]:
    return [image, "--model", run, "--overwrite", *options]


def test_its_catching_threshold_and_what_that_costs(
    run: Path, faint: Path, tmp_path: Path, says: Says
) -> None:
    score = load_model(run, "cpu").predict([faint])[0].score
    good = np.array(json.loads((run / "model" / "calibration.json").read_text())["image"])
    said = says(0, "explain", arguments(faint, run, "--output", tmp_path / "why"))
    found = re.search(r"review threshold of (\S+) would catch it; of (\d+) .*, (\d+) \(", said)
    assert found, said
    value, images, above = (float(text) for text in found.groups())
    assert 0.9999 * score < value < score
    assert (images, above) == (len(good), (good > value).sum())
    interval = binomtest(int(above), len(good)).proportion_ci(method="exact")
    assert f", {100 * interval.low:.2g}" in said
    assert f" to {100 * interval.high:.2g} % with 95 % confidence)" in said


def test_images_that_arent_missed(run: Path, product: Path, tmp_path: Path, says: Says) -> None:
    spot, learned = product / "test" / "spot" / "000.png", product / "train" / "good" / "003.png"
    where = ["--keep", "--output", tmp_path / "why"]
    assert "the verdict is reject" in says(2, "explain", arguments(spot, run, *where))
    assert "has learned that it is good" in says(2, "explain", arguments(learned, run, *where))
    assert not (run / "golden").exists()


def test_a_kept_one_binds_later_versions(
    run: Path, faint: Path, tmp_path: Path, says: Says
) -> None:
    said = says(0, "explain", arguments(faint, run, "--keep", "--output", tmp_path / "why"))
    assert (tmp_path / "why" / "explanation.html").is_file()
    (kept,) = (run / "golden" / "missed").iterdir()
    assert (f"kept as {kept}" in said, sha256_of(kept) == sha256_of(faint)) == (True, True)
    # A second time changes nothing.
    assert keep_missed(run / "model", "again.png", faint.read_bytes()) == kept

    check = ["--model", run, "--golden", run / "golden"]
    uncaught = f"known defects caught: 0 of 1; not caught yet: missed/{kept.name} ("
    assert uncaught in says(0, "evaluate", check)
    update = ["--model", run, "--output", tmp_path / "new", "--good"]
    said = says(2, "update", [*update, faint])
    assert "1 of the test split or known as defects" in said
    # Once it is caught it may not pass again.
    for threshold, code, verdict in (
        (0.001, 0, "known defects caught: 1 of 1"),
        (9.0, 1, "a known defect that was caught passes"),
    ):
        changed = anomaly.load(run, device="cpu").calibrate(threshold=threshold, force=True)
        changed.save(run / "model", overwrite=True)
        assert verdict in says(code, "evaluate", check)
        says(0, "evaluate", [*check, "--overwrite"])


def test_other_answers_to_a_missed_defect_are_no_fault() -> None:
    good, now = (
        {"missed/a.png": answer} for answer in (Answer(1.0, "good"), Answer(9.0, "reject"))
    )
    assert moved_since(good, now, 0.01) == moved_since({}, now, 0.01) == {}
    assert "passes" in moved_since(now, good, 0.01)["missed/a.png"]


def test_pictures_that_nobody_has_recorded_are_named(run: Path, faint: Path) -> None:
    (run / "golden").mkdir()
    shutil.copy(faint, run / "golden" / "part.png")
    for folder, says in ((run / "model", "evaluate --golden"), (run, "is in no run")):
        with pytest.raises(DataError, match=says):
            keep_missed(folder, faint.name, faint.read_bytes())
