"""Data sets as other products export them: Amazon's, Roboflow's, and MVTec 3D AD."""

import json
from pathlib import Path
from typing import Any

import pytest

from anomaly.datasets import open_dataset
from anomaly.datasets.recognise import recognise
from anomaly.errors import DataError


def _touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def _line(name: str, label: str) -> str:
    about = {"class-name": label, "type": "groundtruth/image-classification", "confidence": 1}
    entry: dict[str, Any] = {
        "source-ref": f"s3://bucket/lookout/{name}",
        "anomaly-label": int(label != "normal"),
        "anomaly-label-metadata": about,
    }
    if label != "normal":
        entry["anomaly-mask-ref"] = f"s3://bucket/masks/{name}"
        entry["anomaly-mask-ref-metadata"] = {"internal-color-map": {"1": {"class-name": "dent"}}}
    return json.dumps(entry)


def test_a_manifest_of_sagemaker(tmp_path: Path) -> None:
    names = [f"{kind}/{i}.png" for kind in ("a", "b") for i in range(5)]
    _touch(tmp_path / "images", *names)
    lines = [_line(name, "normal" if name[0] == "a" else "anomaly") for name in names]
    manifest = tmp_path / "train.manifest"
    manifest.write_text("\n".join([*lines, ""]))
    for place in (tmp_path, manifest):
        (found,) = recognise(place)
        assert (found.layout, found.root) == ("csv", manifest)
    dataset = open_dataset("csv", manifest, None)
    assert {s.name for s in dataset.test if s.is_defect} == {f"images/b/{i}.png" for i in range(5)}
    assert len(dataset.train) == 4
    assert all(s.path.exists() and s.mask_path is None for s in (*dataset.train, *dataset.test))
    with pytest.raises(DataError, match=r"list of images, train\.manifest, which says which"):
        open_dataset("folder", tmp_path, None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 isn't JSON"),
        ("[" * 100_000, "line 2 isn't JSON"),
        ("[]", "line 2 has no source-ref"),
        ('{"source-ref": 5}', "line 2 has no source-ref"),
        ('{"source-ref": "a/0.png"}', "line 2 has 0 class names"),
        (_line("none.png", "normal"), r"none\.png isn't below the folder of the list; copy"),
        (_line("c/0.png", "normal"), r"c/0\.png can be .*0\.png or .*0\.png"),
        (_line("a/0.png", "review"), "line 2: the label 'review' doesn't say"),
    ],
)
def test_mistakes_in_a_manifest_name_the_line(line: str, says: str, tmp_path: Path) -> None:
    _touch(tmp_path, "a/0.png", "b/0.png", "a/1.png")
    (tmp_path / "list.jsonl").write_text("\n".join([_line("a/1.png", "normal"), line]))
    with pytest.raises(DataError, match=says):
        open_dataset("csv", tmp_path / "list.jsonl", None)


def test_folders_of_lookout_for_vision(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _touch(tmp_path, *(f"{split}/{k}/{i}.jpg" for k in ("normal", "anomaly") for i in range(4)))
    (found,) = recognise(tmp_path)
    assert (found.layout, found.reason.split(",")[0]) == ("good_defect", "AWS Lookout for Vision")
    dataset = open_dataset(found.layout, found.root, None)
    assert {s.name for s in dataset.train} == {f"train/normal/{i}.jpg" for i in range(4)}
    assert {s.name.rpartition("/")[0]: s.defect_type for s in dataset.test} == {
        "test/normal": "good", "test/anomaly": "anomaly", "train/anomaly": "anomaly",
    }  # fmt: skip


def test_folders_of_roboflow(tmp_path: Path) -> None:
    _touch(tmp_path, "README.roboflow.txt", *(f"train/Good/{i}.jpg" for i in range(4)))
    _touch(tmp_path, "train/Scratch/1.jpg", "valid/Good/1.jpg", "test/Good/1.jpg")
    (found,) = recognise(tmp_path)
    assert (found.layout, found.reason.split(",")[0]) == ("good_defect", "Roboflow")
    dataset = open_dataset(found.layout, found.root, None)
    assert [s.name for s in dataset.validation] == ["valid/Good/1.jpg"]
    assert {s.name: s.defect_type for s in dataset.test} == {
        "test/Good/1.jpg": "good", "train/Scratch/1.jpg": "Scratch",
    }  # fmt: skip


def test_annotations_of_roboflow(tmp_path: Path) -> None:
    categories = [{"id": i, "name": name} for i, name in enumerate(("parts", "dent", "ok"))]
    for split in ("train", "valid", "test"):
        names = [f"{split}{i}.jpg" for i in range(4)]
        _touch(tmp_path / split, *names)
        boxes = [{"image_id": 0, "category_id": 1}, {"image_id": 1, "category_id": 2}]
        images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
        content = {"images": images, "annotations": boxes, "categories": categories}
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(content))
    (found,) = recognise(tmp_path)
    assert found.layout == "coco"
    dataset = open_dataset("coco", tmp_path, None)
    assert [s.name for s in dataset.train] == [f"train/train{i}.jpg" for i in (1, 2, 3)]
    assert [s.name for s in dataset.validation] == [f"valid/valid{i}.jpg" for i in (1, 2, 3)]
    assert [s.name for s in dataset.test if s.is_defect] == [
        f"{split}/{split}0.jpg" for split in ("train", "valid", "test")
    ]
    assert {s.defect_type for s in dataset.test} == {"good", "dent"}
    for root in (tmp_path, tmp_path / "train"):
        with pytest.raises(DataError, match=r"COCO's form.* --set data\.format=coco --set"):
            open_dataset("folder", root, None)
    for text in ("{", "[]", "null", '{"images": [{"id": 0}]}'):
        (tmp_path / "train" / "_annotations.coco.json").write_text(text)
        with pytest.raises(DataError, match=r"_annotations.coco.json isn't"):
            open_dataset("coco", tmp_path, None)


def test_mvtec_3d_ad(tmp_path: Path) -> None:
    parts = ("train/good", "validation/good", "test/good", "test/hole")
    _touch(tmp_path, *(f"{part}/{kind}/0.png" for part in parts for kind in ("rgb", "xyz")))
    _touch(tmp_path, "test/good/gt/0.png", "test/hole/gt/0.png")
    (found,) = recognise(tmp_path)
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
