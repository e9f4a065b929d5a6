"""`evaluate`: many models, what isn't trained yet, what fails, and folders of images."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Command, Says, run_command, train_arguments, write_part
from kit import table, touch

import anomaly
from anomaly.datasets.inputs import open_test_images
from anomaly.errors import DataError
from anomaly.report.report import training_of

EVALUATION = {"metrics.json", "scores.csv"}
CATEGORY = {"report.html", "metrics.json", "scores.csv"}


def _names(folder: Path) -> set[str]:
    return {f.name for f in folder.iterdir()}


def test_each_model_of_a_folder_is_evaluated_and_one_failing_does_not_lose_the_others(
    run_folder: Path, padim_folder: Path, tmp_path: Path, says: Says
) -> None:
    alone = shutil.copytree(padim_folder / "model", tmp_path / "alone")
    runs, output = tmp_path / "runs", tmp_path / "out"
    shutil.copytree(run_folder, runs / "disc")
    shutil.copytree(padim_folder, runs / "gaussian")
    touch(runs, "notes/data/train.json")  # no model
    said = says(3, "evaluate", ["--model", alone, runs, "--output", output])
    assert "give --good and --defects" in said
    metrics = json.loads((output / "metrics.json").read_text())
    assert list(metrics["categories"]) == ["disc", f"disc ({runs / 'gaussian'})"]
    assert _names(output) >= EVALUATION
    folders = [f for f in output.iterdir() if f.is_dir()]
    assert len(folders) == 2
    assert all(_names(folder) == CATEGORY for folder in folders)
    assert f"disc: {output / 'disc' / 'report.html'}" in said
    figures = metrics["categories"]["disc"]
    # Three of each without an overlap say little: 0.025 ** (1 / 3) = 0.29 for any scores.
    low, high = figures["intervals"]["image_auroc"]
    assert (0.1 < low < 0.3, high) == (True, 1.0)
    verdicts = figures["verdicts"]
    low, high = verdicts["escape_rate"]["interval"]
    assert 0 <= low <= verdicts["escapes"] / 3 <= high <= 1
    assert f"of 3 good ones {verdicts['good']['reject']} rejected" in said
    assert "of 3 defective ones 3 rejected, 0 to review, 0 called good" in said
    assert verdicts["false_rejects"] == verdicts["good"]["reject"]
    single = json.loads((output / "disc" / "metrics.json").read_text())
    assert single["categories"]["disc"] == figures


def test_the_record_of_another_models_training_is_not_shown(
    run_folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    detector = anomaly.load(run, device="cpu")
    assert training_of(run, detector.model_id)["bank_vectors"] > 0
    assert training_of(run, "0" * 16) == {}
    detector.calibrate(threshold=7, force=True).save(run / "model", overwrite=True)
    assert training_of(run, anomaly.load(run, device="cpu").model_id)["bank_vectors"] > 0


def test_a_model_of_a_plain_folder(
    product: Path, tmp_path: Path, says: Says, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    run, good = tmp_path / "run", tmp_path / "more"
    learned = product / "train" / "good"
    run_command("train", train_arguments(learned, run, "data.format=folder"))
    evaluate = ["--model", run, "--output", tmp_path / "figures"]
    said = says(2, "evaluate", [*evaluate, "--good", learned])
    assert "has learned from all of these images" in said
    said = says(2, "evaluate", evaluate)
    assert "no test images where data.format=folder keeps them" in said
    assert "Give --good FOLDER" in said
    assert "test/good" not in said

    shutil.copytree(product / "test" / "good", good)
    shutil.copy(learned / "000.png", good / "known.png")
    defects = tmp_path / "defects"
    shutil.copytree(product / "test" / "spot", defects / "spot")
    write_part(defects / "loose.png", seed=9, mark=(40, 40))
    images = ["--good", good, "--defects", defects]
    assert command("evaluate", [*evaluate, *images])[0] == 0
    rows = table(tmp_path / "figures", "scores.csv")
    kinds = {row["path"]: row["defect_type"] for row in rows}
    assert kinds == {
        **{f"more/{i:03}.png": "good" for i in range(3)},  # what was learned from is left out
        **{f"defects/spot/{i:03}.png": "spot" for i in range(3)},
        "defects/loose.png": "defects",
    }
    figures = json.loads((tmp_path / "figures" / "metrics.json").read_text())["categories"]["disc"]
    assert figures["image_auroc"] == 1
    assert figures["pixel_auroc"] is None


def test_names_and_types_of_images_to_test_with(tmp_path: Path) -> None:
    names = ("a/good/1", "b/good/1", "b/NG/1", "b/NG/dent/x/2", "n/o/1")
    touch(tmp_path, *(f"{name}.png" for name in names))
    good = [tmp_path / "a" / "good", tmp_path / "b" / "good"]
    samples = open_test_images(good, [tmp_path / "b" / "NG"])
    seen = [(s.name, s.defect_type) for s in samples]
    assert seen == [
        ("a/good/1.png", "good"),
        ("b/good/1.png", "good"),
        ("b/NG/1.png", "NG"),
        ("b/NG/dent/x/2.png", "dent"),
    ]
    with pytest.raises(DataError, match="a/good would be taken as defective"):
        open_test_images([], [tmp_path / "a"])
    with pytest.raises(DataError, match="as good and as a defect"):
        open_test_images([tmp_path / "n" / "o"], [tmp_path / "n"])
    with pytest.raises(DataError, match="as good and as a defect"):
        open_test_images([tmp_path / "n"], [tmp_path / "n"])
