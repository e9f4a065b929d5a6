"""Layouts as samples: each published one, and one's own."""

from pathlib import Path
from typing import get_args

import cv2
import numpy as np
import pytest
from conftest import write_part, write_product

from anomaly.config.schema import DataConfig
from anomaly.datasets import (
    FORMATS,
    Dataset,
    Sample,
    ground_truth,
    open_dataset,
    open_test_images,
)
from anomaly.errors import DataError, ImageError


def _touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def _seen(samples: tuple[Sample, ...], root: Path) -> list[tuple[str, str, str | None]]:
    return [
        (
            s.path.relative_to(root).as_posix(),
            s.defect_type,
            s.mask_path and s.mask_path.relative_to(root).as_posix(),
        )
        for s in samples
    ]


def test_the_config_knows_every_format() -> None:
    assert set(get_args(DataConfig.model_fields["format"].annotation)) == set(FORMATS)


def test_mvtec_layout(tmp_path: Path) -> None:
    folder = write_product(tmp_path / "disc")
    write_part(folder / "test" / "unmasked" / "000.png", seed=1)
    for dataset in (open_dataset("mvtec", tmp_path, "disc"), open_dataset("mvtec", folder, None)):
        assert dataset.folder == folder
        assert [s.name for s in dataset.train] == [f"train/good/{i:03}.png" for i in range(12)]
        kinds = [(s.name, s.defect_type, s.mask_path is not None) for s in dataset.test]
        assert kinds == [
            *[(f"test/good/{i:03}.png", "good", False) for i in range(3)],
            *[(f"test/spot/{i:03}.png", "spot", True) for i in range(3)],
            ("test/unmasked/000.png", "unmasked", False),
        ]
        assert [s.is_defect for s in dataset.test] == [False] * 3 + [True] * 4


def test_mvtec_ad_2(tmp_path: Path) -> None:
    _touch(
        tmp_path / "can",
        "train/good/000_regular.png",
        "validation/good/000_regular.png",
        "test_public/good/000_overexposed.png",
        "test_public/bad/000_regular.png",
        "test_public/ground_truth/bad/000_regular_mask.png",
        "test_private/000.png",
        "test_private_mixed/000_mixed.png",
    )
    dataset = open_dataset("mvtec_ad_2", tmp_path, "can")
    root = tmp_path / "can"
    assert _seen(dataset.train, root) == [("train/good/000_regular.png", "good", None)]
    assert _seen(dataset.validation, root) == [("validation/good/000_regular.png", "good", None)]
    mask = "test_public/ground_truth/bad/000_regular_mask.png"
    assert _seen(dataset.test, root) == [
        ("test_public/bad/000_regular.png", "bad", mask),
        ("test_public/good/000_overexposed.png", "good", None),
    ]


def test_mvtec_loco_has_several_masks_an_image(tmp_path: Path) -> None:
    root = tmp_path / "pushpins"
    _touch(root, "train/good/000.png", "validation/good/000.png", "test/good/000.png")
    write_part(root / "test" / "logical_anomalies" / "000.png", seed=0)
    masks = root / "ground_truth" / "logical_anomalies" / "000"
    masks.mkdir(parents=True)
    for i in range(2):
        mask = np.zeros((96, 120), np.uint8)
        mask[10 * i : 10 * i + 5, 20:30] = (1, 255)[i]
        cv2.imwrite(str(masks / f"{i:03}.png"), mask)
    dataset = open_dataset("mvtec_loco", tmp_path, "pushpins")
    assert [s.name for s in dataset.validation] == ["validation/good/000.png"]
    good, bad = dataset.test
    assert (good.is_defect, bad.mask_path) == (False, masks)
    expected = np.zeros((96, 120), bool)
    expected[0:5, 20:30] = expected[10:15, 20:30] = True
    np.testing.assert_array_equal(ground_truth(bad, (96, 120)), expected)
    for file in masks.iterdir():
        file.unlink()
    with pytest.raises(DataError, match="holds no masks"):
        ground_truth(bad, (96, 120))


def test_btad(tmp_path: Path) -> None:
    _touch(
        tmp_path / "01",
        "train/ok/0000.bmp",
        "test/ok/0000.bmp",
        "test/ko/0000.bmp",
        "test/ko/0001.bmp",
        "ground_truth/ko/0000.png",
        "ground_truth/ko/0001.bmp",
    )
    dataset = open_dataset("btad", tmp_path, "01")
    root = tmp_path / "01"
    assert _seen(dataset.train, root) == [("train/ok/0000.bmp", "good", None)]
    assert _seen(dataset.test, root) == [
        ("test/ko/0000.bmp", "ko", "ground_truth/ko/0000.png"),
        ("test/ko/0001.bmp", "ko", "ground_truth/ko/0001.bmp"),
        ("test/ok/0000.bmp", "good", None),
    ]


def test_visa(tmp_path: Path) -> None:
    lines = [
        "object,split,label,image,mask",
        "candle,train,normal,candle/Data/Images/Normal/0836.JPG,",
        "candle,test,normal,candle/Data/Images/Normal/0001.JPG,",
        "candle,test,anomaly,candle/Data/Images/Anomaly/000.JPG,candle/Data/Masks/Anomaly/000.png",
        "capsules,train,normal,capsules/Data/Images/Normal/000.JPG,",
    ]
    (tmp_path / "split_csv").mkdir()
    (tmp_path / "split_csv" / "1cls.csv").write_text("\n".join(lines))
    (tmp_path / "candle").mkdir()
    (tmp_path / "candel").mkdir()
    for dataset in (
        open_dataset("visa", tmp_path, "candle"),
        open_dataset("visa", tmp_path / "candle", None),
    ):
        train = [("candle/Data/Images/Normal/0836.JPG", "good", None)]
        assert _seen(dataset.train, tmp_path) == train
        mask = "candle/Data/Masks/Anomaly/000.png"
        assert _seen(dataset.test, tmp_path) == [
            ("candle/Data/Images/Normal/0001.JPG", "good", None),
            ("candle/Data/Images/Anomaly/000.JPG", "anomaly", mask),
        ]
    with pytest.raises(DataError, match="did you mean 'candle'"):
        open_dataset("visa", tmp_path, "candel")


def test_a_folder_of_good_images(tmp_path: Path) -> None:
    for name in ("b/2.png", "a/1.png", "3.bmp"):
        write_part(tmp_path / name, seed=0)
    (tmp_path / "notes.txt").write_text("no image")
    dataset = open_dataset("folder", tmp_path, None)
    assert [s.name for s in dataset.train] == ["3.bmp", "a/1.png", "b/2.png"]
    assert dataset.test == ()


def test_good_and_defect_folders(tmp_path: Path) -> None:
    good = [f"good/{i:02}.png" for i in range(20)]
    _touch(tmp_path, *good, "defect/a.jpg", "defect/scratch/b.jpg", "masks/scratch/b.png")
    dataset = open_dataset("good_defect", tmp_path, None)
    assert len(dataset.train) == 16
    assert sorted(s.name for s in (*dataset.train, *dataset.test) if not s.is_defect) == good
    assert _seen(dataset.test, tmp_path)[4:] == [
        ("defect/a.jpg", "defect", None),
        ("defect/scratch/b.jpg", "scratch", "masks/scratch/b.png"),
    ]
    # Which good images are tested with hangs on names: more images move hardly any.
    _touch(tmp_path, *(f"good/more{i:02}.png" for i in range(5)))
    later = open_dataset("good_defect", tmp_path, None)
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
        "b/4.png,scratch,m/4.png,test,part 7,\n"
    )
    file = _list(tmp_path, text.replace('b/"3".png', '"b/3, big.png"'))
    for dataset in (
        open_dataset("csv", file, None),
        open_dataset("csv", tmp_path, "list.csv"),
    ):
        assert _seen(dataset.train, tmp_path) == [("a/1.png", "good", None)]
        assert _seen(dataset.validation, tmp_path) == [("a/2.png", "good", None)]
        assert _seen(dataset.test, tmp_path) == [
            ("b/3, big.png", "good", None),
            ("b/4.png", "scratch", "m/4.png"),
        ]
        assert [s.group for s in dataset.test] == ["part 7", "part 7"]
        assert dataset.train[0].group is None


def test_the_order_of_a_list_changes_nothing(tmp_path: Path) -> None:
    rows = [f"{i}/{letter}.png,{'good' if i else 'dent'}" for i in range(4) for letter in "bac"]
    found = []
    for lines in (rows, rows[::-1], rows[5:] + rows[:5]):
        dataset = open_dataset("csv", _list(tmp_path, "\n".join(["path,label", *lines])), None)
        found.append((dataset.train, dataset.test))
    assert found[0] == found[1] == found[2]


def test_a_csv_list_without_splits_keeps_the_views_of_a_part_together(tmp_path: Path) -> None:
    rows = [f"{i}.png,0,{i // 2}" for i in range(40)] + ["d.png,1,x"]
    dataset = open_dataset("csv", _list(tmp_path, "\n".join(["path,label,group", *rows])), None)
    assert (len(dataset.train), len(dataset.test)) == (32, 9)
    assert dataset.test[-1].defect_type == "defect"
    assert not {s.group for s in dataset.train} & {s.group for s in dataset.test}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lacks the column 'path'"),
        ("file,label\na.png,good\n", "lacks the column 'path'"),
        ("path,lable\na.png,good\n", "'lable' isn't known; did you mean 'label'"),
        ("path,split\na.png,tset\n", "line 2: unknown split 'tset'; did you mean 'test'"),
        ("path\na.png\na.png\n", r"line 3 repeats a\.png of line 2"),
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
        ("path,ok\na.png,1\nb.png,0\n", r"line 2: there is no column label, but ok \('1'\)"),
        ("path,class\na.png,-\nb.png,NG\n", r"line 3: .* class \('NG'\).* rename that column"),
        ("path\nOK_1.png\nnIO_2.png\n", r"the names of 1 of 2 files say defective \(nIO_2"),
    ],
)
def test_mistakes_in_a_list_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        open_dataset("csv", _list(tmp_path, text), None)


def test_a_list_with_windows_paths(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("1.png", "m.png"):
        (tmp_path / "parts" / name).write_bytes(b"")
    text = "path,label,mask\nparts\\1.png,scratch,parts\\m.png\nparts/2.png,good,\n"
    data = open_dataset("csv", _list(tmp_path, text), None)
    (part,) = data.test
    assert (part.name, part.mask_path) == ("parts/1.png", tmp_path / "parts" / "m.png")
    with pytest.raises(DataError, match=r"line 3 repeats parts/1\.png of line 2"):
        open_dataset("csv", _list(tmp_path, "path\nparts/1.png\nparts\\1.png\n"), None)


def test_lists_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names the list"):
        open_dataset("csv", tmp_path, None)
    with pytest.raises(DataError, match="there is no list"):
        open_dataset("csv", tmp_path / "none.csv", None)
    (tmp_path / "zip.csv").write_bytes(b"path\nK\x81\x00hler.png\n")
    with pytest.raises(DataError, match="line 2 holds a null character: it isn't text in UTF-8"):
        open_dataset("csv", tmp_path / "zip.csv", None)
    with pytest.raises(DataError, match=r"zip\.csv is a file.* --set data.format=csv"):
        open_dataset("folder", tmp_path / "zip.csv", None)


@pytest.mark.parametrize(
    ("encoding", "delimiter"),
    [("utf-8-sig", ";"), ("cp1252", ";"), ("utf-16", "\t"), ("utf-8", ","), ("utf-16", ";")],
)
def test_lists_as_spreadsheets_save_them(tmp_path: Path, encoding: str, delimiter: str) -> None:
    rows = [["path", "label", "split"], ["Kühler, neu.png", "0", "train"], ["b.png", "Riß", "test"]]
    lines = [delimiter.join(f'"{c}"' if delimiter in c else c for c in row) for row in rows]
    file = tmp_path / "list.csv"
    file.write_bytes("\r\n".join([*lines, ""]).encode(encoding))
    dataset = open_dataset("csv", file, None)
    assert [s.name for s in dataset.train] == ["Kühler, neu.png"]
    assert [(s.name, s.defect_type) for s in dataset.test] == [("b.png", "Riß")]


@pytest.mark.parametrize("encoding", ["gb18030", "cp932", "big5", "utf-16"])
def test_lists_of_asian_spreadsheets(tmp_path: Path, encoding: str) -> None:
    names = ["表面 1.png", "表面 2.png", "表面 3.png"]
    rows = [["path", "label"], [names[0], "良品"], [names[1], "良品"], [names[2], "不良"], [""] * 2]
    file = tmp_path / "list.csv"
    file.write_bytes("\r\n".join(["sep=;", *map(";".join, rows)]).encode(encoding))
    if encoding != "utf-16":  # another code page would fit as well as this one
        label = "\r\n".join(["path;label", "a.png;good", "b.png;斑"]).encode(encoding)
        (tmp_path / "labels.csv").write_bytes(label)
        with pytest.raises(
            DataError, match=r"labels\.csv isn't UTF-8, .*; see that they exist, and"
        ):
            open_dataset("csv", tmp_path / "labels.csv", None)
    for name in names:
        (tmp_path / name).touch()
    dataset = open_dataset("csv", file, None)
    assert [s.name for s in dataset.train] == names[:2]
    assert [(s.name, s.defect_type) for s in dataset.test] == [(names[2], "不良")]
    file.write_bytes("path;remark\r\na.png;表\r\n".encode(encoding))  # which nothing hangs on
    assert [s.name for s in open_dataset("csv", file, None).train] == ["a.png"]


GOOD_AND_DEFECT = ("good/1.png", "defect/crack/2.png")
MVTEC = ("b/train/good/1.png", "b/test/good/1.png", "b/ground_truth/crack/1_mask.png")
VISA = ("split_csv/1cls.csv", "candle/Images/Anomaly/1.JPG", "candle/Images/Normal/1.JPG")


@pytest.mark.parametrize(
    ("names", "root", "says"),
    [
        (GOOD_AND_DEFECT, "", "--set data.format=good_defect --set data.root={root}, "),
        (GOOD_AND_DEFECT, "defect", "--set data.format=good_defect --set data.root={root}, "),
        (GOOD_AND_DEFECT, "", "or --set data.root={root}/good for"),
        (MVTEC, "", "--set data.format=mvtec --set data.root={root}/b, "),
        (MVTEC, "b", "--set data.format=mvtec --set data.root={root}/b, "),
        (MVTEC, "b/test", "--set data.root={root}/b/train/good "),
        (MVTEC, "b/ground_truth", "--set data.format=mvtec --set data.root={root}/b, "),
        (("train/ok/1.png", "test/ok/1.png", "test/ko/2.png"), "", "data.format=btad"),
        (("train/good/1.png", "test_public/bad/1.png"), "", "data.format=mvtec_ad_2"),
        (VISA, "candle", "--set data.format=visa --set data.root={root}/candle, "),
        (("OK/1.png", "NG/2.png"), "", "--set data.root={root}/OK "),
        (("good/1.png", "scratch/2.png"), "", "data.format=good_defect --set data.root={root}, "),
        (("good/1.png", "contest/2.png"), "", "folders named as good it may hold other images"),
        (("a/good/1.png", "b/2.png"), "", "/b would be taken as good"),
        (("a/good/1.png", "a/2.png"), "", "/a would be taken as good"),
        (("monday/Bad Parts/1.png", "2.png"), "", "--set data.format=good_defect"),
        *(
            (("1.png", f"a/{name}/2.png"), "", f"/a/{name} would be taken as good")
            for name in ("Defects", "BAD", "ko", "nok", "Reject", "test", "Ground_Truth", "masks")
        ),
        *(
            (("1.png", f"{name}/2.png"), "", f"/{name} would be taken as good")
            for name in ("anomaly", "anomalous", "not-ok", "no_good", "GroundTruth", "NG2", "mask")
        ),
    ],
)  # fmt: skip
def test_a_folder_of_good_images_holds_no_others(
    tmp_path: Path, names: tuple[str, ...], root: str, says: str
) -> None:
    _touch(tmp_path, *names)
    with pytest.raises(DataError, match="rename that folder") as caught:
        open_dataset("folder", tmp_path / root, None)
    assert says.format(root=tmp_path) in str(caught.value)


def test_good_folders_may_have_other_names(tmp_path: Path) -> None:
    for names in (
        ("test_line_3/2.png", "contest/3.png", "lot 7/2024-05-01/1.png", "7.png"),
        ("no_defects/1.png", "defect-free/4.png", "good/5.txt", "OK/cam1/6.png", "good_2/7.png"),
    ):
        root = tmp_path / "defect" / names[0]
        _touch(root, *names)
        images = [name for name in names if name.endswith(".png")]
        assert len(open_dataset("folder", root, None).train) == len(images)


def test_defects_inside_a_layouts_good_images_are_refused_too(tmp_path: Path) -> None:
    _touch(tmp_path, "train/good/1.png", "train/good/reject/2.png", "good/1.png", "good/bad/1.png")
    with pytest.raises(DataError, match=r"train/good/reject .*move them elsewhere"):
        open_dataset("mvtec", tmp_path, None)
    with pytest.raises(DataError, match=r"good/bad.* move them elsewhere"):
        open_dataset("good_defect", tmp_path, None)


@pytest.mark.parametrize("layout", sorted(set(FORMATS) - {"csv"}))
def test_a_folder_without_training_images(tmp_path: Path, layout: str) -> None:
    with pytest.raises(DataError):
        open_dataset(layout, tmp_path, None)


@pytest.mark.parametrize(
    ("root", "category", "says"),
    [
        (None, None, "data.root isn't set"),
        ("nowhere", None, "doesn't exist"),
        ("here", "disk", "did you mean 'disc'"),
        ("here", None, "no training images"),
    ],
)
def test_missing_folders(tmp_path: Path, root: str | None, category: str | None, says: str) -> None:
    write_product(tmp_path / "here" / "disc")
    with pytest.raises(DataError, match=says):
        open_dataset("mvtec", None if root is None else tmp_path / root, category)


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"did you mean .*'mvtec_loco'"):
        open_dataset("loco", tmp_path, None)


def test_ground_truth_of_grey_masks(tmp_path: Path) -> None:
    mask = np.array([[0, 1, 127, 128, 255]] * 2, np.uint8)
    cv2.imwrite(str(tmp_path / "m.png"), mask)
    sample = Sample(tmp_path / "i.png", "i.png", "spot", tmp_path / "m.png")
    np.testing.assert_array_equal(ground_truth(sample, (2, 5)), mask > 0)
    np.testing.assert_array_equal(ground_truth(sample, (2, 5), above=127), mask > 127)
    with pytest.raises(DataError, match=r"m\.png is 5×2 pixels, but its image .*i\.png is 5×3"):
        ground_truth(sample, (3, 5))
    assert not ground_truth(Sample(tmp_path / "i.png", "i.png"), (3, 5)).any()
    missing = Sample(tmp_path / "i.png", "i.png", "spot", tmp_path / "none.png")
    with pytest.raises(ImageError, match=r"none\.png"):
        ground_truth(missing, (2, 5))


def test_splits_by_name(tmp_path: Path) -> None:
    sample = Sample(tmp_path, "x")
    assert Dataset(tmp_path, (sample,), ()).splits == {
        "train": (sample,), "validation": (), "test": (),
    }  # fmt: skip


def test_names_that_are_too_long_or_may_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = write_product(tmp_path / "disc", n_train=2)
    long = product / "test" / "spot" / ("x" * 250 + ".png")  # with _mask.png no name any more
    (product / "test" / "spot" / "000.png").rename(long)
    masks = {s.path.name: s.mask_path for s in open_dataset("mvtec", product, None).test}
    assert masks[long.name] is None
    assert masks["001.png"] is not None
    for layout in ("mvtec", "folder", "csv", "visa"):
        with pytest.raises(DataError, match="File name too long"):
            open_dataset(layout, tmp_path, "x" * 300)

    def closed(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(DataError, match=r"disc can't be looked at \(Permission denied\)"):
        open_dataset("mvtec", product, None)


def test_masks_have_any_suffix_and_capitals(tmp_path: Path) -> None:
    names = ["a.PNG", "b.jpg", "c.jpeg", "d.TIF", "e.BMP", "f.png"]
    masks = ["a.png", "b.jpg", "c.JPEG", "d_mask.tiff", "E.bmp", "f.bmp"]
    _touch(tmp_path, *(f"bad/{n}" for n in names), *(f"masks/{n}" for n in masks))
    samples = open_test_images([], [tmp_path / "bad"], tmp_path / "masks")
    found = {s.path.name: s.mask_path and s.mask_path.name for s in samples}
    assert found == dict(zip(names, masks, strict=True))


def test_one_mask_is_not_two_images(tmp_path: Path) -> None:
    _touch(tmp_path, "cut/1.png", "hole/1.png", "masks/1.png")
    with pytest.raises(DataError, match=r"mask of both .*cut/1\.png and .*hole/1\.png"):
        open_test_images([], [tmp_path / "cut", tmp_path / "hole"], tmp_path / "masks")


def test_all_views_of_a_part_with_a_defect_are_tested_with(tmp_path: Path) -> None:
    rows = [
        (f"{part}_{view}.png", "scratch" if part < 4 and view == "back" else "good", part)
        for part in range(10)
        for view in ("front", "back")
    ]
    lines = ["path,label,group", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    dataset = open_dataset("csv", tmp_path / "list.csv", None)
    assert not {s.group for s in dataset.train} & {s.group for s in dataset.test}
    assert {"0", "1", "2", "3"} <= {s.group for s in dataset.test}


def test_a_list_whose_labels_may_have_another_name_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "list.csv").write_text("path,class\na.png,3\nb.png,4\n")
    open_dataset("csv", tmp_path / "list.csv", None)
    assert "has no column `label`, so all its images count as good; if class" in caplog.text
    (tmp_path / "list.csv").write_text("path,label\na.png,pass\nb.png,broken\n")
    assert [s.path.name for s in open_dataset("csv", tmp_path / "list.csv", None).train] == [
        "a.png"
    ]


def test_labels_in_any_spelling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = ["i.O.", "0.0", "Gutteil", "合格"]
    bad = ["n.i.O.", "1", "1.0", "不合格", "wrong length", "contour 3"]
    rows = [f"{i}.png,{label}" for i, label in enumerate([*good * 2, *bad])]
    with caplog.at_level("INFO"):
        dataset = open_dataset("csv", _list(tmp_path, "\n".join(["path,label", *rows])), None)
    assert {s.path.stem for s in dataset.test if s.is_defect} == {"8", "9", "10", "11", "12", "13"}
    assert "these labels count as kinds of defect: contour 3" in caplog.text
