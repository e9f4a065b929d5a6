"""Model folders: same training, same bytes; saved and loaded, same scores; nothing else needed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Command, train_arguments, write_product
from families import quick_and_slow

from anomaly.config.load import load_config
from anomaly.datasets import open_dataset
from anomaly.scoring.prediction import Prediction
from anomaly.storage.load import load_model
from anomaly.storage.save import save
from anomaly.training.fit import train


def _bytes(model: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(model.iterdir())}


@pytest.mark.parametrize("kind", quick_and_slow(["patchcore", "padim"], "patchcore"))
def test_one_seed_gives_the_same_bytes_from_anywhere(
    kind: str, product: Path, tmp_path: Path, command: Command
) -> None:
    elsewhere = tmp_path / "elsewhere" / product.name
    shutil.copytree(product, elsewhere)
    for source, output in ((product, "one"), (elsewhere, "two")):
        arguments = train_arguments(source, tmp_path / output, f"model.kind={kind}")
        assert command("train", arguments)[0] == 0
    one, two = _bytes(tmp_path / "one" / "model"), _bytes(tmp_path / "two" / "model")
    assert one == two
    assert set(one) == {
        "backbone.safetensors",
        "scorer.safetensors",
        "config.yaml",
        "thresholds.json",
        "calibration.json",
        "manifest.json",
        "usual.safetensors",
    }
    other = train_arguments(product, tmp_path / "three", f"model.kind={kind}", "seed=1")
    assert command("train", other)[0] == 0
    assert _bytes(tmp_path / "three" / "model")["scorer.safetensors"] != one["scorer.safetensors"]


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
@pytest.mark.parametrize("score", ["max", "reweighted", "top_percent", "map_max"])
def test_saved_and_loaded_models_score_to_the_bit(
    kind: str, score: str, product: Path, tmp_path: Path
) -> None:

    overrides = [o for o in train_arguments(product, tmp_path) if isinstance(o, str) and "=" in o]
    config = load_config(
        "folder.yaml",
        [*overrides, f"model.kind={kind}", f"model.image_score={score}"],
        [REPOSITORY / "configs"],
    )
    dataset = open_dataset("mvtec", product, None)
    cpu = torch.device("cpu")
    training = train(config, dataset.train, device=cpu, scratch=tmp_path, progress=lambda *_: None)
    save(training.detector, tmp_path / "model")
    loaded = load_model(tmp_path / "model", cpu)
    paths = [s.path for s in dataset.test]
    for before, after in zip(training.detector.predict(paths), loaded.predict(paths), strict=True):
        assert isinstance(before, Prediction)
        assert isinstance(after, Prediction)
        assert before.score == after.score
        np.testing.assert_array_equal(before.patch_scores, after.patch_scores)
        np.testing.assert_array_equal(before.anomaly_map, after.anomaly_map)
    assert loaded.thresholds == training.detector.thresholds


def test_a_model_needs_nothing_from_elsewhere(tmp_path: Path, command: Command) -> None:
    """Weights file, config and data set are gone; the folder has moved."""
    from safetensors.torch import save_file

    from anomaly.backbones.registry import read_weights

    product = write_product(tmp_path / "disc")
    save_file(read_weights("tiny", "random", 0)[0], tmp_path / "own.safetensors")
    weights = f"backbone.weights={tmp_path / 'own.safetensors'}"
    assert command("train", train_arguments(product, tmp_path / "run", weights))[0] == 0
    image = tmp_path / "image.png"
    shutil.move(product / "test" / "spot" / "000.png", image)
    shutil.rmtree(product)
    (tmp_path / "own.safetensors").unlink()
    shutil.move(tmp_path / "run" / "model", tmp_path / "moved")
    code, _, _ = command(
        "infer", ["--model", tmp_path / "moved", "--input", image, "--output", tmp_path / "o"]
    )
    assert code == 0
    text = "".join((tmp_path / "moved" / f).read_text() for f in ("config.yaml", "manifest.json"))
    assert str(tmp_path) not in text


def test_the_manifest_says_what_the_model_was_made_of(run_folder: Path, product: Path) -> None:
    manifest = json.loads((run_folder / "model" / "manifest.json").read_text())
    images = manifest["training_images"]
    for name, sha256 in images.items():
        assert hashlib.sha256((product / name).read_bytes()).hexdigest() == sha256
    assert len(images) == 12
    assert manifest["made_with"]["packages"]["torch"]
    assert manifest["backbone"]["strides"] == [8, 16]
    for name, record in manifest["files"].items():
        assert (
            hashlib.sha256((run_folder / "model" / name).read_bytes()).hexdigest()
            == record["sha256"]
        )


def test_bank_vectors_know_where_they_came_from(run_folder: Path, product: Path) -> None:
    from anomaly.imaging.loading import NetworkInput
    from anomaly.imaging.loading import load as load_image

    model = load_model(run_folder, torch.device("cpu"))
    names = list(model.manifest["training_images"])
    scorer = model.scorer
    origins, vectors = scorer.tensors()["origins"], scorer.tensors()["vectors"]
    dataset = open_dataset("mvtec", product, None)
    learned = [s for s in dataset.train if s.name in names]
    for i in (0, len(origins) // 2, len(origins) - 1):
        image, row, column = origins[i].tolist()
        item = load_image(0, learned[image].path, model.loading)
        assert isinstance(item, NetworkInput)
        patch = model.embedder([item])[0, row, column]
        torch.testing.assert_close(patch, vectors[i], rtol=1e-4, atol=1e-5)


def test_inverted_lists_are_made_at_first_use(
    product: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = train_arguments(product, tmp_path / "run", "model.search=ivf")
    assert command("train", arguments)[0] == 0
    detector = load_model(tmp_path / "run", torch.device("cpu"))
    exact = replace(detector, scorer=replace(detector.scorer, search="exact"))
    files = sorted((product / "test").rglob("*.png"))
    for one, other in zip(detector.predict(files), exact.predict(files), strict=True):
        np.testing.assert_array_less(other.patch_scores, one.patch_scores + 1e-6)
    assert [f.suffix for f in (tmp_path / "cache" / "anomaly").iterdir()] == [".index"]


def test_everything_in_a_run_can_be_read_by_others(run_folder: Path) -> None:
    modes = {f.name: f.stat().st_mode & 0o777 for f in run_folder.rglob("*") if f.is_file()}
    mask = os.umask(0)
    os.umask(mask)
    assert set(modes.values()) == {0o666 & ~mask}, modes
    assert (run_folder / "model").stat().st_mode & 0o777 == 0o777 & ~mask


def test_train_json_gives_values_of_scalars_and_shapes_of_the_rest(run_folder: Path) -> None:
    scorer = json.loads((run_folder / "train.json").read_text())["scorer"]
    tensors = load_model(str(run_folder), "cpu").scorer.tensors()
    assert scorer["covering_radius"] == float(tensors["covering_radius"])
    assert scorer["exact"] is True
    assert scorer["vectors"] == list(tensors["vectors"].shape)


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_files_may_be_written_over_while_the_model_is_in_use(
    kind: str, product: Path, tmp_path: Path, command: Command
) -> None:
    assert (
        command("train", train_arguments(product, tmp_path / "run", f"model.kind={kind}"))[0] == 0
    )
    image = next((product / "train" / "good").iterdir())
    code = f"""if True:
        import os
        from pathlib import Path
        from anomaly.storage.load import load_model
        detector = load_model("{tmp_path}/run")
        for file in Path("{tmp_path}/run/model").iterdir():
            os.truncate(file, 0)
        (one,) = detector.predict(["{image}"])
        assert one.score > 0
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=120, check=False)
    assert done.returncode == 0  # a signal's number where a file was mapped
