"""Thresholds without retraining: by rate and hand, on record, of no good test image."""

import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Command, train_arguments, with_note, write_part, write_product

import anomaly
from anomaly.training.feature_cache import CachedFeatures

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


def _thresholds(run: Path) -> dict[str, Any]:
    return json.loads((run / "model" / "thresholds.json").read_text())


def _history(run: Path) -> list[dict[str, Any]]:
    text = (run / "model" / "history.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _split(printed: str) -> tuple[str, list[str]]:
    """The command's name and its arguments."""
    anomaly, name, *arguments = shlex.split(printed)
    assert anomaly == "anomaly"
    return name, arguments


def _files(run: Path) -> dict[str, str]:
    files = sorted((run / "model").iterdir())
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_training_on_good_images_alone_ends_with_thresholds_and_how_far_to_trust_them(
    tmp_path: Path, command: Command
) -> None:
    for i in range(12):
        write_part(tmp_path / "parts" / f"{i:03}.png", seed=i)
    arguments = train_arguments(tmp_path / "parts", tmp_path / "run", "data.format=folder")
    code, out, _ = command("train", arguments)
    assert code == 0
    assert "12 training images, each scored by a model that hasn't seen it" in out
    # Clopper–Pearson by hand: no reject among 12 says at most 1 − 0.05^(1/12) = 22 %.
    assert "at most 22 %" in out
    assert "a target of 1 % needs 299 good images" in out
    written = _thresholds(tmp_path / "run")
    assert written["label"] == "calibrated"
    assert written["review"]["value"] <= written["reject"]["value"]
    scores = json.loads((tmp_path / "run" / "model" / "calibration.json").read_text())
    # A hundredth above the highest score: no rounding brings a training image over it.
    assert written["reject"]["value"] == pytest.approx(max(scores["image"]) * 1.01, rel=1e-6)
    assert len(scores["names"]) == 12


def test_without_calibration_there_are_no_verdicts_until_calibrate_finds_some(
    product: Path, good: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    code, out, _ = command("train", [*train_arguments(product, run), "--no-calibrate"])
    assert (code, "no thresholds" in out) == (0, True)
    assert _thresholds(run) is None
    code, _, err = command("calibrate", ["--model", run, "--device", "cpu"])
    assert (code, "--good" in err) == (2, True)
    code, out, _ = command("calibrate", ["--model", run, "--good", good, "--device", "cpu"])
    assert (code, "10 good images" in out) == (0, True)
    infer = ["--model", run, "--input", product / "test", "--output", tmp_path / "out"]
    assert command("infer", infer)[0] == 0
    rows = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    spots = [row["verdict"] for row in rows if "spot" in row["path"]]
    assert spots == ["reject"] * 3
    assert _history(run)[0]["before"] is None


def test_a_change_by_hand_is_on_record_and_changes_nothing_else(
    run: Path,
    product: Path,
    tmp_path: Path,
    command: Command,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = _files(run)
    old = _thresholds(run)["reject"]["value"]
    by_hand = ["--threshold", 2 * old, "--review-threshold", old]
    code, out, _ = command("calibrate", ["--model", run, *by_hand, "--device", "cpu"])
    assert code == 0
    assert "times the highest score of the good images" in caplog.text
    assert f"review threshold {old:.5g}" in out
    after = _files(run)
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}
    assert after["manifest.json"] != before["manifest.json"]
    (line,) = _history(run)
    assert line["asked"] == {"threshold": 2 * old, "review_threshold": old}
    assert line["before"]["reject"]["value"] == old
    assert line["after"]["reject"]["value"] == 2 * old
    assert line["model_before"] == before["manifest.json"][:16]
    assert line["model_after"] == after["manifest.json"][:16]

    infer = ["--model", run, "--input", product / "test", "--output", tmp_path / "out"]
    assert command("infer", infer)[0] == 0
    rows = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        assert row["threshold_label"] == "by hand"
        assert row["model_id"] == line["model_after"]
        score, review, reject = row["image_score"], row["review_threshold"], row["threshold"]
        expected = "good" if score <= review else "review" if score <= reject else "reject"
        assert row["verdict"] == expected

    # The way back: the rates that the model was trained with give its thresholds again.
    assert command("calibrate", ["--model", run, "--device", "cpu"])[0] == 0
    assert "thresholds by hand are replaced by thresholds calibrated" in caplog.text
    assert _files(run) | {"history.jsonl": ""} == before | {"history.jsonl": ""}
    assert len(_history(run)) == 2
    code, out, _ = command("calibrate", ["--model", run, "--device", "cpu"])
    assert (code, "nothing was changed" in out) == (0, True)
    assert len(_history(run)) == 2


def test_a_change_that_loses_known_defects_is_refused_unless_somebody_agrees(
    run: Path, product: Path, defects: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    before, arguments = _files(run), ["--model", run, "--threshold", 9.0, "--device", "cpu"]
    code, out, err = command("calibrate", [*arguments, "--defects", defects])
    assert (code, "add --yes" in err) == (1, True)
    assert "known defects caught: 7 of 7 before, 0 after" in out  # those of the test split, too
    assert re.search(r"known good parts flagged: \d of 3 before, 0 after", out)
    assert "7 known defects now caught would be called good (" in caplog.text
    assert _files(run) == before
    detector = anomaly.load(run, device="cpu")
    with pytest.raises(anomaly.AnomalyError, match=r"3 known defects now caught .* force=True"):
        detector.calibrate(threshold=9.0)
    assert detector.calibrate(threshold=9.0, force=True).thresholds is not None
    # What is missed already refuses nothing.
    assert command("calibrate", [*arguments, "--yes"])[0] == 0
    code, out, _ = command("calibrate", [*arguments[:2], "--threshold", 8.0, "--device", "cpu"])
    assert (code, "Still missed, as before: 3." in out) == (0, True)


def test_each_change_can_be_undone_until_none_is_left(run: Path, command: Command) -> None:
    states = [_thresholds(run)]
    arguments = ["--model", run, "--device", "cpu"]
    for threshold in (0.002, 0.003):
        assert command("calibrate", [*arguments, "--threshold", threshold])[0] == 0
        states.append(_thresholds(run))
    for earlier in (1, 0):
        code, out, err = command("calibrate", [*arguments, "--undo"])
        assert (code, "3 of 3 before, 3 after" in out) == (0, True), err
        assert _thresholds(run) == states[earlier]
    code, _, err = command("calibrate", [*arguments, "--undo"])
    assert (code, "nothing to undo" in err) == (2, True)
    assert [line["asked"] for line in _history(run)][2:] == 2 * [{"undo": True}]
    assert command("calibrate", [*arguments, "--threshold", 0.002])[0] == 0
    assert command("calibrate", [*arguments, "--undo"])[0] == 0
    assert _thresholds(run) == states[0]
    code, _, err = command("calibrate", [*arguments, "--undo", "--threshold", 1])
    assert (code, "leave other options out" in err) == (2, True)


def test_what_was_taken_as_a_defect_never_counts_as_good_later(
    run: Path, production: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does what was given as a defect, whatever form the next calibration has."""
    arguments = ["--model", run, "--yes", "--device", "cpu"]
    unsorted = [*arguments, "--production", production, "--at-most-defective"]
    assert command("calibrate", [*unsorted, "5%"])[0] == 0
    (taken,) = _history(run)[-1]["images"]["taken as defects"].values()
    assert command("calibrate", [*unsorted, "0%"])[0] == 0
    assert "--production left out: 1 taken as defects before" in caplog.text
    good = json.loads((run / "model" / "calibration.json").read_text())
    assert (len(good["names"]), taken in good["hashes"]) == (39, False)
    given = ["--defects", production / good["names"][0]]
    assert command("calibrate", [*arguments, *given])[0] == 0
    for form in ([], ["--review-rate", "0.1"], ["--production", production, *unsorted[-1:], "0%"]):
        assert command("calibrate", [*arguments, *form])[0] == 0
        kept = json.loads((run / "model" / "calibration.json").read_text())
        assert {taken, good["hashes"][0]}.isdisjoint(kept["hashes"])


def test_defects_say_how_many_are_found(
    run: Path, good: Path, defects: Path, command: Command
) -> None:
    common = ["--model", run, "--good", good, "--defects", defects, "--device", "cpu"]
    code, out, _ = command("calibrate", [*common, "--false-reject-rate", "0.2"])
    assert code == 0
    assert "of 4 defects 4 rejected: 100.0 %, 39.8 to 100.0 %" in out
    line = _history(run)[-1]
    assert line["defects_found"]["rejected"]["count"] == 4
    assert len(line["images"]["good"]) == 10
    assert len(line["images"]["defects"]) == 4


def test_one_odd_good_image_is_named_and_can_be_left_out(
    tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(12):
        write_part(tmp_path / "parts" / f"{i:03}.png", seed=i, mark=(30, 60) if i == 7 else None)
    run = tmp_path / "run"
    code, out, _ = command("train", train_arguments(tmp_path / "parts", run, "data.format=folder"))
    assert code == 0
    first, *_ = json.loads((run / "train.json").read_text())["raised_by"]
    assert first["name"] == "007.png"
    assert first["reject_without"] < 0.9 * first["score"]
    assert "1 training image looks unlike all others: 007.png" in out
    without = f"the reject threshold would be {first['reject_without']:.5g} instead of"
    assert without in out
    lines = out[out.index("Remove images that aren't good and train again") :].splitlines()
    (tmp_path / "parts" / "007.png").rename(tmp_path / "007.png")
    assert command(*_split(lines[1]))[0] == 0
    again = tmp_path / "run_new" / "model" / "calibration.json"
    assert len(json.loads(again.read_text())["names"]) == 11
    (tmp_path / "007.png").rename(tmp_path / "parts" / "007.png")

    before = _files(run)
    common = ["--model", run, "--device", "cpu"]
    code, out, _ = command("calibrate", [*common, "--without", "007.png"])
    assert code == 0
    assert "at most 24 %" in out  # 1 − 0.05^(1/11)
    assert "thresholds calibrated on 11 training images" in out
    assert "left out by hand: 1 (007.png)" in out
    assert "the model has still learned" in out
    assert _thresholds(run)["reject"]["value"] == first["reject_without"]
    (line,) = _history(run)
    assert line["asked"] == {"without": ["007.png"]}
    assert line["left_out"] == {"007.png": first["score"]}

    code, _, err = command("calibrate", [*common, "--without", "nowhere.png"])
    assert (code, "no good image is called nowhere.png" in err) == (2, True)
    # Without the option all images count again, and it says so.
    assert command("calibrate", common)[0] == 1
    assert "counted now: 007.png" in caplog.text
    assert "Rejected before: 1 of 12 good images (007.png: " in caplog.text
    assert command("calibrate", [*common, "--yes"])[0] == 0
    assert _files(run) | {"history.jsonl": ""} == before | {"history.jsonl": ""}


def test_copies_of_the_test_split_are_left_out_and_counted(
    run: Path, product: Path, good: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    before, some = _files(run), good.parent / "some"
    some.mkdir()
    for name, kind in (("one", "spot"), ("other", "good")):
        shutil.copy(product / "test" / kind / "001.png", some / f"{name}.png")
    arguments = ["--model", run, "--device", "cpu", "--good"]
    code, _, err = command("calibrate", [*arguments, some])
    assert (code, "none of 2 --good can be used: 2 of the test split" in err) == (2, True)
    assert _files(run) == before
    code, out, _ = command("calibrate", [*arguments, some, good])
    assert (code, "thresholds calibrated on 10 good images" in out) == (0, True)
    assert "--good left out: 2 of the test split or known as defects" in caplog.text


def test_where_the_data_set_is_gone_it_says_that_it_cannot_check(
    run: Path, good: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "train.json").unlink()
    assert command("calibrate", ["--model", run, "--good", good, "--device", "cpu"])[0] == 0
    assert "make sure that these images" in caplog.text


def test_a_data_set_that_has_moved_is_still_kept_from_the_thresholds(
    run: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    (run / "train.json").unlink()
    moved = tmp_path / "moved"
    shutil.copytree(product, moved / product.name)
    # An image that is gone doesn't make the others fair game.
    (moved / product.name / "test" / "spot" / "000.png").unlink()
    (moved / product.name / "test" / "spot" / "000.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "some").mkdir()
    shutil.copy(product / "test" / "spot" / "001.png", tmp_path / "some" / "innocent.png")
    arguments = ["--model", run, "--good", tmp_path / "some", "--device", "cpu", "--data-root"]
    code, _, err = command("calibrate", [*arguments, moved])
    assert (code, "none of 1 --good can be used: 1 of the test split" in err) == (2, True)
    code, _, err = command("calibrate", [*arguments, tmp_path / "absent"])
    assert (code, str(tmp_path / "absent") in err) == (2, True)


def test_images_learned_from_copies_and_broken_files_are_left_out(
    run: Path, product: Path, good: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(product / "train" / "good" / "000.png", good / "learned.png")
    shutil.copy(good / "003.png", good / "copy.png")
    (good / "text.png").write_bytes((good / "001.png").read_bytes()[:500])
    code, out, _ = command("calibrate", ["--model", run, "--good", good, "--device", "cpu"])
    assert code == 3
    assert "10 good images" in out
    assert "1 that the model has learned from, 1 that are copies of others" in caplog.text
    assert "text.png" in caplog.text
    code, _, err = command(
        "calibrate", ["--model", run, "--good", product / "train" / "good", "--device", "cpu"]
    )
    assert (code, "12 that the model has learned from" in err) == (2, True)


def test_what_a_person_has_to_look_at_says_nothing_of_thresholds(
    run: Path, good: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    before = _files(run)
    dark = tmp_path / "dark"
    dark.mkdir()
    cv2.imwrite(str(dark / "lens_cap.png"), np.full((96, 120, 3), 1, np.uint8))
    arguments = ["--model", run, "--device", "cpu", "--good"]
    code, _, err = command("calibrate", [*arguments, dark])
    assert (code, "all 1 good images would be flagged whatever" in err) == (2, True)
    assert _files(run) == before
    code, out, _ = command("calibrate", [*arguments, good, dark])
    assert (code, "thresholds calibrated on 10 good images" in out) == (0, True)
    assert f"left out: {dark / 'lens_cap.png'}: all its pixels" in caplog.text
    caplog.clear()
    detector = anomaly.load(run, device="cpu").calibrate([*sorted(good.iterdir()), *dark.iterdir()])
    assert detector.thresholds is not None
    assert detector.thresholds.images == 10
    assert f"{dark / 'lens_cap.png'}: all its pixels" in caplog.text


def test_what_raises_the_threshold_is_named_among_further_images_too(
    run: Path, good: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two folders with the same file names, and with what was left out before."""
    caplog.set_level("INFO")
    shutil.copytree(good, tmp_path / "lots" / "a")
    for i in range(10):
        write_part(tmp_path / "lots" / "b" / f"{i:03}.png", seed=800 + i, mark=(30, 60 - i))
        if i not in (3, 7):
            write_part(tmp_path / "lots" / "b" / f"{i:03}.png", seed=800 + i)
    arguments = ["--model", run, "--device", "cpu"]
    lots = ["--good", tmp_path / "lots" / "a", tmp_path / "lots" / "b"]
    lots += ["--without", "lots/b/003.png", "--yes"]
    assert command("calibrate", [*arguments, *lots])[0] == 0
    advice = f"anomaly calibrate --model {run} --without b/003.png b/007.png"
    assert advice in caplog.text
    code, out, _ = command("calibrate", [*arguments, "--without", "b/003.png", "b/007.png"])
    assert (code, "thresholds calibrated on 18 good images" in out) == (0, True)


def test_from_a_program_one_image_is_one_and_none_is_told(
    run: Path, good: Path, caplog: pytest.LogCaptureFixture
) -> None:
    detector = anomaly.load(run, device="cpu")
    picture = cv2.cvtColor(cv2.imread(str(good / "000.png")), cv2.COLOR_BGR2RGB)
    one = detector.calibrate(picture, channels="rgb")
    assert one.thresholds is not None
    assert one.thresholds.images == 1
    for nothing in (detector.calibrate, detector.update):
        with pytest.raises(anomaly.AnomalyError, match="no good images were given"):
            nothing([])
    with pytest.raises(anomaly.AnomalyError, match="'3'; it must be a number"):
        detector.calibrate(threshold="3")  # type: ignore[arg-type]
    with pytest.raises(anomaly.AnomalyError, match=r"^precision 'int8': give"):
        anomaly.load(run, device="cpu", precision="int8")


@pytest.mark.parametrize("defective", [1, 8])
def test_defects_among_good_images_raise_no_threshold_unless_somebody_agrees(
    defective: int,
    run: Path,
    tmp_path: Path,
    command: Command,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lot = tmp_path / "lot"
    for i in range(8):
        mark = (40 + i, 50) if i < defective else None
        write_part(lot / f"part {i}.png", seed=900 + i, mark=mark)
    before, old = _files(run), _thresholds(run)["reject"]["value"]
    arguments = ["--model", run, "--good", lot, "--device", "cpu"]
    code, out, err = command("calibrate", arguments)
    assert (code, "--yes" in err) == (1, True)
    assert f"reject threshold {old:.4g} -> " in out
    assert f"the reject threshold rises from {old:.4g} to " in caplog.text
    assert f"Rejected before: {defective} of 8 good images (part " in caplog.text
    assert _files(run) == before
    with pytest.raises(anomaly.AnomalyError, match=rf": {defective} of 8 .* force=True"):
        anomaly.load(run, device="cpu").calibrate(lot)
    forced = anomaly.load(run, device="cpu").calibrate(lot, force=True).thresholds

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for answer, agreed in (("", False), ("no", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert command("calibrate", arguments)[0] == (0 if agreed else 1)
        assert (_files(run) == before) is not agreed
    assert forced is not None
    assert _thresholds(run)["reject"]["value"] == forced.image


def test_what_was_left_out_counts_again_from_a_program_too(
    run: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    name = anomaly.load(run, device="cpu").manifest["training_images"].copy().popitem()[0]
    arguments = ["--model", run, "--device", "cpu", "--without", name]
    assert command("calibrate", arguments)[0] == 0
    again = anomaly.load(run, device="cpu").calibrate(reject_rate=0.02)
    assert again.thresholds is not None
    assert again.thresholds.images == 12
    assert f"left out before, counted now: {name}" in caplog.text


def test_an_image_given_as_good_and_as_a_defect_is_refused(
    run: Path, good: Path, tmp_path: Path, command: Command
) -> None:
    before = _files(run)
    (tmp_path / "bad").mkdir()
    shutil.copy(good / "003.png", tmp_path / "bad" / "scratch.png")
    arguments = ["--model", run, "--good", good, "--defects", tmp_path / "bad", "--device", "cpu"]
    code, _, err = command("calibrate", arguments)
    assert (code, f"{good / '003.png'} is given as good and as a defect" in err) == (2, True)
    (good / "zzz.png").write_bytes(b"no image")  # told only once images are looked at
    code, _, err = command("calibrate", [*arguments[:4], "--defects", good / "005.png"])
    assert (code, f"{good / '005.png'} is given as good and as a defect" in err) == (2, True)
    assert "zzz.png" not in err
    assert _files(run) == before


def test_scrambled_test_labels_leave_every_byte_of_the_model_as_it_was(
    tmp_path: Path, command: Command
) -> None:
    """Good test images are called defects, and the other way round: nobody notices at training."""
    product = write_product(tmp_path / "disc")
    assert command("train", train_arguments(product, tmp_path / "one"))[0] == 0
    test = product / "test"
    test.joinpath("good").rename(test / "swap")
    test.joinpath("spot").rename(test / "good")
    test.joinpath("swap").rename(test / "spot")
    assert command("train", train_arguments(product, tmp_path / "two"))[0] == 0
    assert _files(tmp_path / "one") == _files(tmp_path / "two")
    shutil.rmtree(test)
    assert command("train", train_arguments(product, tmp_path / "three"))[0] == 0
    assert _files(tmp_path / "one") == _files(tmp_path / "three")


def test_an_evaluation_says_which_of_its_images_chose_the_thresholds(
    run: Path, good: Path, defects: Path, tmp_path: Path, command: Command,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for i in range(3):
        write_part(tmp_path / "other" / "good" / f"{i}.png", seed=700 + i)
        shutil.copy(good / f"00{i}.png", tmp_path / "other" / "good" / f"renamed {i}.png")
        write_part(tmp_path / "other" / "spot" / f"{i}.png", seed=710 + i, mark=(30, 50 + i))
    shutil.copy(defects / "001.png", tmp_path / "other" / "spot")

    def evaluated(options: list[object]) -> tuple[int, str, str]:
        """What metrics.json, the log and the report say after a calibration."""
        common = ["--model", run, "--device", "cpu"]
        assert command("calibrate", [*common, *options, "--yes"])[0] == 0
        output = tmp_path / "figures"
        test = ["--good", tmp_path / "other" / "good", "--defects", tmp_path / "other" / "spot"]
        caplog.clear()
        arguments = [*common, *test, "--output", output, "--overwrite"]
        assert command("evaluate", arguments)[0] == 0
        figures = json.loads((output / "disc" / "metrics.json").read_text())["categories"]["disc"]
        pages = [(output / page).read_text() for page in ("disc/report.html", "index.html")]
        said = "thresholds were chosen with"
        assert (said in caplog.text) == (said in pages[0]) == (said in pages[1])
        return figures["n_threshold_images"], caplog.text, pages[0]

    assert evaluated(["--false-reject-rate", 0.02])[:2] == (0, "")
    given = ["--good", good, "--defects", defects]
    count, log, page = evaluated([*given, "--threshold", 1])  # perhaps chosen by these defects
    said = "4 of 10 test images were used to choose the thresholds"
    assert (count, said in log, said in page) == (4, True, True)
    count, log, page = evaluated([*given, "--false-reject-rate", 0.02])  # no defect chooses rates
    said = "3 of 10 test images were used"
    assert (count, said in log, said in page) == (3, True, True)
    count, log, page = evaluated(["--threshold", 1])
    assert (count, "thresholds were set by hand" in page) == (3, False)


def test_evaluating_and_inferring_change_no_threshold(
    run: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    before = _files(run)
    assert command("evaluate", ["--model", run, "--output", tmp_path / "figures"])[0] == 0
    infer = ["--model", run, "--input", product / "test", "--output", tmp_path / "out"]
    assert command("infer", infer)[0] == 0
    assert _files(run) == before


def test_lots_are_kept_whole_and_said(product: Path, tmp_path: Path, command: Command) -> None:
    rows = [f"train/good/{i:03}.png,train,lot {i % 3}" for i in range(12)]
    listing = tmp_path / "data" / "parts.csv"
    shutil.copytree(product, tmp_path / "data")
    listing.write_text("\n".join(["path,split,group", *rows]) + "\n")
    for kind in ("patchcore", "padim"):
        arguments = train_arguments(listing, tmp_path / kind, f"model.kind={kind}")
        code, out, _ = command("train", [*arguments, "--set", "data.format=csv"])
        assert code == 0
        assert "the images come from 3 groups" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--false-reject-rate", "1.5"], "between 0 and 1"),
        (["--false-reject-rate", "0"], "between 0 and 1"),
        (["--false-reject-rate", "nan"], "between 0 and 1"),
        (["--false-reject-rate", "0.1", "--review-rate", "0.05"], "is above the review rate"),
        (["--threshold", "-1"], "0 or more"),
        (["--threshold", "inf"], "0 or more"),
        (["--threshold", "3", "--review-threshold", "4"], "lies above the threshold"),
        (["--review-threshold", "4"], "needs --threshold"),
        (["--threshold", "3", "--review-rate", "0.1"], "set by hand or found by rates"),
        (["--good", "/nowhere/at/all"], "--good /nowhere/at/all doesn't exist"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(
    arguments: list[str], says: str, run_folder: Path, command: Command
) -> None:
    before = _files(run_folder)
    code, _, err = command("calibrate", ["--model", run_folder, *arguments, "--device", "cpu"])
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert _files(run_folder) == before


def test_good_images_from_a_folder_of_defects_are_refused(
    run: Path, defects: Path, command: Command
) -> None:
    renamed = defects.rename(defects.with_name("NG parts"))
    before = _files(run)
    for given in (renamed, renamed / "000.png", renamed.parent):
        code, _, err = command("calibrate", ["--model", run, "--good", given])
        assert (code, "NG parts would be taken as good" in err) == (2, True)
    assert _files(run) == before


def test_good_scores_of_0_allow_a_threshold_by_hand(
    product: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image is like what the others taught: copies, where training doesn't notice that."""
    monkeypatch.setattr(CachedFeatures, "pictures", lambda features: features.hashes)
    source = product / "train" / "good" / "000.png"
    for i in range(4):
        with_note(source, tmp_path / "same" / product.name / f"{i}.png", i)
    run = tmp_path / "run"
    settings = ["data.format=folder", f"data.root={tmp_path / 'same'}", "model.coreset_ratio=1.0"]
    assert command("train", train_arguments(product, run, *settings))[0] == 0
    code, _, err = command("calibrate", ["--model", run, "--threshold", 1])
    assert code == 0, err


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
    run: Path, product: Path, production: Path, tmp_path: Path, command: Command
) -> None:
    common = ["--model", run]
    infer = ["--input", production, "--output"]
    code, out, _ = command("infer", [*common, *infer, tmp_path / "before"])
    assert code == 0
    advice = re.search(r"(\d+) of 40 images are flagged", out)
    assert advice is not None
    assert int(advice[1]) > 20
    name = "calibrate"
    arguments = [*common, "--production", production, "--at-most-defective", "5%"]
    code, out, err = command(name, arguments)
    assert (code, "add --yes" in err) == (1, True)
    assert _history(run) == [] if (run / "model" / "history.jsonl").exists() else True
    code, out, err = command(name, [*arguments, "--yes", "--data-root", product.parent])
    assert code == 0
    assert "calibrated on 40 production images, at most 2 of them defective" in out
    assert re.search(r"treated as defects, half of the 2 .*: 0(07|31).png", out)
    assert {"007.png", "031.png"} <= set(re.findall(r"\d{3}\.png", out))
    assert f"production images flagged: {advice[1]} of 40 before, " in out
    assert "known defects caught: 3 of 3 before, 3 after" in out
    record = _history(run)[-1]
    assert record["asked"] == {"at_most_defective": 0.05, "data_root": str(product.parent)}
    assert len(record["images"]["production"]) == 40
    assert command("infer", [*common, *infer, tmp_path / "after"])[0] == 0
    rows = [json.loads(x) for x in (tmp_path / "after" / "results.jsonl").read_text().splitlines()]
    flagged = {Path(row["path"]).name for row in rows if row["verdict"] != "good"}
    assert {"007.png", "031.png"} <= flagged
    assert len(flagged) <= 8


def test_production_images_that_are_all_good_are_good_images(
    run: Path, good: Path, tmp_path: Path, command: Command
) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    options = ["--production", good, "--at-most-defective", "0%", "--yes"]
    assert command("calibrate", ["--model", run, *options])[0] == 0
    assert command("calibrate", ["--model", other, "--good", good, "--yes"])[0] == 0
    assert _thresholds(run) == _thresholds(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--production", "GOOD"], "give the largest share of them that may be defective"),
        (["--at-most-defective", "5%"], "need each other"),
        (["--production", "GOOD", "--at-most-defective", "5"], "it must be from 0 % to 20 %"),
        (
            ["--production", "GOOD", "--at-most-defective", "5%", "--good", "GOOD"],
            "give one of these",
        ),
        (["--production", "GOOD", "--at-most-defective", "5%", "--threshold", "9"], "known to be"),
    ],
)
def test_what_does_not_go_with_production_images_is_refused(
    run: Path, good: Path, command: Command, options: list[str], message: str
) -> None:
    before = _files(run)
    given = [str(good) if option == "GOOD" else option for option in options]
    code, _, err = command("calibrate", ["--model", run, *given])
    assert (code, message in err) == (2, True), err
    assert _files(run) == before
