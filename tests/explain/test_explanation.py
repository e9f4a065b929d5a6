"""Explanations, against brute force and finite differences."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, write_part
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pixel_map import pixel_map
from scipy import ndimage

import anomaly
from anomaly.config.schema import METHODS, Method
from anomaly.errors import ConfigError
from anomaly.explain.evidence import (
    GoodImages,
    explained,
    patch_box,
    peak_of,
    score_gradient,
    tile_of,
    training_names,
    worst_patches,
)
from anomaly.export.features import from_model
from anomaly.hooks import live_hooks
from anomaly.imaging.geometry import AxisView, View
from anomaly.imaging.loading import NetworkInput, load
from anomaly.maps.anomaly_map import marked_regions
from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.scoring.model import Model
from anomaly.storage.models import load_model

CPU = torch.device("cpu")
VIEW = View((AxisView(70, 70, 0, 70),), (AxisView(90, 90, 0, 90),))  # patches of 10 pixels


def fit(good: Path, image: dict[str, Any] | None = None, **model: Any) -> Model:
    """A model of the tests' network, without thresholds."""
    network = {"name": "tiny", "weights": "random", "layers": ["layer1", "layer2"]}
    kind = {"kind": "patchcore", "coreset_ratio": 0.1, "dimensions": 20} | model
    values = {"backbone": network, "image": {"area": 64} | (image or {}), "model": kind}
    return anomaly.fit(good, values, device="cpu", calibrate=False).model


def loaded(model: Model, path: Path) -> NetworkInput:
    item = load(0, path, model.loading)
    assert isinstance(item, NetworkInput)
    return item


def good_of(model: Model, *folders: Path) -> GoodImages:
    """Good patches of images in these folders alone."""
    return GoodImages(replace(model, folder=None), *folders)


@settings(max_examples=50)
@given(arrays(np.float32, (7, 9), elements=st.floats(0, 9, width=16)), st.floats(0, 10))
def test_worst_patches_are_those_of_what_is_marked(scores: np.ndarray, limit: float) -> None:
    """Patches of ten pixels, and a map of which each pixel is its patch."""
    pixels = scores.repeat(10, 0).repeat(10, 1)
    flaws = marked_regions((pixels > limit).astype(np.uint8), pixel_map(pixels))
    patches = worst_patches(scores, [peak_of(flaw, VIEW) for flaw in flaws], VIEW)
    found = list(patches)
    assert next(iter(patches.values())) == (1 if flaws else None)
    labels = ndimage.label(scores > limit, np.ones((3, 3)))[0]
    peaks = sorted((scores[labels == i].max() for i in range(1, labels.max() + 1)), reverse=True)
    assert scores[found[0]] == (peaks or [scores.max()])[0]
    assert len(found) == len(set(found)) <= max(1, min(4, len(peaks)))
    assert all(scores[patch] > limit for patch in found) or not peaks


def test_the_patch_of_a_peak_is_the_nearest_one_that_counts() -> None:
    scores = np.zeros((7, 9), np.float32)
    scores[0, 0] = 5
    assert worst_patches(scores, [(61.5, 33.5)], VIEW) == {(3, 6): 1}
    assert worst_patches(scores, (), VIEW) == {(0, 0): None}
    scores = np.array([[np.nan, 1, 2], [np.nan, 5, np.nan]], np.float32)
    view = View((AxisView(20, 20, 0, 20),), (AxisView(30, 30, 0, 30),))
    assert worst_patches(scores, (), view) == {(1, 1): None}
    assert worst_patches(scores, [(1.5, 1.5), (24.5, 9.0)], view) == {(0, 1): 1, (0, 2): 2}


@pytest.mark.parametrize(
    "model",
    [
        {"image_score": "reweighted"},
        {"embedding": "concat", "image_score": "top_percent"},
        {"kind": "padim"},
        {"kind": "padim", "dimensions": 6},  # more images than dimensions
    ],
    ids=str,
)
def test_the_gradient_of_the_score_equals_finite_differences(
    model: dict[str, Any], product: Path
) -> None:
    detector = fit(product / "train" / "good", **model)
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
        (after,) = detector.score([replace(item, pixels=np.ascontiguousarray(pixels))])
        steps.append(after.score)
    assert (steps[0] - steps[1]) / 0.02 == pytest.approx(size, rel=0.1)
    assert steps[0] > before.score > steps[1]


def test_nearest_patches_are_those_of_brute_force_and_lie_in_the_images_named(
    run_folder: Path, product: Path
) -> None:
    model = load_model(run_folder, CPU)
    item = loaded(model, product / "test" / "spot" / "000.png")
    (prediction,) = model.score([item])
    patches = [next(iter(worst_patches(prediction.patch_scores, (), item.view))), (0, 0), (2, 5)]
    good = good_of(model, product)
    bank = model.scorer
    assert isinstance(bank, MemoryBank)
    embeddings = model.embedder([item])[0]
    for patch, near in zip(patches, good.nearest(item, patches), strict=True):
        distances = torch.linalg.vector_norm(bank.vectors - embeddings[patch], dim=1)
        expected = distances.sort().values[:5]
        torch.testing.assert_close(torch.tensor([p.distance for p in near]), expected)
        assert near[0].distance == pytest.approx(float(prediction.patch_scores[patch]), rel=1e-3)
        for found in near:
            source = model.embedder([loaded(model, product / found.image)])
            away = torch.linalg.vector_norm(source[0, found.row, found.column] - embeddings[patch])
            assert float(away) == pytest.approx(found.distance, rel=1e-3)
            crop = good.crop(found)
            assert crop.shape == (150, 150, 3)
            assert len(np.unique(crop.reshape(-1, 3), axis=0)) > 20  # a photograph
    assert good.missing() == []


def test_large_images_are_explained_by_their_tiles(product: Path, tmp_path: Path) -> None:
    """Patches of a mosaic: the tile they lie in, the good patches nearest to them, the pictures."""
    model = fit(product / "train" / "good", {"tile": 64})
    file = product / "test" / "spot" / "000.png"
    item = loaded(model, file)
    (prediction,) = model.score([item])
    height, width = prediction.patch_scores.shape
    good = good_of(model, product / "train" / "good")
    patches = [
        next(iter(worst_patches(prediction.patch_scores, (), item.view))),
        (height - 1, 0),
        (2, width - 1),
    ]
    for patch, near in zip(patches, good.nearest(item, patches), strict=True):
        assert near[0].distance == pytest.approx(float(prediction.patch_scores[patch]), rel=1e-3)
        box = patch_box(item.view, (height, width), *patch)
        tile = tile_of(item, (height, width), patch)
        assert tile.view.rows[0].start <= box[0] < box[2] <= tile.view.rows[0].stop
        assert tile.view.columns[0].start <= box[1] < box[3] <= tile.view.columns[0].stop
        assert good.crop(near[0]).shape == (150, 150, 3)
    # The worst patch lies on the red square, which reaches from (30, 40) to (40, 50).
    box = patch_box(item.view, (height, width), *patches[0])
    assert 14 < box[0] < 48
    assert 24 < box[1] < 58
    assert "score_gradient" in explained(model, file).pictures
    anomaly.Detector(model).save(tmp_path / "model")
    with pytest.raises(ConfigError, match="cuts its images into tiles"):
        from_model(tmp_path / "model", CPU)


def test_methods_that_keep_no_patches_show_the_same_place_on_several_good_images(
    padim_folder: Path, product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place may be on an image of another shape; a method from outside learns no places."""
    padim, known = load_model(padim_folder, CPU), product / "test" / "good" / "000.png"
    ((*near,),) = good_of(padim, product).nearest(loaded(padim, known), [(3, 4)])
    assert len({patch.image for patch in near}) == 5
    assert {(patch.row, patch.column, patch.distance) for patch in near} == {(3, 4, None)}
    monkeypatch.syspath_prepend(str(REPOSITORY / "tests" / "methods"))
    monkeypatch.setitem(METHODS, "mean", Method("Mean embedding", "mean_embedding"))
    model = fit(product / "train" / "good", kind="mean")
    cv2.imwrite(str(tmp_path / "tall.png"), cv2.resize(cv2.imread(str(known)), (60, 300)))
    item = loaded(model, tmp_path / "tall.png")
    good = good_of(model, product / "train" / "good")
    height, width = model.score([item])[0].patch_scores.shape
    rows, columns = model.score([loaded(model, known)])[0].patch_scores.shape
    assert height > rows
    places = [(0, 0), (height // 2, 1), (height - 1, width - 1)]
    for (row, column), near in zip(places, good.nearest(item, places), strict=True):
        for patch in near:  # the patch on which the middle of the other one lies
            assert patch.row == int((row + 0.5) / height * rows)
            assert patch.column == int((column + 0.5) / width * columns)
            good.crop(patch)


def test_images_that_are_gone_or_changed_are_told(
    run_folder: Path, product: Path, tmp_path: Path
) -> None:
    model = load_model(run_folder, CPU)
    shutil.copytree(product / "train" / "good", tmp_path / "good")
    item = loaded(model, product / "test" / "good" / "000.png")
    here = good_of(model, tmp_path / "good")
    ((first, *rest),) = here.nearest(item, [(0, 0)], count=40)
    other = next(patch for patch in rest if patch.image != first.image)
    write_part(tmp_path / "good" / Path(first.image).name, seed=999)
    (tmp_path / "good" / Path(other.image).name).unlink()
    assert here.crop(first).shape == here.crop(other).shape == (150, 150, 3)
    assert here.missing() == [first.image, other.image]


def test_refused_training_images_do_not_shift_the_others(product: Path, tmp_path: Path) -> None:
    shutil.copytree(product / "train" / "good", tmp_path / "good")
    for name in ("000.png", "005.png"):
        (tmp_path / "good" / name).write_bytes(b"no picture")
    model = fit(tmp_path / "good")
    assert model.manifest["refused_images"] == {"000.png": 0, "005.png": 5}
    names, bank = training_names(model.manifest), model.scorer
    assert names == [f"{i:03}.png" for i in range(12)]
    assert isinstance(bank, MemoryBank)
    for i in range(0, len(bank.origins), len(bank.origins) // 8):
        image, row, column = bank.origins[i].tolist()
        patch = model.embedder([loaded(model, tmp_path / "good" / names[image])])[0, row, column]
        torch.testing.assert_close(patch, bank.vectors[i], rtol=2e-2, atol=2e-2)
