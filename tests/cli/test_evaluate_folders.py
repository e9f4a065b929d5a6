"""Evaluation of any model on folders of good and of defective images."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import FAST, REPOSITORY, Command, write_part
from kit import table

from anomaly.datasets import open_test_images
from anomaly.errors import DataError


def _arguments(output: Path, folder: Path) -> list[object]:
    settings = [*FAST, "name=disc", "data.format=folder", f"data.root={folder}"]
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["--config", REPOSITORY / "configs" / "folder.yaml", *sets, "--output", output]


def test_a_model_of_a_plain_folder(
    product: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    run, good = tmp_path / "run", tmp_path / "more"
    assert command("train", _arguments(run, product / "train" / "good"))[0] == 0
    code, _, err = command("evaluate", ["--model", run, "--output", tmp_path / "none"])
    assert code == 2
    assert "no test images where data.format=folder keeps them" in err
    assert "Give --good FOLDER" in err
    assert "test/good" not in err

    shutil.copytree(product / "test" / "good", good)
    shutil.copy(product / "train" / "good" / "000.png", good / "known.png")
    defects, masks = tmp_path / "defects", tmp_path / "masks"
    shutil.copytree(product / "test" / "spot", defects / "spot")
    write_part(defects / "loose.png", seed=9, mark=(40, 40))
    shutil.copytree(product / "ground_truth" / "spot", masks / "spot")
    images = ["--good", good, "--defects", defects, "--masks", masks]
    assert command("evaluate", ["--model", run, "--output", tmp_path / "figures", *images])[0] == 0
    bare = f"1 of 4 defects have no mask ({defects / 'loose.png'})"
    assert caplog.text.count(bare) == 1
    rows = table(tmp_path / "figures", "scores.csv")
    kinds = {row["path"]: row["defect_type"] for row in rows}
    assert kinds == {
        **{f"more/{i:03}.png": "good" for i in range(3)},  # what was learned from is left out
        **{f"defects/spot/{i:03}.png": "spot" for i in range(3)},
        "defects/loose.png": "defects",
    }
    figures = json.loads((tmp_path / "figures" / "metrics.json").read_text())["categories"]["disc"]
    assert figures["image_auroc"] == 1
    assert figures["pixel_auroc"] is not None


def test_images_that_were_learned_from_test_nothing(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    model = ["--model", run_folder, "--output", tmp_path / "out"]
    code, _, err = command("evaluate", [*model, "--good", product / "train" / "good"])
    assert (code, "has learned from all of these images" in err) == (2, True), err


def test_names_and_types_of_images_to_test_with(tmp_path: Path) -> None:
    names = ("a/good/1", "b/good/1", "b/NG/1", "b/NG/dent/x/2", "m/dent/x/2", "n/o/1")
    for name in (f"{name}.png" for name in names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    good = [tmp_path / "a" / "good", tmp_path / "b" / "good"]
    samples = open_test_images(good, [tmp_path / "b" / "NG"], tmp_path / "m")
    seen = [(s.name, s.defect_type, s.mask_path) for s in samples]
    assert seen == [
        ("a/good/1.png", "good", None),
        ("b/good/1.png", "good", None),
        ("b/NG/1.png", "NG", None),
        ("b/NG/dent/x/2.png", "dent", tmp_path / "m" / "dent" / "x" / "2.png"),
    ]
    # Several folders' masks, as MVTec AD keeps them.
    for name in ("t/cut/1.png", "t/hole/1.png", "gt/cut/1_mask.png", "gt/hole/1_mask.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    both = [tmp_path / "t" / "cut", tmp_path / "t" / "hole"]
    assert [s.mask_path for s in open_test_images([], both, tmp_path / "gt")] == [
        tmp_path / "gt" / "cut" / "1_mask.png",
        tmp_path / "gt" / "hole" / "1_mask.png",
    ]
    with pytest.raises(DataError, match="says that they are good"):
        open_test_images([], [tmp_path / "a"])
    with pytest.raises(DataError, match="as good and as a defect"):
        open_test_images([tmp_path / "n" / "o"], [tmp_path / "n"])
    with pytest.raises(DataError, match="as good and as a defect"):
        open_test_images([tmp_path / "n"], [tmp_path / "n"])
