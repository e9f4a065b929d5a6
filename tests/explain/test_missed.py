"""A missed defect: its place among good scores, other settings, and how it binds later versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import SHARED, Command, train_arguments, write_part
from scipy.stats import binomtest

import anomaly
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


def test_its_place_among_good_scores(run: Path, faint: Path) -> None:
    model = load_model(run, "cpu")
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
    # The highest patch and what it was compared with, by brute force.
    vectors = model.scorer.tensors()["vectors"].numpy()
    (item,) = model.predict([faint])
    row, column = np.unravel_index(np.nanargmax(item.patch_scores), item.patch_scores.shape)
    height, width = item.patch_scores.shape
    assert f"x {column * 120 / width:.0f} to {(column + 1) * 120 / width:.0f}, " in lines
    assert f"y {row * 96 / height:.0f} to {(row + 1) * 96 / height:.0f}, " in lines
    assert len(vectors) > 1


def test_a_mask_says_how_high_the_map_is_at_the_defect(run: Path, faint: Path) -> None:
    model = load_model(run, "cpu")
    mask = np.zeros((96, 120), np.uint8)
    mask[40:50, 60:70] = 255
    cv2.imwrite(str(faint.with_name("faint_mask.png")), mask)  # found beside the image
    line = explain_missed(model, faint).lines()[-1]
    values = model.predict([faint])[0].anomaly_map
    assert f"the map reaches {values[40:50, 60:70].max():.4g}" in line
    assert f"elsewhere up to {values.max():.4g}" in line
    for wrong, why in ((mask[:50], "is 50×120"), (0 * mask, "marks nothing")):
        cv2.imwrite(str(faint.with_name("other.png")), wrong)
        with pytest.raises(DataError, match=why):
            explain_missed(model, faint, mask=faint.with_name("other.png"))


@pytest.mark.parametrize("kind", ["run_folder", "padim_folder"])
def test_the_models_own_settings_give_the_scores_of_training(
    kind: str, faint: Path, request: pytest.FixtureRequest
) -> None:
    model = load_model(request.getfixturevalue(kind), "cpu")
    own, *others = other_settings(model, [faint])
    assert model.thresholds is not None
    assert own.thresholds.good.names == model.thresholds.good.names
    assert own.thresholds.good.image == pytest.approx(model.thresholds.good.image, rel=1e-5)
    assert own.images == pytest.approx([model.predict(faint).score], rel=1e-5)
    highest = next(one for one in others if one.name == "model.image_score=max")
    if kind == "padim_folder":  # the others weigh patches
        patches = model.predict(faint).patch_scores
        assert highest.images[0] <= np.nanmax(patches) * (1 + 1e-5)


def test_a_layer_alone_scores_as_a_model_of_that_layer(
    run_folder: Path, product: Path, faint: Path
) -> None:
    model = load_model(run_folder, "cpu")
    tried = {one.name: one for one in other_settings(model, [faint])}
    layer = model.extractor.layers[-1]
    values = model.config.model_dump()
    values["backbone"]["layers"] = [layer]
    values["data"]["root"] = str(product.parent)
    data = anomaly.open_dataset("mvtec", product.parent, product.name)
    alone = anomaly.fit(data, anomaly.Config.model_validate(values), device="cpu")
    here = tried[f"backbone.layers=[{layer}]"]
    assert alone.thresholds is not None
    assert here.thresholds.good.image == pytest.approx(alone.thresholds.good.image, rel=1e-4)
    assert here.images == pytest.approx([alone.predict(faint).score], rel=1e-4)
    table = settings_table([*tried.values()])
    assert any(line.startswith("as trained") for line in table)


def test_a_budget_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(60.0)
    monkeypatch.setattr("time.monotonic", lambda: budget._began + 20.0)
    budget.features(70, 70)
    with pytest.raises(OverBudgetError, match=r"about 500 s .* --budget 9m"):
        budget.features(10, 100)


def test_images_that_arent_missed(
    run: Path, product: Path, tmp_path: Path, command: Command, run_folder: Path
) -> None:
    def missed(*options: object) -> tuple[int, str]:
        code, out, err = command("missed", [*options, "--device", "cpu"])
        return code, out + err

    spot, learned = product / "test" / "spot" / "000.png", product / "train" / "good" / "003.png"
    code, said = missed(spot, "--model", run, "--keep")
    assert (code, "This image is rejected already: score " in said) == (0, True)
    code, said = missed(learned, "--model", run, "--keep")
    assert (code, "has learned that it is good" in said) == (2, True)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    code, said = missed(tmp_path / "broken.png", "--model", run)
    assert (code, "broken.png" in said, "Traceback" in said) == (2, True, False)
    code, said = missed(spot, tmp_path / "broken.png", "--model", run)
    assert (code, "skipped: " in said) == (3, True)
    white = np.full((96, 120, 3), 255, np.uint8)
    white[0, 0] = 254
    cv2.imwrite(str(tmp_path / "white.png"), white)
    code, said = missed(tmp_path / "white.png", "--model", run)
    assert (code, "This image is rejected already: " in said) == (0, True)
    assert not (run / "golden").exists()
    code, said = missed(spot, learned, "--model", run, "--mask", spot)
    assert (code, "--mask takes one image" in said) == (2, True)
    settings = {"backbone": {"name": "tiny", "weights": "random"}, "image": {"area": 64}}
    bare = anomaly.fit(product / "train" / "good", settings, device="cpu", calibrate=False)
    bare.save(tmp_path / "bare")
    code, said = missed(spot, "--model", tmp_path / "bare")
    assert (code, "no scores of good images" in said) == (2, True)


def test_training_images_that_have_gone_are_asked_for(
    product: Path, faint: Path, tmp_path: Path, command: Command
) -> None:
    moved = Path(shutil.copytree(product, tmp_path / "there" / "disc"))
    assert command("train", train_arguments(moved, tmp_path / "new"))[0] == 0
    good = moved.rename(tmp_path / "elsewhere") / "train" / "good"
    arguments = [faint, "--model", tmp_path / "new", "--device", "cpu"]
    code, out, err = command("missed", arguments)
    assert (code, "12 of 12 can't be read" in err, "A threshold of " in out) == (0, True, True)
    code, out, _ = command("missed", [*arguments, "--good", good])
    assert (code, "as trained" in out) == (0, True)


def test_a_kept_one_binds_later_versions(
    run: Path, faint: Path, tmp_path: Path, command: Command
) -> None:
    code, out, _ = command(
        "missed", [faint, "--model", run, "--keep", "--output", tmp_path / "why"]
    )
    assert (code, (tmp_path / "why" / "faint" / "explanation.html").is_file()) == (0, True)
    (kept,) = (run / "golden" / "missed").iterdir()
    assert (f"kept as {kept}" in out, sha256_of(kept) == sha256_of(faint)) == (True, True)
    # A second time changes nothing.
    assert keep_missed(run / "model", "again.png", faint.read_bytes()) == kept

    check = ["--model", run, "--golden", run / "golden", "--device", "cpu"]
    code, out, _ = command("selfcheck", check)
    assert (code, f"known defects caught: 0 of 1; not caught yet: missed/{kept.name} (" in out) == (
        0,
        True,
    )
    for i in range(4):
        write_part(tmp_path / "good" / f"{i}.png", seed=900 + i)
    arguments: list[object] = ["--model", run, "--good", tmp_path / "good", "--device", "cpu"]
    only_faint = ["--model", run, "--good", faint, "--output", tmp_path / "new"]
    code, _, err = command("update", only_faint)
    assert (code, "1 of the test split or known as defects" in err) == (2, True)
    code, out, _ = command("update", [*arguments, "--output", tmp_path / "new"])
    assert (code, "Still missed, as before: 1." in out) == (0, True)
    record = json.loads((tmp_path / "new" / "golden" / "golden.json").read_text())
    assert record["images"][f"missed/{kept.name}"]["verdict"] == "good"


def test_what_is_caught_may_not_pass_again(run: Path, faint: Path, command: Command) -> None:
    keep_missed(run / "model", faint.name, faint.read_bytes())
    check = ["--model", run, "--golden", run / "golden", "--device", "cpu"]
    lower = ["--model", run, "--threshold", 0.001, "--device", "cpu"]
    assert command("calibrate", lower)[0] == 0
    code, out, _ = command("selfcheck", check)
    assert (code, "known defects caught: 1 of 1" in out) == (0, True)
    assert command("selfcheck", [*check, "--record"])[0] == 0
    assert command("calibrate", [*lower, "--yes", "--threshold", 9.0])[0] == 0
    code, out, _ = command("selfcheck", check)
    assert (code, "a known defect that was caught passes" in out) == (1, True)


def test_other_answers_to_a_missed_defect_are_no_fault() -> None:
    good = {"image_score": 1.0, "verdict": "good"}
    now = {"missed/a.png": {"image_score": 9.0, "verdict": "reject"}}
    assert moved_since({"missed/a.png": good}, now, 0.01) == {}
    assert moved_since({}, now, 0.01) == {}
    assert "passes" in moved_since(now, {"missed/a.png": good}, 0.01)["missed/a.png"]
    gone = {"missed/a.png": {"image_score": None, "verdict": "unreadable"}}
    assert "can't be scored" in moved_since({}, gone, 0.01)["missed/a.png"]


def test_pictures_that_nobody_has_recorded_are_named(run: Path, faint: Path) -> None:
    (run / "golden").mkdir()
    shutil.copy(faint, run / "golden" / "part.png")
    with pytest.raises(DataError, match="selfcheck --record"):
        keep_missed(run / "model", faint.name, faint.read_bytes())
    with pytest.raises(DataError, match="is in no run"):
        keep_missed(run, faint.name, faint.read_bytes())


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "data" / "casting").is_dir(), reason="needs the castings")
def test_castings(tmp_path: Path) -> None:
    """Of photographed defects that pass, each is scored as a model of other settings would."""
    folder = SHARED / "data" / "casting"
    good = sorted((folder / "train" / "good").iterdir())[:40]
    defects = sorted(p for p in (folder / "test").rglob("*") if "good" not in p.parts)
    defects = [p for p in defects if p.is_file()][:30]
    settings = {"image": {"area": 128}, "backbone": {"name": "timm/tf_efficientnet_lite2"}}
    detector = anomaly.fit(good, settings, device="cpu")
    detector.save(tmp_path / "run" / "model")
    model = load_model(tmp_path / "run", "cpu")
    missed = [p.path for p in model.predict(defects) if p.verdict == "good"][:3]
    if not missed:
        pytest.skip("none of these defects passes")
    tried = other_settings(model, missed, good=[folder / "train" / "good"])
    assert tried[0].caught == 0
    other = anomaly.fit(good, settings | {"model": {"image_score": "map_max"}}, device="cpu")
    here = next(one for one in tried if one.name == "model.image_score=map_max")
    assert other.thresholds is not None
    assert here.thresholds.review == pytest.approx(other.thresholds.review, rel=1e-3)
    assert here.images == pytest.approx([p.score for p in other.predict(missed)], rel=1e-3)
