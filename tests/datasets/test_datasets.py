"""Layouts as samples: each published one, and one's own."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import cv2
import numpy as np
import pytest
from kit import touch

from anomaly.config.schema import DataConfig
from anomaly.datasets.layouts import FORMATS, open_dataset, recognise
from anomaly.datasets.samples import Dataset, Sample, ground_truth
from anomaly.errors import DataError, ImageError


def _seen(samples: tuple[Sample, ...], root: Path) -> list[tuple[str, ...]]:
    """Of each image its path, its kind, and the mask that it may have."""

    def places(*paths: Path | None) -> list[str]:
        return [path.relative_to(root).as_posix() for path in paths if path is not None]

    return [(*places(s.path), s.defect_type, *places(s.mask_path)) for s in samples]


def test_the_config_knows_every_format() -> None:
    assert set(get_args(DataConfig.model_fields["format"].annotation)) == set(FORMATS)


# Layouts that others have published: files, and of images their split, kind and mask.
LAYOUTS = """
mvtec
    train/good/000.png    train good
    test/good/000.png     test good
    test/spot/000.png     test spot ground_truth/spot/000_mask.png
    test/unmasked/000.png test unmasked
    ground_truth/spot/000_mask.png
mvtec, by MVTec AD 2
    train/good/000_regular.png           train good
    validation/good/000_regular.png      validation good
    test_public/good/000_overexposed.png test good
    test_public/bad/000.png              test bad test_public/ground_truth/bad/000_mask.png
    test_public/ground_truth/bad/000_mask.png
    test_private/000.png
good_defect, by MVTec LOCO AD
    train/good/000.png             train good
    validation/good/000.png        validation good
    test/good/000.png              test good
    test/logical_anomalies/000.png test logical_anomalies ground_truth/logical_anomalies/000
    ground_truth/logical_anomalies/000/000.png
good_defect, by MVTec 3D AD
    train/good/rgb/0.png      train good
    train/good/xyz/0.png
    validation/good/rgb/0.png validation good
    test/good/rgb/0.png       test good
    test/good/gt/0.png
    test/hole/rgb/0.png       test hole test/hole/gt/0.png
    test/hole/xyz/0.png
    test/hole/gt/0.png
good_defect, by BTAD
    train/ok/0000.bmp train good
    test/ok/0000.bmp  test good
    test/ko/0000.bmp  test ko ground_truth/ko/0000.png
    test/ko/0001.bmp  test ko ground_truth/ko/0001.bmp
    ground_truth/ko/0000.png
    ground_truth/ko/0001.bmp
folder
    b/2.png train good
    a/1.png train good
    3.bmp   train good
    notes.txt
"""


def test_published_layouts_are_recognised_and_opened(tmp_path: Path) -> None:
    for number, text in enumerate(re.split(r"\n(?=\w)", LAYOUTS.strip())):
        title, *lines = text.splitlines()
        layout, root = title.partition(",")[0], tmp_path / str(number)
        expected = []
        for name, *said in map(str.split, lines):
            touch(root, name)
            if said:
                expected.append((said[0], name, *said[1:]))
        found = recognise(root)
        assert (found.layout, found.root) == (layout, root)
        dataset = open_dataset(layout, root)
        assert open_dataset(layout, tmp_path, str(number)) == dataset
        assert dataset.unused_masks == ()
        if "MVTec" in title or "BTAD" in title:
            assert open_dataset("mvtec", root) == dataset
        splits = dataset.splits.items()
        seen = [(name, *s) for name, samples in splits for s in _seen(samples, root)]
        assert sorted(seen) == sorted(expected)


def test_visa(tmp_path: Path) -> None:
    place, mask = "candle/Data/Images", "candle/Data/Masks/Anomaly/000.png"
    lines = [
        "object,split,label,image,mask",
        f"candle,train,normal,{place}/Normal/0836.JPG,",
        f"candle,test,normal,{place}/Normal/0001.JPG,",
        f"candle,test,anomaly,{place}/Anomaly/000.JPG,{mask}",
        "capsules,train,normal,capsules/Data/Images/Normal/000.JPG,",
    ]
    touch(tmp_path, "split_csv/1cls.csv", "candle/x", "candel/x")
    (tmp_path / "split_csv" / "1cls.csv").write_text("\n".join(lines))
    dataset = open_dataset("visa", tmp_path, "candle")
    assert open_dataset("visa", tmp_path / "candle") == dataset
    assert _seen(dataset.train, tmp_path) == [(f"{place}/Normal/0836.JPG", "good")]
    assert _seen(dataset.test, tmp_path) == [
        (f"{place}/Normal/0001.JPG", "good"),
        (f"{place}/Anomaly/000.JPG", "anomaly", mask),
    ]
    with pytest.raises(DataError, match="did you mean 'candle'"):
        open_dataset("visa", tmp_path, "candel")


def test_good_and_defect_folders(tmp_path: Path) -> None:
    good = [f"good/{i:02}.png" for i in range(20)]
    touch(tmp_path, *good, "defect/a.jpg", "defect/scratch/b.jpg", "masks/scratch/b.png")
    dataset = open_dataset("good_defect", tmp_path)
    assert len(dataset.train) == 16
    assert sorted(s.name for s in (*dataset.train, *dataset.test) if not s.is_defect) == good
    assert _seen(dataset.test, tmp_path)[4:] == [
        ("defect/a.jpg", "defect"),
        ("defect/scratch/b.jpg", "scratch", "masks/scratch/b.png"),
    ]
    # Which good images are tested with hangs on names: more images move hardly any.
    touch(tmp_path, *(f"good/more{i:02}.png" for i in range(5)))
    later = open_dataset("good_defect", tmp_path)
    moved = {s.name for s in dataset.test} ^ {s.name for s in later.test}
    assert len(moved) <= 3


def _list(folder: Path, text: str) -> Path:
    file = folder / "list.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_csv_list(tmp_path: Path) -> None:
    text = (
        "\ufeffpath,label,mask,split,group,camera\n"
        "a/1.png,good,,train,,north\n"
        "a/2.png,ok,,validation,,\n"
        "\n"
        'b/"3".png,Gut,,test,part 7,\n'
        "b\\4.png,scratch,m\\4.png,test,part 7,\n"
    )
    touch(tmp_path, "b/4.png", "m/4.png")  # as Windows has it, where these files are
    file = _list(tmp_path, text.replace('b/"3".png', '"b/3, big.png"'))
    for dataset in (open_dataset("csv", file), open_dataset("csv", tmp_path, "list.csv")):
        assert _seen(dataset.train, tmp_path) == [("a/1.png", "good")]
        assert _seen(dataset.validation, tmp_path) == [("a/2.png", "good")]
        assert _seen(dataset.test, tmp_path) == [
            ("b/3, big.png", "good"),
            ("b/4.png", "scratch", "m/4.png"),
        ]
        assert [s.group for s in dataset.test] == ["part 7", "part 7"]
        assert dataset.train[0].group is None


def test_the_order_of_a_list_changes_nothing(tmp_path: Path) -> None:
    rows = [f"{i}/{letter}.png,{'good' if i else 'dent'}" for i in range(4) for letter in "bac"]
    found = []
    for lines in (rows, rows[::-1], rows[5:] + rows[:5]):
        dataset = open_dataset("csv", _list(tmp_path, "\n".join(["path,label", *lines])))
        found.append((dataset.train, dataset.test))
    assert found[0] == found[1] == found[2]


def test_a_csv_list_without_splits_keeps_the_views_of_a_part_together(tmp_path: Path) -> None:
    def opened(rows: list[str]) -> Dataset:
        lines = ["path,label,group", *rows]
        dataset = open_dataset("csv", _list(tmp_path, "\n".join(lines)))
        assert not {s.group for s in dataset.train} & {s.group for s in dataset.test}
        return dataset

    dataset = opened([f"{i}.png,0,{i // 2}" for i in range(40)] + ["d.png,1,x"])
    assert (len(dataset.train), len(dataset.test)) == (32, 9)
    assert dataset.test[-1].defect_type == "defect"
    # A part with most of the views is learned from, one with a defect is tested with.
    dataset = opened([f"{i}.png,0,{'a' if i < 8 else i}" for i in range(10)])
    assert "a" not in {sample.group for sample in dataset.test}
    views = [(part, view) for part in range(10) for view in ("front", "back")]
    dataset = opened([f"{p}_{v}.png,{int(p < 4 and v == 'back')},{p}" for p, v in views])
    assert {"0", "1", "2", "3"} <= {sample.group for sample in dataset.test}


MISTAKES = [
    ("", "lacks the column 'path'"),
    ("path,lable\na.png,good\n", "'lable' isn't known; did you mean 'label'"),
    ("path,split\na.png,tset\n", "line 2: unknown split 'tset'; did you mean 'test'"),
    ("path\na.png\n./a.png\n", r"line 3 repeats a\.png of line 2"),
    ("path\nb//a.png\nb/a.png\n", r"line 3 repeats b/a\.png of line 2"),
    ("path,label\n,good\n", "line 2 has no path"),
    ("path,label,split\na.png,scratch,train\n", "line 2: a defect"),
    ("path,label\na,b.png,good\n", "line 2 has more cells"),
    ("path,label\na.png,scratch\n", "no training images"),
    ('path\n"a.png\n', "isn't a CSV file"),
    ("path,label\na.png,ok\nb.png, \nc.png,dent\nd.png,\n", r"2 of 4 rows .* \(lines 3, 5\)"),
    ("path,label\na.png,ok\nb.png,false_ok\n", "line 3: the label 'false_ok' doesn't say"),
    ("path,label\na.png,ok\nb.png,-\n", "line 3: the label '-' doesn't say"),
    ("path,label\na.png,ok\nb.png,yes\n", "line 3: the label 'yes' doesn't say"),
    ("path\nOK/a.png\nnIO/b.png\n", "nIO would be taken as good"),
    ("path,ok\na.png,1\nb.png,0\n", "no column `label`, but ok"),
    ("path,class\na.png,3\nb.png,4\n", "no column `label`, but class: .* rename it to"),
    ("path\nOK_1.png\nnIO_2.png\n", r"the names of 1 of 2 files say defective \(nIO_2"),
]


def test_mistakes_in_a_list_name_the_line(tmp_path: Path) -> None:
    for text, says in MISTAKES:
        with pytest.raises(DataError, match=says):
            open_dataset("csv", _list(tmp_path, text))


def test_labels_tell_the_encoding_of_a_list(tmp_path: Path) -> None:
    western, asian = ("ä.png", "Riß"), ("表面 2.png", "不良")
    for name, label, encodings in ((*western, "cp1252 utf-16"), (*asian, "gb18030 cp932 big5")):
        for encoding in encodings.split():
            text = f"path\tlabel\r\na.png\tgood\r\n{name}\t{label}\r\n"
            (tmp_path / "list.csv").write_bytes(text.encode(encoding))
            touch(tmp_path, "a.png", name)
            dataset = open_dataset("csv", tmp_path / "list.csv")
            assert [(s.name, s.defect_type) for s in dataset.test] == [(name, label)]


GOOD_AND_DEFECT = ("good/1.png", "defect/crack/2.png")
MVTEC = ("b/train/good/1.png", "b/test/good/1.png", "b/ground_truth/crack/1_mask.png")
VISA = ("split_csv/1cls.csv", "candle/Images/Anomaly/1.JPG", "candle/Images/Normal/1.JPG")


NOT_ONLY_GOOD = [
    (GOOD_AND_DEFECT, "", "defect"),
    (GOOD_AND_DEFECT, "defect", "defect"),
    (MVTEC, "", "b/ground_truth"),
    (MVTEC, "b", "b/ground_truth"),
    (MVTEC, "b/test", "b/test"),
    (MVTEC, "b/ground_truth", "b/ground_truth"),
    (("train/ok/1.png", "test/ok/1.png", "test/ko/2.png"), "", "test"),
    (("train/good/rgb/1.png", "test/hole/gt/1.png"), "", "test"),
    (VISA, "candle", "candle/Images/Anomaly"),
    (("OK/1.png", "NG/2.png"), "", "NG"),
    (("good/1.png", "contest/2.png"), "", "contest"),
    (("lot 7/1.png", "verkratzt/2.png"), "", "verkratzt"),
    (("a/good/1.png", "b/2.png"), "", "b"),
    (("a/good/1.png", "a/2.png"), "", "a"),
    (("monday/Bad Parts/1.png", "2.png"), "", "monday"),
    (("1.png", "a/Ground_Truth/2.png"), "", "a/Ground_Truth"),
]


def test_a_folder_of_good_images_holds_no_others(tmp_path: Path) -> None:
    for number, (names, inner, other) in enumerate(NOT_ONLY_GOOD):
        root = tmp_path / str(number)
        touch(root, *names)
        with pytest.raises(DataError, match=r"rename that folder .*format=good_defect") as caught:
            open_dataset("folder", root / inner)
        assert f"the images in {root / other} would be taken as good" in str(caught.value)


def test_good_folders_may_have_other_names(tmp_path: Path) -> None:
    for names in (
        ("line_3/2.png", "camera left/3.png", "lot 7/2024-05-01/1.png", "7.png"),
        ("no_defects/1.png", "defect-free/4.png", "good/5.txt", "OK/cam1/6.png", "good_2/7.png"),
    ):
        root = tmp_path / "defect" / names[0] / "false_ok"  # nor does a product's name count
        touch(root, *names)
        images = [name for name in names if name.endswith(".png")]
        assert len(open_dataset("folder", root).train) == len(images)


# Formats, places in a folder with these files, and what is said of each.
FILES = ("disc/train/good/1.png", "disc/train/good/reject/2.png", "bad/good/1.png", "none/a.txt")
REFUSED = (
    ("mvtec good_defect", "disc", r"train/good/reject.* move them elsewhere"),
    ("mvtec folder good_defect visa", "none", "no (training )?images in|can't be read"),
    ("mvtec", None, r"data\.root isn't set"),
    ("mvtec folder visa", "nowhere", "nowhere doesn't exist"),
    ("mvtec", "disk", r"disk doesn't exist \(did you mean 'disc'\?\)\. Get"),
    ("mvtec", "", "no training images"),
    ("mvtec folder csv visa", "x" * 300, "File name too long"),
    ("mvtec_ad", "disc", r"did you mean .*'mvtec'"),
    ("csv", "disc", "names the list"),
    ("csv", "none.csv", r"none.csv can't be read \(No such file or directory\)"),
    ("csv", "zip.csv", "line 2 holds a null character: it isn't text in UTF-8"),
)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, *FILES)
    (tmp_path / "zip.csv").write_bytes(b"path\nK\x81\x00hler.png\n")
    for layouts, place, says in REFUSED:
        for layout in layouts.split():
            with pytest.raises(DataError, match=says):
                open_dataset(layout, None if place is None else tmp_path, place)
    with pytest.raises(DataError, match=r"zip\.csv is a file.* --set data.format=csv"):
        open_dataset("folder", tmp_path / "zip.csv")


def test_ground_truth_is_what_a_mask_or_several_mark(tmp_path: Path) -> None:
    grey = np.array([[0, 1, 127, 128, 255], [0, 0, 0, 0, 0]], np.uint8)
    masks = tmp_path / "masks"
    masks.mkdir()
    sample = Sample(tmp_path / "i.png", "i.png", "spot", masks)
    with pytest.raises(DataError, match="holds no masks"):
        ground_truth(sample, (2, 5))
    for name, mask in (("1.png", grey), ("2.png", grey[::-1])):
        cv2.imwrite(str(masks / name), mask)
    np.testing.assert_array_equal(ground_truth(sample, (2, 5)), (grey > 0) | (grey[::-1] > 0))
    one = replace(sample, mask_path=masks / "1.png")
    np.testing.assert_array_equal(ground_truth(one, (2, 5)), grey > 0)
    with pytest.raises(DataError, match=r"1\.png is 5×2 pixels, but its image .*i\.png is 5×3"):
        ground_truth(one, (3, 5))
    assert not ground_truth(replace(sample, mask_path=None), (3, 5)).any()
    with pytest.raises(ImageError, match=r"none\.png"):
        ground_truth(replace(sample, mask_path=tmp_path / "none.png"), (2, 5))


def test_names_that_are_too_long_or_may_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, long = tmp_path / "disc", "x" * 250 + ".png"  # with _mask.png no name any more
    touch(
        product, "train/good/0.png", f"test/cut/{long}", "test/cut/1.png", "ground_truth/cut/1.png"
    )
    masks = {s.path.name: s.mask_path for s in open_dataset("mvtec", product).test}
    assert masks == {long: None, "1.png": product / "ground_truth/cut/1.png"}

    def closed(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(DataError, match=r"disc can't be looked at \(Permission denied\)"):
        open_dataset("mvtec", product)


def test_masks_have_any_suffix_and_capitals(tmp_path: Path) -> None:
    names = ["a.PNG", "b.jpg", "c.jpeg", "d.TIF", "e.BMP", "f.png"]
    masks = ["a.png", "b.jpg", "c.JPEG", "d_mask.tiff", "E.bmp", "f.bmp"]
    touch(tmp_path, "good/1.png", "good/2.png", *(f"defect/{n}" for n in names))
    touch(tmp_path, *(f"masks/{n}" for n in masks))
    defects = [s for s in open_dataset("good_defect", tmp_path).test if s.is_defect]
    found = {s.path.name: s.mask_path and s.mask_path.name for s in defects}
    assert found == dict(zip(names, masks, strict=True))


def test_one_mask_is_not_two_images(tmp_path: Path) -> None:
    touch(tmp_path, *(f"good/{i}.png" for i in range(3)))
    touch(tmp_path, "defect/1.png", "defect/1.jpg", "masks/1.png")
    with pytest.raises(DataError, match=r"mask of both .*defect/1\.jpg and .*defect/1\.png"):
        open_dataset("good_defect", tmp_path)


def test_labels_in_any_spelling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = ["i.O.", "0.0", "合格"], ["n.i.O.", "1", "1.0", "不合格", "contour 3"]
    rows = [f"{i}.png,{label}" for i, label in enumerate([*good * 2, *bad])]
    with caplog.at_level("INFO"):
        dataset = open_dataset("csv", _list(tmp_path, "\n".join(["path,label", *rows])))
    assert [s.path.stem for s in dataset.test if s.is_defect] == ["10", "6", "7", "8", "9"]
    assert "these labels count as kinds of defect: contour 3" in caplog.text
