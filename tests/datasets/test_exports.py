"""Data sets as others lay them out: Amazon, Roboflow, and MVTec 3D AD."""

from pathlib import Path

import pytest

from anomaly.datasets import open_dataset
from anomaly.datasets.recognise import recognise
from anomaly.errors import DataError


def _touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def test_folders_of_lookout_for_vision(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _touch(tmp_path, *(f"{split}/{k}/{i}.jpg" for k in ("normal", "anomaly") for i in range(4)))
    found = recognise(tmp_path)
    assert found.layout == "good_defect"
    dataset = open_dataset(found.layout, found.root, None)
    assert {s.name for s in dataset.train} == {f"train/normal/{i}.jpg" for i in range(4)}
    assert {s.name.rpartition("/")[0]: s.defect_type for s in dataset.test} == {
        "test/normal": "good", "test/anomaly": "anomaly", "train/anomaly": "anomaly",
    }  # fmt: skip


def test_folders_of_roboflow(tmp_path: Path) -> None:
    _touch(tmp_path, "README.roboflow.txt", *(f"train/Good/{i}.jpg" for i in range(4)))
    _touch(tmp_path, "train/Scratch/1.jpg", "valid/Good/1.jpg", "test/Good/1.jpg")
    found = recognise(tmp_path)
    assert found.layout == "good_defect"
    dataset = open_dataset(found.layout, found.root, None)
    assert [s.name for s in dataset.validation] == ["valid/Good/1.jpg"]
    assert {s.name: s.defect_type for s in dataset.test} == {
        "test/Good/1.jpg": "good", "train/Scratch/1.jpg": "Scratch",
    }  # fmt: skip


def test_mvtec_3d_ad(tmp_path: Path) -> None:
    parts = ("train/good", "validation/good", "test/good", "test/hole")
    _touch(tmp_path, *(f"{part}/{kind}/0.png" for part in parts for kind in ("rgb", "xyz")))
    _touch(tmp_path, "test/good/gt/0.png", "test/hole/gt/0.png")
    found = recognise(tmp_path)
    assert found.layout == "mvtec_3d"
    dataset = open_dataset("mvtec_3d", tmp_path, None)
    assert [s.name for s in dataset.train] == ["train/good/rgb/0.png"]
    assert [s.name for s in dataset.validation] == ["validation/good/rgb/0.png"]
    gt = tmp_path / "test" / "hole" / "gt" / "0.png"
    assert [(s.name, s.defect_type, s.mask_path) for s in dataset.test] == [
        ("test/good/rgb/0.png", "good", None),
        ("test/hole/rgb/0.png", "hole", gt),
    ]
    for layout, says in (("mvtec", "data.format=mvtec_3d"), ("folder", "data.format=mvtec_3d")):
        with pytest.raises(DataError, match=says):
            open_dataset(layout, tmp_path, None)
