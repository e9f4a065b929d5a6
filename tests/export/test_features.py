"""Saved features: what layers put out, pooled or whole, in one file that appears complete."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from anomaly.errors import DataError
from anomaly.export import features
from anomaly.export.features import from_backbone, pooled, save_features

CPU = torch.device("cpu")


def test_pooling_equals_numpy() -> None:
    """Maps, Swin's form of them, tokens of 16 pixels with one more before them, and vectors."""
    for shape, axis in (
        ((2, 3, 4, 5), 1),
        ((2, 4, 5, 3), 3),
        ((2, 4, 5, 5), 1),
        ((2, 21, 3), 2),
        ((2, 3), 1),
    ):
        values = np.random.default_rng(0).normal(size=shape)
        flat = np.moveaxis(values, axis, 1).reshape(2, shape[axis], -1)
        found = pooled(torch.from_numpy(values), (64, 80)).numpy()
        np.testing.assert_allclose(found, flat.mean(axis=2), err_msg=str(shape))


def images(folder: Path, *sizes: tuple[int, int]) -> list[Path]:
    """Pictures of noise, (height, width)."""
    files = [folder / f"{i}.png" for i in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        noise = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
        assert cv2.imwrite(str(file), noise)
    return files


def test_maps_of_several_shapes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    paths = images(tmp_path, (96, 96), (96, 96), (48, 192))
    source = from_backbone("tiny", "random", CPU, ["layer1", "fc"])
    with pytest.raises(DataError, match="differ in size"):
        save_features(source, paths, tmp_path / "maps.npz", pool="none")
    assert sorted(f.suffix for f in tmp_path.iterdir()) == [".png"] * 3
    assert save_features(source, paths, tmp_path / "mean.npz") == []
    saved = np.load(tmp_path / "mean.npz")
    assert sorted(saved["paths"]) == sorted(map(str, paths))
    assert (saved["layer1"].shape, saved["fc"].shape) == ((3, 16), (3, 10))
    assert saved["layer1"].dtype == np.float32


def test_features_that_no_memory_holds_are_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_MOST_BYTES", 8 * 16 * 4)
    monkeypatch.setattr(features, "_AT_ONCE", 1)
    paths = images(tmp_path, *[(96, 120)] * 9)
    source = from_backbone("tiny", "random", CPU, ["layer1"])
    stages: list[tuple[str, int, int]] = []
    with pytest.raises(DataError, match="the features of 9 images take"):
        save_features(source, paths, tmp_path / "all.npz", progress=lambda *s: stages.append(s))
    assert stages == []
