"""A missed defect: its place among good scores, other settings, and how it binds later versions."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, write_part
from scipy.stats import binomtest

import anomaly
from anomaly.config.load import parse_config
from anomaly.errors import DataError
from anomaly.explain.missed import explain_missed
from anomaly.explain.other_settings import (
    Budget,
    OverBudgetError,
    other_settings,
    settings_table,
)
from anomaly.files.writing import sha256_of
from anomaly.storage.golden import keep_missed, moved_since
from anomaly.storage.load import load_model


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    """A run of our own; its golden parts are ours, too."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


@pytest.fixture
def faint(tmp_path: Path) -> Path:
    """A part that the model calls good; somebody calls it defective."""
    write_part(tmp_path / "line" / "faint.png", seed=4242)
    return tmp_path / "line" / "faint.png"


def missed(command: Command, *options: object) -> tuple[int, str]:
    code, out, err = command("missed", [*options, "--device", "cpu"])
    return code, out + err


def test_its_place_among_good_scores(run: Path, faint: Path) -> None:
    model = load_model(run, "cpu")
    mask = np.zeros((96, 120), np.uint8)
    mask[40:50, 60:70] = 255
    cv2.imwrite(str(faint.with_name("faint_mask.png")), mask)  # found beside the image
    defect = explain_missed(model, faint)
    good = np.array(json.loads((run / "model" / "calibration.json").read_text())["image"])
    assert defect.caught == ""
    value = defect.catching_threshold
    assert 0.9999 * defect.score < value < defect.score
    count = int((good > value).sum())
    interval = binomtest(count, len(good)).proportion_ci(method="exact")
    assert defect.cost.count == count
    assert (defect.cost.low, defect.cost.high) == pytest.approx((interval.low, interval.high))
    lines = "\n".join(defect.lines())
    assert f"{(good < defect.score).sum()} of {len(good)} good images score lower" in lines
    assert f"of {len(good)} good images, {count} (" in lines
    (item,) = model.predict([faint])
    row, column = np.unravel_index(np.nanargmax(item.patch_scores), item.patch_scores.shape)
    height, width = item.patch_scores.shape
    assert f"x {column * 120 / width:.0f} to {(column + 1) * 120 / width:.0f}, " in lines
    assert f"y {row * 96 / height:.0f} to {(row + 1) * 96 / height:.0f}, " in lines
    assert f"the map reaches {item.anomaly_map[40:50, 60:70].max():.4g}" in lines
    assert f"elsewhere up to {item.anomaly_map.max():.4g}" in lines
    for wrong, why in ((mask[:50], "is 50×120"), (0 * mask, "marks nothing")):
        cv2.imwrite(str(faint.with_name("other.png")), wrong)
        with pytest.raises(DataError, match=why):
            explain_missed(model, faint, mask=faint.with_name("other.png"))


@pytest.mark.parametrize("kind", ["run_folder", "padim_folder"])
def test_other_settings_score_as_models_trained_with_them(
    kind: str, product: Path, faint: Path, request: pytest.FixtureRequest
) -> None:
    model = load_model(request.getfixturevalue(kind), "cpu")
    own, *others = other_settings(model, [faint])
    assert model.thresholds is not None
    assert own.thresholds.good.names == model.thresholds.good.names
    assert own.thresholds.good.image == pytest.approx(model.thresholds.good.image, rel=1e-5)
    assert own.images == pytest.approx([model.predict(faint).score], rel=1e-5)
    assert any(line.startswith("as trained") for line in settings_table([own, *others]))
    data = anomaly.open_dataset("mvtec", product.parent, product.name)
    changes = {f"backbone.layers=[{model.extractor.layers[-1]}]", "model.image_score=max"}
    tried = [one for one in others if one.name in changes]
    assert len(tried) == (2 if kind == "run_folder" else 1)
    for here in tried:
        config = parse_config(model.config.model_dump(mode="json"), "the model", [here.name])
        alone = anomaly.fit(data, config, device="cpu")
        assert alone.thresholds is not None
        assert here.thresholds.good.image == pytest.approx(alone.thresholds.good.image, rel=1e-4)
        assert here.images == pytest.approx([alone.predict(faint).score], rel=1e-4)


def test_a_budget_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now)
    budget = Budget(60.0)
    now += 20
    budget.features(70, 70)
    with pytest.raises(OverBudgetError, match=r"about 500 s .* --budget 9m"):
        budget.features(10, 100)


def test_images_that_arent_missed(
    run: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    spot, learned = product / "test" / "spot" / "000.png", product / "train" / "good" / "003.png"
    broken, white = tmp_path / "broken.png", tmp_path / "white.png"
    broken.write_bytes(b"no picture")
    picture = np.full((96, 120, 3), 255, np.uint8)
    picture[0, 0] = 254
    cv2.imwrite(str(white), picture)
    code, said = missed(command, spot, learned, broken, white, "--model", run, "--keep")
    assert code == 3
    assert said.count("This image is rejected already: score ") == 2
    assert said.count("skipped: ") == 2
    assert "has learned that it is good" in said
    assert not (run / "golden").exists()
    code, said = missed(command, broken, "--model", run)
    assert (code, "broken.png" in said, "Traceback" in said) == (2, True, False)
    code, said = missed(command, spot, learned, "--model", run, "--mask", spot)
    assert (code, "--mask takes one image" in said) == (2, True)
    bare = replace(load_model(run, "cpu"), thresholds=None)
    with pytest.raises(DataError, match="no scores of good images"):
        explain_missed(bare, spot)


def test_training_images_that_have_gone_are_asked_for(
    run: Path, product: Path, faint: Path, command: Command
) -> None:
    record = run / "train.json"
    record.write_text(record.read_text().replace(str(product), "/elsewhere"))
    code, said = missed(command, faint, "--model", run)
    assert (code, "12 of 12 can't be read" in said, "A threshold of " in said) == (0, True, True)
    code, said = missed(command, faint, "--model", run, "--good", product / "train" / "good")
    assert (code, "as trained" in said) == (0, True)


def test_a_kept_one_binds_later_versions(
    run: Path, faint: Path, tmp_path: Path, command: Command
) -> None:
    code, said = missed(command, faint, "--model", run, "--keep", "--output", tmp_path / "why")
    assert (code, (tmp_path / "why" / "faint" / "explanation.html").is_file()) == (0, True)
    (kept,) = (run / "golden" / "missed").iterdir()
    assert (f"kept as {kept}" in said, sha256_of(kept) == sha256_of(faint)) == (True, True)
    # A second time changes nothing.
    assert keep_missed(run / "model", "again.png", faint.read_bytes()) == kept

    check = ["--model", run, "--golden", run / "golden", "--device", "cpu"]
    uncaught = f"known defects caught: 0 of 1; not caught yet: missed/{kept.name} ("
    code, out, _ = command("selfcheck", check)
    assert (code, uncaught in out) == (0, True)
    update = ["--model", run, "--output", tmp_path / "new", "--device", "cpu", "--good"]
    code, _, err = command("update", [*update, faint])
    assert (code, "1 of the test split or known as defects" in err) == (2, True)
    # Once it is caught it may not pass again.
    for threshold, expected, says in (
        (0.001, 0, "known defects caught: 1 of 1"),
        (9.0, 1, "a known defect that was caught passes"),
    ):
        changed = anomaly.load(run, device="cpu").calibrate(threshold=threshold, force=True)
        changed.save(run / "model", overwrite=True)
        code, out, _ = command("selfcheck", check)
        assert (code, says in out) == (expected, True)
        command("selfcheck", [*check, "--record"])


def test_other_answers_to_a_missed_defect_are_no_fault() -> None:
    good = {"missed/a.png": {"image_score": 1.0, "verdict": "good"}}
    now = {"missed/a.png": {"image_score": 9.0, "verdict": "reject"}}
    assert moved_since(good, now, 0.01) == moved_since({}, now, 0.01) == {}
    assert "passes" in moved_since(now, good, 0.01)["missed/a.png"]
    gone = {"missed/a.png": {"image_score": None, "verdict": "unreadable"}}
    assert "can't be scored" in moved_since({}, gone, 0.01)["missed/a.png"]


def test_pictures_that_nobody_has_recorded_are_named(run: Path, faint: Path) -> None:
    (run / "golden").mkdir()
    shutil.copy(faint, run / "golden" / "part.png")
    for folder, says in ((run / "model", "selfcheck --record"), (run, "is in no run")):
        with pytest.raises(DataError, match=says):
            keep_missed(folder, faint.name, faint.read_bytes())
