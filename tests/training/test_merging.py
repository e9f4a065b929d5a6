"""Models of two halves that become one; models of two settings that don't."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, train_arguments
from families import quick_and_slow
from PIL import Image
from sklearn.metrics import roc_auc_score

import anomaly
from anomaly.calibration import thresholds_from
from anomaly.detector import AnomalyDetector
from anomaly.sample_data import write_sample_data
from anomaly.storage.load import load_model
from anomaly.storage.thresholds import change, replace_thresholds
from anomaly.training.merge import merge


def _config(kind: str, **more: object) -> dict[str, object]:
    return {
        "backbone": {"name": "timm/tf_efficientnet_lite2"},
        "image": {"area": 192},
        "model": {"kind": kind, "dimensions": 30},
        **more,
    }


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plates")
    few = {"n_train": 24, "n_good": 36, "n_defect": 45, "size": 192}
    write_sample_data(root, products=["brushed_plate"], **few)  # type: ignore[arg-type]
    return root / "brushed_plate"


@pytest.mark.parametrize("kind", quick_and_slow(["patchcore", "padim", "subspace"], "patchcore"))
def test_models_of_two_halves_score_like_one_of_all(
    kind: str, plates: Path, tmp_path: Path, command: Command
) -> None:
    files = sorted((plates / "train" / "good").glob("*.png"))
    for name, some in {"all": files, "a": files[::2], "b": files[1::2]}.items():
        detector = anomaly.fit(some, _config(kind, name=name), device="cpu")
        detector.save(tmp_path / name / "model")
    both = [tmp_path / "a", tmp_path / "b"]
    code, out, err = command("merge", [*both, "--output", tmp_path / "one", "--device", "cpu"])
    assert code == 0, err
    assert "of 24 images (12 + 12)" in out
    assert "thresholds calibrated on 24 good images" in out
    merged, whole = load_model(tmp_path / "one", "cpu"), load_model(tmp_path / "all", "cpu")
    parents = [load_model(folder, "cpu").model_id for folder in both]
    assert merged.manifest["parents"] == parents
    assert sorted(merged.manifest["training_images"].values()) == sorted(
        whole.manifest["training_images"].values()
    )
    line = json.loads((tmp_path / "one" / "model" / "history.jsonl").read_text())
    assert (line["model_before"].split(), line["model_after"]) == (parents, merged.model_id)
    tested = sorted((plates / "test").rglob("*.png"))
    defective = [file.parent.name != "good" for file in tested]
    found = [
        roc_auc_score(defective, [p.score for p in detector.predict(tested)])
        for detector in (merged, whole)
    ]
    assert found[0] > found[1] - 0.013  # one of 81 pairs of images
    if kind == "padim":
        first = tested[0]
        scores = [detector.predict(first).score for detector in (merged, whole)]
        assert scores[0] == pytest.approx(scores[1], rel=2e-3)


def test_models_of_other_settings_are_refused_by_key(
    run_folder: Path, padim_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    other = tmp_path / "other"
    assert command("train", train_arguments(product, other, "image.area=96"))[0] == 0
    for model, key in ((other, "image.area (64 and 96)"), (padim_folder, "model.kind")):
        to = tmp_path / "one"
        code, _, err = command("merge", [run_folder, model, "--output", to, "--device", "cpu"])
        assert (code, key in err, to.exists()) == (2, True, False), err
    code, _, err = command("merge", [run_folder, "--output", tmp_path / "one"])
    assert (code, "merging takes two models" in err) == (2, True)


def test_a_model_to_merge_isnt_replaced(run_folder: Path, tmp_path: Path, command: Command) -> None:
    one, two = (shutil.copytree(run_folder, tmp_path / name) for name in ("one", "two"))
    before = load_model(one, "cpu").model_id
    for output in (one, one / "model"):
        arguments = [one, two, "--output", output, "--overwrite", "--device", "cpu"]
        code, _, err = command("merge", arguments)
        assert (code, "is one of the models to merge and isn't replaced" in err) == (2, True)
    assert load_model(one, "cpu").model_id == before
    # A model beside these runs would hide them.
    code, _, err = command("merge", [one, two, "--output", tmp_path, "--device", "cpu"])
    assert (code, "holds the runs one, two" in err) == (2, True)
    assert not (tmp_path / "model").exists()


def test_images_that_both_were_calibrated_with_count_once(run_folder: Path, product: Path) -> None:
    first = load_model(run_folder, "cpu")
    assert first.thresholds is not None
    files = sorted((product / "train" / "good").glob("*.png"))
    pictures = [np.asarray(Image.open(file).convert("RGB"))[::-1] for file in files[:6]]
    others = AnomalyDetector(first).calibrate(pictures, force=True).model
    assert others.thresholds is not None
    count = len(others.thresholds.good.names)
    both = merge([others, others], ["a", "b"])
    assert both.thresholds is not None
    assert sorted(both.thresholds.good.image) == sorted(others.thresholds.good.image)
    assert len(both.thresholds.good.names) == count
    some = merge([first, others], ["a", "b"])
    assert some.thresholds is not None
    assert len(some.thresholds.good.names) == len(first.thresholds.good.names) + count


def test_what_is_left_out_of_one_is_left_out_of_both(run_folder: Path, tmp_path: Path) -> None:
    first = load_model(run_folder, "cpu")
    assert first.thresholds is not None
    name = first.thresholds.good.names[3]
    run = shutil.copytree(run_folder, tmp_path / "other")
    thresholds = thresholds_from(first.thresholds.good.without([name]), 0.05, 0.01)
    replace_thresholds(run, thresholds, change({}, first.thresholds, thresholds, {}))
    other = load_model(run, "cpu")
    assert other.thresholds is not None
    assert len(other.thresholds.good.left_out) == 1
    for pair in ((first, other), (other, first)):
        both = merge(pair, ["a", "b"]).thresholds
        assert both is not None
        assert both.images == 11
        assert [out.name for out in both.good.left_out] == [name]
        assert both.good.without([]).names.count(name) == 1
        assert len(both.good.without([]).names) == 12


def test_thresholds_that_a_merge_does_not_keep_are_told(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = load_model(run_folder, "cpu")
    detector = AnomalyDetector(first)
    by_hand = detector.calibrate(threshold=9.0).model
    other = detector.calibrate(reject_rate=0.1).model
    merge([first, by_hand, other], ["a", "b", "c"])
    assert "b: its thresholds were found by hand; those of the merged model are" in caplog.text
    says = "c: its thresholds flag 10 % of good parts and reject 10 %"
    assert says in caplog.text
    assert "a: its" not in caplog.text


def test_nothing_is_left_of_the_run_that_a_merged_model_replaces(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    before = shutil.copytree(run_folder, tmp_path / "one")
    shutil.copytree(before / "suspects", before / "golden")
    (before / "golden" / "golden.json").write_text("{}")
    moved = shutil.copytree(run_folder, tmp_path / "moved")
    said = json.loads((moved / "train.json").read_text())
    assert "bank_vectors" in said
    (moved / "train.json").write_text(json.dumps(said | {"data_folder": "elsewhere"}))
    arguments = [run_folder, run_folder, "--output", before, "--device", "cpu"]
    code, _, err = command("merge", arguments)
    assert (code, "golden exist already" in err) == (2, True)
    assert command("merge", [*arguments, "--overwrite"])[0] == 0
    assert sorted(file.name for file in before.iterdir()) == ["model", "train.json"]
    record = json.loads((before / "train.json").read_text())
    model = load_model(before, "cpu")
    assert record == {
        "name": model.config.name,
        "data_folder": said["data_folder"],
        "model_id": model.model_id,
        "images": {"learned": 12},
    }
    # Of two data sets nothing says which one to evaluate on.
    to = tmp_path / "both"
    assert command("merge", [run_folder, moved, "--output", to, "--device", "cpu"])[0] == 0
    assert "data_folder" not in json.loads((to / "train.json").read_text())
    code, _, err = command("evaluate", ["--model", to, "--output", tmp_path / "figures"])
    assert (code, "give --data-root" in err) == (2, True)


def test_images_that_both_have_learned_count_once(run_folder: Path, padim_folder: Path) -> None:
    bank = load_model(run_folder, "cpu")
    merged = merge([bank, bank], ["a", "a"])
    assert merged.thresholds is not None
    assert bank.thresholds is not None
    assert merged.thresholds.good.image == bank.thresholds.good.image
    assert len(merged.manifest["training_images"]) == 12
    assert merged.training_statistics is not None
    assert merged.training_statistics.images == 12
    assert merged.scorer.tensors()["vectors"].shape == bank.scorer.tensors()["vectors"].shape
    gaussian = load_model(padim_folder, "cpu")
    with pytest.raises(anomaly.AnomalyError, match="12 training images are in more"):
        merge([gaussian, gaussian], ["a", "a"])
