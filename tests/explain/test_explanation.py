"""What an explanation says, against brute force and finite differences."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Command, train_arguments, write_part
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pixel_map import pixel_map
from scipy import ndimage

from anomaly.config.schema import METHODS, Method
from anomaly.datasets.samples import listed
from anomaly.evaluation.splits import TrainingImages, training_names
from anomaly.explain.evidence import (
    GoodImages,
    patch_box,
    score_gradient,
    tile_of,
    worst_patches,
)
from anomaly.explain.score import good_images
from anomaly.files.writing import sha256_of
from anomaly.hooks import live_hooks
from anomaly.imaging.loading import NetworkInput, load
from anomaly.maps.regions import MarkedRegion, marked_regions
from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.scoring.pipeline import Model
from anomaly.storage.load import load_model


def opened(folder: Path) -> Model:
    return load_model(folder, torch.device("cpu"))


def loaded(detector: Model, path: Path) -> NetworkInput:
    item = load(0, path, detector.loading)
    assert isinstance(item, NetworkInput)
    return item


def _good(model: Model, *folders: Path) -> GoodImages:
    files = [sample for folder in folders for sample in listed(folder, folder)]
    return GoodImages(model, TrainingImages(model.manifest["training_images"], files))


def _highest(scores: np.ndarray) -> tuple[int, int]:
    row, column = np.unravel_index(scores.argmax(), scores.shape)
    return int(row), int(column)


CENTRES = 10 * np.arange(7) + 5.0, 10 * np.arange(9) + 5.0


@given(arrays(np.float32, (7, 9), elements=st.floats(0, 9, width=16)), st.floats(0, 10))
def test_worst_patches_are_those_of_what_is_marked(scores: np.ndarray, limit: float) -> None:
    """Patches of ten pixels, and a map of which each pixel is its patch."""
    pixels = scores.repeat(10, 0).repeat(10, 1)
    flaws = marked_regions((pixels > limit).astype(np.uint8), pixel_map(pixels))
    found = worst_patches(scores, flaws, CENTRES)
    labels = ndimage.label(scores > limit, np.ones((3, 3)))[0]
    peaks = sorted((scores[labels == i].max() for i in range(1, labels.max() + 1)), reverse=True)
    assert scores[found[0]] == (peaks or [scores.max()])[0]
    assert len(found) == len(set(found)) <= max(1, min(4, len(peaks)))
    assert all(scores[patch] > limit for patch in found) or not peaks


def _flaw(**place: int) -> MarkedRegion:
    patch = {"width_uncertainty": 10, "height_uncertainty": 10}
    return MarkedRegion(**place, **patch, area=4, peak_score=3, length=2, thickness=2)


def test_a_flaw_between_two_patches_has_the_nearer_one() -> None:
    scores = np.zeros((7, 9), np.float32)
    scores[0, 0] = 5
    flaw = _flaw(x=61, y=32, width=2, height=2, peak_x=61, peak_y=33)
    assert worst_patches(scores, (flaw,), CENTRES) == [(3, 6)]
    assert worst_patches(scores, (), CENTRES) == [(0, 0)]


def test_patches_that_do_not_count_are_never_the_worst() -> None:
    scores = np.array([[np.nan, 1, 2], [np.nan, 5, np.nan]], np.float32)
    flaw = _flaw(x=0, y=0, width=30, height=10, peak_x=1, peak_y=1)
    centres = np.array([5.0, 15.0]), np.array([5.0, 15.0, 25.0])
    assert worst_patches(scores, (), centres) == [(1, 1)]
    assert worst_patches(scores, (flaw,), centres) == [(0, 2)]


SETTINGS: dict[str, list[str]] = {
    "patchcore": [],
    "patchcore, reweighted": ["model.image_score=reweighted"],
    "patchcore, adaptive, top percent": [
        "model.embedding=adaptive",
        "model.image_score=top_percent",
    ],
    "padim": ["model.kind=padim"],
    "padim, more images than dimensions": ["model.kind=padim", "model.dimensions=6"],
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_gradient_of_the_score_equals_finite_differences(
    kind: str, product: Path, tmp_path: Path, command: Command
) -> None:
    overrides = ["precision=fp32", "backbone.layers=[layer1, layer2]", *SETTINGS[kind]]
    assert command("train", train_arguments(product, tmp_path / "run", *overrides))[0] == 0
    detector = opened(tmp_path / "run")
    item = loaded(detector, product / "test" / "spot" / "001.png")
    (before,) = detector.score([item])
    gradient = score_gradient(detector, item)
    assert gradient.shape == (3, *item.view.size)
    assert live_hooks(detector.extractor.network) == 0
    # A step along the gradient raises the score by its squared norm times the step. The network
    # is piecewise linear, so a step has to be small, and float32 wants it large: the middle.
    direction = gradient.permute(1, 2, 0).numpy()
    size = float(np.linalg.norm(direction))
    steps = []
    for sign in (1, -1):
        pixels = item.pixels + np.float32(sign * 0.01 / size) * direction
        moved = replace(item, pixels=np.ascontiguousarray(pixels))
        (after,) = detector.score([moved])
        steps.append(after.score)
    assert (steps[0] - steps[1]) / 0.02 == pytest.approx(size, rel=0.1)
    assert steps[0] > before.score > steps[1]


def test_nearest_patches_are_those_of_brute_force_and_lie_in_the_images_named(
    run_folder: Path, product: Path
) -> None:
    model = opened(run_folder)
    detector = model
    item = loaded(detector, product / "test" / "spot" / "000.png")
    (prediction,) = detector.score([item])
    patches = [_highest(prediction.patch_scores), (0, 0), (2, 5)]
    good = _good(model, product)
    bank = detector.scorer
    assert isinstance(bank, MemoryBank)
    embeddings = detector.embedder([item])[0]
    for patch, near in zip(patches, good.nearest(item, patches), strict=True):
        distances = torch.linalg.vector_norm(bank.vectors - embeddings[patch], dim=1)
        expected = distances.sort().values[:5]
        torch.testing.assert_close(torch.tensor([p.distance for p in near]), expected)
        assert near[0].distance == pytest.approx(float(prediction.patch_scores[patch]), rel=1e-3)
        for found in near:
            source = detector.embedder([loaded(detector, product / found.image)])
            away = torch.linalg.vector_norm(source[0, found.row, found.column] - embeddings[patch])
            assert float(away) == pytest.approx(found.distance, rel=1e-3)
            crop = good.crop(found)
            assert crop.shape == (150, 150, 3)
            assert len(np.unique(crop.reshape(-1, 3), axis=0)) > 20  # a photograph
    assert good.missing() == {}


def test_large_images_are_explained_by_their_tiles(
    product: Path, tmp_path: Path, command: Command
) -> None:
    """Patches of a mosaic: the tile they lie in, the good patches nearest to them, the pictures."""
    settings = ["image.tile=64", "image.overlap=16", "precision=fp32"]
    assert command("train", train_arguments(product, tmp_path / "run", *settings))[0] == 0
    model = opened(tmp_path / "run")
    detector, file = model, product / "test" / "spot" / "000.png"
    item = loaded(detector, file)
    (prediction,) = detector.score([item])
    height, width = prediction.patch_scores.shape
    good = _good(model, product)
    patches = [_highest(prediction.patch_scores), (height - 1, 0), (2, width - 1)]
    for patch, near in zip(patches, good.nearest(item, patches), strict=True):
        assert near[0].distance == pytest.approx(float(prediction.patch_scores[patch]), rel=1e-3)
        box = patch_box(item.view, (height, width), *patch)
        tile = tile_of(item, (height, width), patch)
        assert tile.view.rows.start <= box.top < box.bottom <= tile.view.rows.stop
        assert tile.view.columns.start <= box.left < box.right <= tile.view.columns.stop
        assert good.crop(near[0]).shape == (150, 150, 3)
    # The worst patch lies on the red square, which reaches from (30, 40) to (40, 50).
    box = patch_box(item.view, (height, width), *patches[0])
    assert box.top < 48
    assert box.bottom > 22
    assert box.left < 58
    assert box.right > 32
    assert good.missing() == {}
    arguments = ["--model", tmp_path / "run", "--input", file, "--output", tmp_path / "why"]
    assert command("explain", arguments)[0] == 0
    written = {file.name for file in (tmp_path / "why").iterdir()}
    assert {"explanation.html", "score_gradient.png"} <= written
    code, _, err = command("features", [*arguments[:4], "--output", tmp_path / "features.npz"])
    assert code == 2
    assert "cuts its images into tiles" in err


def test_padim_compares_with_the_same_place_on_several_good_images(
    padim_folder: Path, product: Path
) -> None:
    model = opened(padim_folder)
    item = loaded(model, product / "test" / "good" / "000.png")
    good = _good(model, product)
    ((*near,),) = good.nearest(item, [(3, 4)])
    assert len({patch.image for patch in near}) == 5
    assert {(patch.row, patch.column, patch.distance) for patch in near} == {(3, 4, None)}


def test_the_same_place_on_an_image_of_another_shape(
    product: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method from outside keeps no patches, and learns no places."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tests" / "methods"))
    monkeypatch.setitem(METHODS, "mean", Method("Mean embedding", "mean_embedding"))
    run = tmp_path / "run"
    assert command("train", train_arguments(product, run, "model.kind=mean"))[0] == 0
    model = opened(run)
    tall = cv2.imread(str(product / "test" / "good" / "000.png"))
    cv2.imwrite(str(tmp_path / "tall.png"), cv2.resize(tall, (60, 300)))
    item = loaded(model, tmp_path / "tall.png")
    good = _good(model, product)
    height, width = model.score([item])[0].patch_scores.shape
    here = model.score([loaded(model, product / "test" / "good" / "000.png")])[0].patch_scores
    assert height > here.shape[0]
    places = [(0, 0), (height // 2, 1), (height - 1, width - 1)]
    for (row, column), near in zip(places, good.nearest(item, places), strict=True):
        for patch in near:  # the patch on which the middle of the other one lies
            assert patch.row == int((row + 0.5) / height * here.shape[0])
            assert patch.column == int((column + 0.5) / width * here.shape[1])
            good.crop(patch)


@pytest.mark.parametrize("inside", ["", "train", "train/good"])
def test_good_images_are_found_in_any_folder_that_holds_them(
    inside: str, run_folder: Path, product: Path
) -> None:
    model = opened(run_folder)
    good = _good(model, product / "absent", product / inside)
    item = loaded(model, product / "test" / "good" / "000.png")
    ((patch, *_),) = good.nearest(item, [(0, 0)])
    good.crop(patch)
    assert not good.missing()


def test_images_learned_by_an_update_are_found_beside_the_first_ones(
    run_folder: Path, tmp_path: Path, command: Command, product: Path
) -> None:
    """They lie elsewhere, and those of a line's record have other names in the model."""
    model, folder = opened(run_folder), tmp_path / "confirmed"
    write_part(folder / "part-12.png", seed=800)
    write_part(folder / "000.png", seed=801)
    images = model.manifest["training_images"]
    further = {"part 12": folder / "part-12.png", "2/000.png": folder / "000.png"}
    known = {**images, **{name: sha256_of(file) for name, file in further.items()}}
    updated = replace(model, manifest={**model.manifest, "training_images": known})
    there = good_images(updated, folder)
    found = {name: there.find(name) for name in known}
    assert {name: one.path for name, one in found.items() if not isinstance(one, str)} == {
        **{name: product / name for name in images},
        **further,
    }
    assert good_images(updated).find("part 12") == "not found"
    arguments = ["--model", run_folder, "--input", folder / "000.png", "--output", tmp_path / "x"]
    code, _, err = command("explain", [*arguments, "--good", folder, product, "--device", "cpu"])
    assert (code, "not shown" in err) == (0, False), err


def test_images_that_are_gone_or_changed_are_told(
    run_folder: Path, product: Path, tmp_path: Path
) -> None:
    model = opened(run_folder)
    shutil.copytree(product / "train" / "good", tmp_path / "good")
    item = loaded(model, product / "test" / "good" / "000.png")
    here = _good(model, tmp_path / "good")
    ((first, *rest),) = here.nearest(item, [(0, 0)], count=40)
    other = next(patch for patch in rest if patch.image != first.image)
    write_part(tmp_path / "good" / Path(first.image).name, seed=999)
    (tmp_path / "good" / Path(other.image).name).unlink()
    assert here.crop(first).shape == here.crop(other).shape == (150, 150, 3)
    assert here.missing() == {first.image: "changed since training", other.image: "not found"}
    assert _good(model).crop(first).shape == (150, 150, 3)


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_refused_images_keep_the_indices_of_the_others(refused: list[bool]) -> None:
    names = [f"train/good/{i:03}.png" for i in range(len(refused))]
    manifest: dict[str, Any] = {
        "training_images": {n: "" for n, r in zip(names, refused, strict=True) if not r},
        "refused_images": {n: i for i, (n, r) in enumerate(zip(names, refused, strict=True)) if r},
    }
    assert training_names(manifest) == names


def test_a_refused_training_image_does_not_shift_the_others(
    product: Path, tmp_path: Path, command: Command
) -> None:
    root = tmp_path / "disc"
    shutil.copytree(product, root)
    (root / "train" / "good" / "002.png").write_bytes(b"no picture")
    assert command("train", train_arguments(root, tmp_path / "run"))[0] == 3
    model = opened(tmp_path / "run")
    assert model.manifest["refused_images"] == {"train/good/002.png": 2}
    bank = model.scorer
    assert isinstance(bank, MemoryBank)
    names = training_names(model.manifest)
    for i in range(0, len(bank.origins), max(1, len(bank.origins) // 8)):
        image, row, column = bank.origins[i].tolist()
        item = loaded(model, root / names[image])
        patch = model.embedder([item])[0, row, column]
        torch.testing.assert_close(patch, bank.vectors[i], rtol=2e-2, atol=2e-2)
