"""Thresholds without retraining: by rate and hand, on record, of no good test image."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Says, run_command, train_arguments, with_note, write_part, write_product
from kit import bgr, contents, table, with_data

import anomaly
from anomaly.training.features import CachedFeatures

Calibrate = Callable[..., str]
SAME = ("backbone.safetensors", "scorer.safetensors", "config.yaml")


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    """A trained run of one's own, to change."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    for i in range(10):
        write_part(tmp_path / "good" / f"{i:03}.png", seed=300 + i)
    return tmp_path / "good"


@pytest.fixture
def defects(tmp_path: Path) -> Path:
    for i in range(4):
        write_part(tmp_path / "defects" / f"{i:03}.png", seed=400 + i, mark=(30, 30 + 8 * i))
    return tmp_path / "defects"


@pytest.fixture
def calibrate(run: Path, says: Says) -> Calibrate:
    """Runs the command on one's own run, or another, to an exit code; all that it says."""

    def change(code: int, *options: object, model: Path = run) -> str:
        return says(code, "calibrate", ["--model", model, *options])

    return change


def _thresholds(run: Path) -> dict[str, Any]:
    return json.loads((run / "model" / "thresholds.json").read_text())


def _history(run: Path) -> list[dict[str, Any]]:
    text = (run / "model" / "history.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _files(run: Path) -> dict[str, bytes]:
    return contents(run / "model")


def test_without_calibration_there_are_no_verdicts_until_calibrate_finds_some(
    product: Path, good: Path, tmp_path: Path, says: Says, calibrate: Calibrate
) -> None:
    run = tmp_path / "free"
    assert "no thresholds" in says(0, "train", [*train_arguments(product, run), "--no-calibrate"])
    assert _thresholds(run) is None
    assert "--good" in calibrate(2, model=run)
    assert "10 good images" in calibrate(0, "--good", good, model=run)
    assert _history(run)[0]["before"] is None
    spots = sorted((product / "test" / "spot").iterdir())
    assert [p.verdict for p in anomaly.load(run, device="cpu").predict(spots)] == ["reject"] * 3


def test_a_change_by_hand_is_on_record_and_changes_nothing_else(
    run: Path, product: Path, tmp_path: Path, calibrate: Calibrate
) -> None:
    before = _files(run)
    old = _thresholds(run)["reject"]["value"]
    said = calibrate(0, "--threshold", 2 * old, "--review-threshold", old)
    assert "times the highest score of the good images" in said
    assert f"review threshold {old:.5g}" in said
    after = _files(run)
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}
    assert after["manifest.json"] != before["manifest.json"]
    (line,) = _history(run)
    assert line["asked"] == {"threshold": 2 * old, "review_threshold": old}
    assert line["before"]["reject"]["value"] == old
    assert line["after"]["reject"]["value"] == 2 * old
    ids = [hashlib.sha256(files["manifest.json"]).hexdigest()[:16] for files in (before, after)]
    assert [line["model_before"], line["model_after"]] == ids

    infer = ["--model", run, "--input", product / "test", "--output", tmp_path / "out"]
    run_command("infer", infer)
    for row in table(tmp_path / "out"):
        assert row["threshold_label"] == "by hand"
        assert row["model_id"] == line["model_after"]
        keys = ("image_score", "review_threshold", "threshold")
        score, review, reject = (float(row[key]) for key in keys)
        expected = "good" if score <= review else "review" if score <= reject else "reject"
        assert row["verdict"] == expected
    assert _files(run) == after

    # The way back: the rates that the model was trained with give its thresholds again.
    assert "thresholds by hand are replaced by thresholds calibrated" in calibrate(0)
    assert _files(run) | {"history.jsonl": b""} == before | {"history.jsonl": b""}
    assert "nothing was changed" in calibrate(0)
    assert len(_history(run)) == 2


def test_a_change_that_loses_known_defects_is_refused_unless_somebody_agrees(
    run: Path, defects: Path, calibrate: Calibrate
) -> None:
    before = _files(run)
    said = calibrate(1, "--threshold", 9.0, "--defects", defects)
    assert "add --yes" in said
    assert "known defects caught: 7 of 7 before, 0 after" in said  # those of the test split, too
    assert re.search(r"known good parts flagged: \d of 3 before, 0 after", said)
    assert "7 known defects now caught would be called good (" in said
    assert _files(run) == before
    detector = anomaly.load(run, device="cpu")
    with pytest.raises(anomaly.AnomalyError, match=r"3 known defects now caught .* force=True"):
        detector.calibrate(threshold=9.0)
    assert detector.calibrate(threshold=9.0, force=True).thresholds is not None
    # What is missed already refuses nothing.
    calibrate(0, "--threshold", 9.0, "--yes")
    assert "Still missed, as before: 3." in calibrate(0, "--threshold", 8.0)


def test_each_change_can_be_undone_until_none_is_left(run: Path, calibrate: Calibrate) -> None:
    states = [_thresholds(run)]
    for threshold in (0.002, 0.003):
        calibrate(0, "--threshold", threshold)
        states.append(_thresholds(run))
    for earlier in (1, 0):
        assert "3 of 3 before, 3 after" in calibrate(0, "--undo")
        assert _thresholds(run) == states[earlier]
    assert "nothing to undo" in calibrate(2, "--undo")
    assert [line["asked"] for line in _history(run)][2:] == 2 * [{"undo": True}]


def test_what_was_taken_as_a_defect_never_counts_as_good_later(
    run: Path, production: Path, calibrate: Calibrate
) -> None:
    """Nor does what was given as a defect, whatever form the next calibration has."""
    unsorted = ["--yes", "--production", production, "--at-most-defective"]
    calibrate(0, *unsorted, "5%")
    (taken,) = _history(run)[-1]["images"]["taken as defects"].values()
    assert "production images left out: 1 taken as defects before" in calibrate(0, *unsorted, "0%")
    good = json.loads((run / "model" / "calibration.json").read_text())
    assert (len(good["names"]), taken in good["hashes"]) == (39, False)
    calibrate(0, "--yes", "--defects", production / good["names"][0])
    for form in ([], ["--review-rate", "0.1"], [*unsorted[1:], "0%"]):
        calibrate(0, "--yes", *form)
        kept = json.loads((run / "model" / "calibration.json").read_text())
        assert {taken, good["hashes"][0]}.isdisjoint(kept["hashes"])


def test_a_data_set_that_has_moved_is_still_kept_from_the_thresholds(
    run: Path, product: Path, tmp_path: Path, calibrate: Calibrate
) -> None:
    (run / "train.json").unlink()
    assert "make sure that these images" in calibrate(
        0, "--good", product / "test" / "good", "--yes"
    )
    moved = tmp_path / "moved"
    shutil.copytree(product, moved / product.name)
    # An image that is gone doesn't make the others fair game.
    (moved / product.name / "test" / "spot" / "000.png").unlink()
    (moved / product.name / "test" / "spot" / "000.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "some").mkdir()
    shutil.copy(product / "test" / "spot" / "001.png", tmp_path / "some" / "innocent.png")
    with_data(run, moved / product.name)
    said = calibrate(2, "--good", tmp_path / "some")
    assert "none of 1 good images can be used: 1 of the test split" in said


def test_one_odd_good_image_is_named_and_can_be_left_out(
    tmp_path: Path, says: Says, calibrate: Calibrate, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(12):
        write_part(tmp_path / "parts" / f"{i:03}.png", seed=i, mark=(30, 60) if i == 7 else None)
    run = tmp_path / "odd"
    out = says(0, "train", train_arguments(tmp_path / "parts", run, "data.format=folder"))
    assert "12 training images, each scored by a model that hasn't seen it" in out
    # Clopper–Pearson by hand: no reject among 12 says at most 1 − 0.05^(1/12) = 22 %.
    assert "at most 22 %" in out
    assert "to promise 1 %, add " in out
    written = _thresholds(run)
    assert written["label"] == "calibrated"
    scores = json.loads((run / "model" / "calibration.json").read_text())["image"]
    # A hundredth above the highest score: no rounding brings a training image over it.
    assert written["reject"]["value"] == pytest.approx(max(scores) * 1.01, rel=1e-6)
    found = anomaly.load(run, device="cpu").thresholds
    assert found is not None
    name, score, without = found.raised_by()[0]
    assert (name, without < 0.9 * score) == ("007.png", True)
    assert "1 training image looks unlike all others: 007.png" in out
    assert f"the reject threshold would be {without:.5g} instead of" in out
    assert "Remove images that aren't good and train again" in out

    before = _files(run)
    odd = tmp_path / "parts" / "007.png"
    said = calibrate(0, "--defects", odd, "--yes", model=run)
    assert "at most 24 %" in said  # 1 − 0.05^(1/11)
    assert "thresholds calibrated on 11 training images" in said
    assert "left out by hand: 1 (007.png)" in said
    assert "the model has still learned" in said
    assert _thresholds(run)["reject"]["value"] == without
    (line,) = _history(run)
    assert (line["asked"], [*line["images"]["defects"]]) == ({}, [str(odd)])
    assert line["left_out"] == ["007.png"]

    again = anomaly.load(run, device="cpu").calibrate(reject_rate=0.02)
    assert again.thresholds is not None
    assert again.thresholds.good.left_out == ("007.png",)
    calibrate(0, "--undo", model=run)
    assert _files(run) | {"history.jsonl": b""} == before | {"history.jsonl": b""}


def test_good_images_that_cannot_count_are_left_out_and_said(
    run: Path, product: Path, good: Path, defects: Path, tmp_path: Path, calibrate: Calibrate,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    before = _files(run)
    for folder in ("tested", "dark"):
        (tmp_path / folder).mkdir()
    for name, kind in (("one", "spot"), ("other", "good")):
        shutil.copy(product / "test" / kind / "001.png", tmp_path / "tested" / f"{name}.png")
    cap = tmp_path / "dark" / "lens_cap.png"
    cv2.imwrite(str(cap), np.full((96, 120, 3), 1, np.uint8))
    for folder, says in (
        (product / "train" / "good", "12 that the model has learned from"),
        (tmp_path / "tested", "none of 2 good images can be used: 2 of the test split"),
        (tmp_path / "dark", "all 1 good images would be flagged whatever"),
    ):
        assert says in calibrate(2, "--good", folder)
    assert _files(run) == before

    shutil.copy(product / "train" / "good" / "000.png", good / "learned.png")
    shutil.copy(good / "003.png", good / "copy.png")
    (good / "text.png").write_bytes((good / "001.png").read_bytes()[:500])
    mixed = ["--good", good, tmp_path / "tested", tmp_path / "dark", "--defects", defects]
    said = calibrate(3, *mixed, "--false-reject-rate", "0.2")
    for says in (
        "thresholds calibrated on 10 good images",
        "good images left out: 1 that the model has learned from, 2 of the test split or known as "
        "defects, 1 that are copies of others",
        "text.png",
        f"left out: {cap}: all its pixels",
        "of 4 defects 4 rejected: 100 %, 40 to 100 %",
    ):
        assert says in said
    line = _history(run)[-1]
    assert line["defects_found"]["rejected"]["count"] == 4
    assert {name: len(images) for name, images in line["images"].items()} == {
        "good": 11,  # the lens cap is on record, though it counts for nothing
        "defects": 4,
    }
    caplog.clear()
    (good / "text.png").unlink()
    detector = anomaly.load(run, device="cpu").calibrate([*sorted(good.iterdir()), cap])
    assert detector.thresholds is not None
    assert detector.thresholds.images == 10
    assert f"{cap}: all its pixels" in caplog.text


def test_contradictions_are_refused(
    run: Path, good: Path, defects: Path, tmp_path: Path, calibrate: Calibrate
) -> None:
    before = _files(run)
    named = defects.rename(defects.with_name("NG parts"))
    (tmp_path / "bad").mkdir()
    shutil.copy(good / "003.png", tmp_path / "bad" / "scratch.png")
    (good / "zzz.png").write_bytes(b"no image")  # told only once images are looked at
    lot = Path(shutil.copytree(good, tmp_path / "lot" / "Gutteile")).parent
    for given, says in (
        ([named], "NG parts would be taken as good"),
        ([named / "000.png"], "NG parts would be taken as good"),
        ([good, "--defects", lot], "Gutteile would be taken as defective"),
        ([good, "--defects", tmp_path / "bad"], f"{good / '003.png'} is given as good and as a"),
        ([good, "--defects", good / "005.png"], f"{good / '005.png'} is given as good and as a"),
    ):
        said = calibrate(2, "--good", *given)
        assert says in said
        assert "zzz.png" not in said
    with pytest.raises(anomaly.AnomalyError, match="NG parts would be taken as good"):
        anomaly.load(run, device="cpu").calibrate([named / "000.png"])
    assert _files(run) == before


def test_what_raises_the_threshold_is_named_among_further_images_too(
    run: Path, good: Path, tmp_path: Path, calibrate: Calibrate
) -> None:
    """Of two folders with the same file names."""
    shutil.copytree(good, tmp_path / "lots" / "a")
    for i in range(10):
        write_part(tmp_path / "lots" / "b" / f"{i:03}.png", seed=800 + i, mark=(30, 60 - i))
        if i not in (3, 7):
            write_part(tmp_path / "lots" / "b" / f"{i:03}.png", seed=800 + i)
    lots = ["--good", tmp_path / "lots" / "a", tmp_path / "lots" / "b"]
    said = calibrate(0, *lots, "--yes")
    for name in ("003", "007"):
        assert f"b/{name}.png scores " in said
    assert "name those that aren't good with --defects" in said
    odd = [tmp_path / "lots" / "b" / f"{name}.png" for name in ("003", "007")]
    said = calibrate(0, "--defects", *odd, "--yes")
    assert "thresholds calibrated on 18 good images" in said


def test_from_a_program_one_image_is_one_and_none_is_told(run: Path, good: Path) -> None:
    detector = anomaly.load(run, device="cpu")
    one = detector.calibrate(bgr(cv2.imread(str(good / "000.png"))))
    assert one.thresholds is not None
    assert one.thresholds.images == 1
    for nothing in (detector.calibrate, detector.update):
        with pytest.raises(anomaly.AnomalyError, match="no good images were given"):
            nothing([])
    with pytest.raises(anomaly.AnomalyError, match="'3'; it must be a number"):
        detector.calibrate(threshold="3")  # type: ignore[arg-type]


def test_defects_among_good_images_raise_no_threshold_unless_somebody_agrees(
    run: Path, tmp_path: Path, calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    lot = tmp_path / "lot"
    for i in range(8):
        write_part(lot / f"part {i}.png", seed=900 + i, mark=(40, 50) if i == 0 else None)
    before, old = _files(run), _thresholds(run)["reject"]["value"]
    said = calibrate(1, "--good", lot)
    assert "--yes" in said
    assert f"reject threshold {old:.4g} -> " in said
    assert f"the reject threshold rises from {old:.4g} to " in said
    assert "Rejected before: 1 of 8 images (part 0.png" in said
    assert _files(run) == before
    with pytest.raises(anomaly.AnomalyError, match=r": 1 of 8 .* force=True"):
        anomaly.load(run, device="cpu").calibrate(lot)
    forced = anomaly.load(run, device="cpu").calibrate(lot, force=True).thresholds
    assert forced is not None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for answer in ("", "no", "y"):
        assert _files(run) == before
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        calibrate(0 if answer == "y" else 1, "--good", lot)
    assert _thresholds(run)["reject"]["value"] == forced.image


def test_scrambled_test_labels_leave_every_byte_of_the_model_as_it_was(tmp_path: Path) -> None:
    """Good test images are called defects, and the other way round; then there are none."""
    product = write_product(tmp_path / "disc")
    test = product / "test"
    test.joinpath("good").rename(test / "swap")
    test.joinpath("spot").rename(test / "good")
    test.joinpath("swap").rename(test / "spot")
    run_command("train", train_arguments(product, tmp_path / "one"))
    shutil.rmtree(test)
    run_command("train", train_arguments(product, tmp_path / "two"))
    assert _files(tmp_path / "one") == _files(tmp_path / "two")


def test_an_evaluation_says_which_of_its_images_chose_the_thresholds(
    run: Path, evaluated: Path, good: Path, defects: Path, tmp_path: Path, says: Says,
    calibrate: Calibrate,
) -> None:  # fmt: skip
    for i in range(3):
        write_part(tmp_path / "other" / "good" / f"{i}.png", seed=700 + i)
        shutil.copy(good / f"00{i}.png", tmp_path / "other" / "good" / f"renamed {i}.png")
        write_part(tmp_path / "other" / "spot" / f"{i}.png", seed=710 + i, mark=(30, 50 + i))
    shutil.copy(defects / "001.png", tmp_path / "other" / "spot")

    def figures(folder: Path) -> dict[str, Any]:
        text = (folder / "disc" / "metrics.json").read_text()
        return json.loads(text)["categories"]["disc"]

    assert figures(evaluated)["n_threshold_images"] == 0
    output = tmp_path / "figures"
    test = ["--good", tmp_path / "other" / "good", "--defects", tmp_path / "other" / "spot"]
    for chosen, count in (
        (["--threshold", 1], 4),  # perhaps chosen by these defects
        (["--false-reject-rate", 0.02], 3),  # no defect chooses rates
    ):
        calibrate(0, "--good", good, "--defects", defects, *chosen, "--yes")
        arguments = ["--model", run, *test, "--output", output, "--overwrite"]
        said = says(0, "evaluate", arguments)
        used = f"{count} of 10 test images were used to choose the thresholds"
        page = (output / "disc" / "report.html").read_text()
        assert figures(output)["n_threshold_images"] == count
        assert (used in said, used in page) == (True, True)


def test_lots_are_kept_whole_and_said(product: Path, tmp_path: Path, says: Says) -> None:
    rows = [f"train/good/{i:03}.png,train,lot {i % 3}" for i in range(12)]
    listing = tmp_path / "data" / "parts.csv"
    shutil.copytree(product, tmp_path / "data")
    listing.write_text("\n".join(["path,split,group", *rows]) + "\n")
    said = says(0, "train", train_arguments(listing, tmp_path / "run", "data.format=csv"))
    assert "the images come from 3 groups" in said


def test_good_scores_of_0_allow_a_threshold_by_hand(
    product: Path, tmp_path: Path, calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image is like what the others taught: copies, where training doesn't notice that."""
    monkeypatch.setattr(CachedFeatures, "picture_hashes", lambda features: features.hashes)
    source = product / "train" / "good" / "000.png"
    for i in range(4):
        with_note(source, tmp_path / "same" / product.name / f"{i}.png", i)
    run = tmp_path / "alike"
    settings = ["data.format=folder", f"data.root={tmp_path / 'same'}", "model.coreset_ratio=1.0"]
    run_command("train", train_arguments(product, run, *settings))
    calibrate(0, "--threshold", 1, model=run)


@pytest.fixture
def production(tmp_path: Path) -> Path:
    """Forty parts of a lot whose surface is rougher, two of them with a mark."""
    for i in range(40):
        mark = (30, 40) if i in (7, 31) else None
        file = tmp_path / "production" / f"{i:03}.png"
        write_part(file, seed=500 + i, mark=mark)
        picture = cv2.imread(str(file)).astype(float)
        rough = np.random.default_rng(i).normal(0, 6, picture.shape)
        cv2.imwrite(str(file), np.clip(picture + rough, 0, 255).astype(np.uint8))
    return tmp_path / "production"


def test_production_images_find_thresholds_though_some_are_defective(
    run: Path, product: Path, production: Path, calibrate: Calibrate
) -> None:
    arguments = ["--production", production, "--at-most-defective", "5%"]
    before = _files(run)
    said = calibrate(1, *arguments)
    assert "add --yes" in said
    assert _files(run) == before
    flagged = re.search(r"production images flagged: (\d+) of 40 before, ", said)
    assert flagged is not None
    assert int(flagged[1]) > 20
    with_data(run, product)
    said = calibrate(0, *arguments, "--yes")
    assert "calibrated on 40 production images, at most 2 of them defective" in said
    assert re.search(r"taken as defects: \d images? with the highest scores \(.*0(07|31).png", said)
    assert "known defects caught: 3 of 3 before, 3 after" in said
    record = _history(run)[-1]
    assert record["asked"] == {"at_most_defective": 0.05}
    assert len(record["images"]["production"]) == 40
    predictions = anomaly.load(run, device="cpu").predict(sorted(production.iterdir()))
    caught = {p.path.name for p in predictions if p.verdict != "good"}
    assert {"007.png", "031.png"} <= caught
    assert len(caught) <= 8
