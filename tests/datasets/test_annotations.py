"""Text files that name good images stop learning; those that speak of something else don't."""

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from kit import touch

from anomaly.datasets.inputs import check_inputs, open_test_images
from anomaly.datasets.layouts import open_dataset, recognise
from anomaly.errors import DataError

BOXES = json.dumps({"images": [{"id": 4, "file_name": "k4.jpg"}], "annotations": [{"box": [1]}]})


def _write(root: Path, images: str, texts: dict[str, str | bytes]) -> None:
    touch(root, *(images.format(i) for i in range(8)), *texts)
    for name, text in texts.items():
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())


ANNOTATED: list[tuple[str, dict[str, str | bytes], int]] = [
    ("k{}.jpg", {"k2.json": "{}", "k5.json": "{}"}, 2),
    ("JPEGImages/k{}.jpg", {"Annotations/k3.xml": "<annotation/>"}, 1),
    ("images/train/k{}.jpg", {f"labels/train/k{i}.txt": "" for i in range(8)}, 8),
    ("set/img/k{}.jpg", {"set/ann/k1.jpg.json": "{}"}, 1),
    ("images/default/k{}.jpg", {"annotations/instances.json": BOXES}, 1),
    ("train/k{}.jpg", {"train/_annotations.coco.json": BOXES}, 1),
    ("k{}.jpg", {"via_1.json": '{"k6.jpg8123":{"filename":"k6.jpg","regions":[]}}'}, 1),
    ("k{}.jpg", {"out.jsonl": '{"image":"\\/data\\/upload\\/1\\/0f3e2d1c-k7.jpg"}\n'}, 1),
    ("k{}.jpg", {"train.manifest": '{"source-ref": "s3://lot/k1.jpg"}\n'}, 1),
    ("k{}.jpg", {"boxes.txt": "C:\\pictures\\k1.jpg 5 5 20 20 0\n"}, 1),
    ("k{}.jpg", {"labels.csv": "id;label\nk1;dent\n"}, 1),
    ("k{}.jpg", {"labels.csv": "file\tlabel\nK1.PNG\tdent\n".encode("utf-16")}, 1),
    ("{:03}.jpg", {"labels.tsv": "".join(f"{i:03}\tgood\n" for i in range(8))}, 8),
    ("划痕 {}.jpg", {"list.json": json.dumps(["划痕 2.jpg"])}, 1),
    ("划痕 {}.jpg", {"list.txt": quote("划痕 2.jpg")}, 1),
    ("划痕 {}.jpg", {"list.csv": "图,类\n划痕 2.jpg,坏".encode("gb18030")}, 1),
]


def test_annotations_stop_learning(tmp_path: Path) -> None:
    for number, (images, texts, names) in enumerate(ANNOTATED):
        root = tmp_path / str(number)
        _write(root, images, texts)
        folder = (root / images).parent
        of_them = rf"names? {names} of 8 images .* CSV list .* move (this file|these files) away"
        learners: list[tuple[Callable[..., object], tuple[object, ...]]] = [
            (open_dataset, ("folder", root)),
            (open_dataset, ("folder", folder)),
            (check_inputs, ([folder], sorted(folder.glob("*.jpg")))),
            (open_test_images, ([folder], [])),
        ]
        for learn, arguments in learners:
            with pytest.raises(DataError, match=of_them):
                learn(*arguments)


OTHERS: list[tuple[str, dict[str, str | bytes]]] = [
    ("k{}.jpg", {"readme.txt": "Such as k1.jpg", "LICENSE.txt": "k2.jpg", "data.yaml": "k1.jpg"}),
    ("{}.jpg", {"camera.json": '{"gain": 2, "exposure": 0.5}', "classes.txt": "dent\n"}),
    ("k{}.jpg", {"results.csv": "path,image_sha256,score\nk1.jpg,0,1\n"}),
    ("k{}.jpg", {"scores.csv": "path,defect_type,is_defect,\nk1.jpg", "metrics.json": "k1.jpg"}),
    ("k{}.jpg", {"../other.csv": "elsewhere/k1.jpg,dent", "../elsewhere/k1.jpg": ""}),
]


def test_other_texts_beside_images_do_not(tmp_path: Path) -> None:
    for number, (images, texts) in enumerate(OTHERS):
        root = tmp_path / str(number) / "lot"
        _write(root, images, texts)
        assert recognise(root).layout == "folder"
        assert len(open_dataset("folder", root).train) == 8


def test_annotations_of_defects_are_theirs(tmp_path: Path) -> None:
    listed = json.dumps({"images": ["defect/k1.jpg"]})
    own: dict[str, str | bytes] = {"defect/k1.jpg": "", "defect/k1.json": "{}", "all.json": listed}
    published: dict[str, str | bytes] = {
        "defects_config.json": '[{"defect_name": "dent", "pixel_value": 255}]',
        "license.txt": "CC BY-NC-SA 4.0", "readme.txt": "k0.jpg", "test/dent/k0.jpg": "",
        "validation/good/k0.jpg": "",
    }  # fmt: skip
    for layout, good, texts in (
        ("good_defect", "good", {**own, "labels/defect/k1.txt": "0"}),
        ("mvtec", "train/good", published),
    ):
        root = tmp_path / layout
        _write(root, f"{good}/k{{}}.jpg", texts)
        dataset = open_dataset(layout, root)
        count = len([s for split in dataset.splits.values() for s in split if not s.is_defect])
        (root / good / "k3.xml").touch()
        with pytest.raises(DataError, match=rf"k3\.xml names 1 of {count} images"):
            open_dataset(layout, root)


def test_texts_around_the_folder_of_a_data_set_are_none_of_its_own(tmp_path: Path) -> None:
    texts: dict[str, str | bytes] = {"../all.txt": "k1.jpg", "../../k1.json": "{}"}
    for folder in ("home/part", "images/part", "pictures"):
        _write(tmp_path / folder, "k{}.jpg", texts)
        assert len(open_dataset("folder", tmp_path / folder).train) == 8


def test_one_good_image_with_its_annotation(tmp_path: Path) -> None:
    _write(tmp_path, "k{}.jpg", {"k2.json": "{}"})
    check_inputs([tmp_path / "k1.jpg"], [tmp_path / "k1.jpg"])
    with pytest.raises(DataError, match=r"k2\.json names 1 of 1 images"):
        check_inputs([tmp_path / "k2.jpg"], [tmp_path / "k2.jpg"])
