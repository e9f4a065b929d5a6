"""Model folders: same training, same bytes; saved and loaded, same scores; nothing else needed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, RUNS, Command, train, train_arguments, write_product
from kit import tiny
from safetensors.torch import save_file

import anomaly
from anomaly.backbones.networks import read_weights
from anomaly.datasets.layouts import open_dataset
from anomaly.scoring.model import Prediction


def _bytes(model: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(model.iterdir())}


@pytest.mark.parametrize("kind", RUNS)
def test_one_seed_gives_the_same_bytes_from_anywhere(
    kind: str, request: pytest.FixtureRequest, product: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere" / product.name
    shutil.copytree(product, elsewhere)
    train(elsewhere, f"model.kind={kind}", tmp_path / "two")
    one = _bytes(request.getfixturevalue(RUNS[kind]) / "model")
    assert one == _bytes(tmp_path / "two" / "model")
    tensors, values = ("backbone", "scorer", "usual"), ("thresholds", "calibration", "manifest")
    names = [*(f"{name}.safetensors" for name in tensors), *(f"{name}.json" for name in values)]
    assert set(one) == {"config.yaml", *names}


def test_another_seed_gives_another_bank(run_folder: Path, product: Path, tmp_path: Path) -> None:
    train(product, "seed=1", tmp_path / "other")
    one, other = (_bytes(folder / "model") for folder in (run_folder, tmp_path / "other"))
    assert one["scorer.safetensors"] != other["scorer.safetensors"]


@pytest.mark.parametrize(("kind", "score"), [("patchcore", "reweighted"), ("padim", "map_max")])
def test_saved_and_loaded_models_score_to_the_bit(
    kind: str, score: str, product: Path, tmp_path: Path
) -> None:
    settings = tiny(model={"kind": kind, "image_score": score, "dimensions": 20})
    dataset = open_dataset("mvtec", product)
    trained = anomaly.fit(dataset, settings, device="cpu")
    trained.save(tmp_path / "model")
    loaded = anomaly.load(tmp_path / "model", device="cpu")
    paths = [s.path for s in dataset.test]
    for before, after in zip(trained.predict(paths), loaded.predict(paths), strict=True):
        assert isinstance(before, Prediction)
        assert isinstance(after, Prediction)
        assert before.score == after.score
        np.testing.assert_array_equal(before.patch_scores, after.patch_scores)
        np.testing.assert_array_equal(before.anomaly_map, after.anomaly_map)
    assert loaded.thresholds == trained.thresholds


def test_a_model_needs_nothing_from_elsewhere(tmp_path: Path, command: Command) -> None:
    """Weights file, config and data set are gone; the folder has moved."""
    product = write_product(tmp_path / "disc", n_train=4)
    save_file(read_weights("tiny", "random", 0)[0], tmp_path / "own.safetensors")
    weights = f"backbone.weights={tmp_path / 'own.safetensors'}"
    assert command("train", train_arguments(product, tmp_path / "run", weights))[0] == 0
    image = tmp_path / "image.png"
    shutil.move(product / "test" / "spot" / "000.png", image)
    shutil.rmtree(product)
    (tmp_path / "own.safetensors").unlink()
    shutil.move(tmp_path / "run" / "model", tmp_path / "moved")
    assert anomaly.load(tmp_path / "moved", device="cpu").predict(image).score > 0
    text = "".join((tmp_path / "moved" / f).read_text() for f in ("config.yaml", "manifest.json"))
    assert str(tmp_path) not in text


def test_the_manifest_says_what_the_model_was_made_of(run_folder: Path, product: Path) -> None:
    manifest = json.loads((run_folder / "model" / "manifest.json").read_text())
    images = manifest["training_images"]
    for name, sha256 in images.items():
        assert hashlib.sha256((product / name).read_bytes()).hexdigest() == sha256
    assert len(images) == 12
    assert manifest["made_with"]["packages"]["torch"]
    assert [layout["stride"] for layout in manifest["backbone"]["layouts"]] == [8, 16]
    files = _bytes(run_folder / "model")
    del files["manifest.json"]
    assert {name: record["sha256"] for name, record in manifest["files"].items()} == files


def test_everything_in_a_run_can_be_read_by_others(run_folder: Path) -> None:
    modes = {f.name: f.stat().st_mode & 0o777 for f in run_folder.rglob("*") if f.is_file()}
    mask = os.umask(0)
    os.umask(mask)
    assert set(modes.values()) == {0o666 & ~mask}, modes
    assert (run_folder / "model").stat().st_mode & 0o777 == 0o777 & ~mask


def test_files_may_be_written_over_while_the_model_is_in_use(
    run_folder: Path, padim_folder: Path, product: Path, tmp_path: Path
) -> None:
    for number, run in enumerate((run_folder, padim_folder)):
        shutil.copytree(run / "model", tmp_path / str(number))
    code = f"""if True:
        import os
        from pathlib import Path
        from anomaly.storage.models import load_model
        for model in "01":
            detector = load_model(f"{tmp_path}/{{model}}")
            for file in Path(f"{tmp_path}/{{model}}").iterdir():
                os.truncate(file, 0)
            (one,) = detector.predict(["{product}/train/good/000.png"])
            assert one.score > 0
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=300, check=False)
    assert done.returncode == 0  # a signal's number where a file was mapped
