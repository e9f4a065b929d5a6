"""What a folder is taken for, by its layout; and the settings that suit what lies there."""

import os
from collections import Counter
from pathlib import Path

import pytest
from kit import touch

from anomaly.datasets.layouts import open_dataset, recognise
from anomaly.desk.check import DataReport, SplitSummary, setting_hints
from anomaly.errors import DataError
from anomaly.files.writing import write


def _images(root: Path, folders: list[str]) -> Path:
    touch(root, *(f"{folder}/{i}.png" for folder in folders for i in range(6)))
    return root


OWN_NAMES: list[tuple[list[str], str, set[str]]] = [
    (["OK", "NG"], "OK", {"NG"}),
    (["gute Teile", "Risse"], "gute Teile", {"Risse"}),
    (["good", "scratch", "dent"], "good", {"scratch", "dent"}),
    (["ok_parts", "bad/crack", "bad/dent", "masks"], "ok_parts", {"crack", "dent"}),
    (["good", "ng/0", "ng/1"], "good", {"0", "1"}),
    (["ok", "defect", "ng"], "ok", {"defect", "ng"}),
    (["ok", "ng/hole", "wrong_length"], "ok", {"hole", "wrong_length"}),
    (["lot 1/IO", "lot 1/nIO", "lot 2/IO"], "IO", {"nIO"}),
    (["training/good", "testing/good", "testing/defect"], "good", {"defect"}),
    (["Trainingsdaten/Gutteile", "Testdaten/Gutteile", "Testdaten/Risse"], "Gutteile", {"Risse"}),
    (["训练/良品", "测试/良品", "测试/不良品"], "良品", {"不良品"}),
    (["train/ok_front", "train/def_front", "test/ok_front"], "ok_front", {"def_front"}),
    (["train/IO", "train/nIO/7", "test/IO", "test/nIO", "valid/IO"], "IO", {"nIO", "7"}),
]


def test_names_of_ones_own(tmp_path: Path) -> None:
    for number, (folders, good, kinds) in enumerate(OWN_NAMES):
        root = _images(tmp_path / str(number), folders)
        found = recognise(root)
        assert (found.layout, found.root, found.listing) == ("good_defect", root, "")
        dataset = open_dataset(found.layout, root)
        assert {sample.path.parent.name for sample in dataset.train} == {good}
        if any(len(Path(name).parts) > 1 and good in name for name in folders):  # in their split
            tops = {s.path.relative_to(root).parts[0] for s in dataset.train}
            assert len(tops) == 1 or all(top.startswith("lot") for top in tops)
        assert {sample.defect_type for sample in dataset.test if sample.is_defect} == kinds


def test_masks_are_no_parts_wherever_they_lie(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patterns = ("defect/{}_label.bmp", "labels/{}.png", "defect/mask_{}.png")
    for number, masks in enumerate(patterns):
        root = _images(tmp_path / str(number), ["good", "defect"])
        touch(root, *(name.format(i) for name in (masks, "good/{}_mask.png") for i in range(6)))
        found = recognise(root)
        dataset = open_dataset(found.layout, root)
        assert {(s.path, s.mask_path) for s in dataset.test if s.is_defect} == {
            (root / "defect" / f"{i}.png", root / masks.format(i)) for i in range(6)
        }
        assert len([*dataset.train, *dataset.test]) == 12
        assert len(open_dataset("folder", root / "good").train) == 6
    assert "skipped 6 masks that lie beside their images" in caplog.text


def test_names_of_some_files_that_contradict_their_folder_are_refused(tmp_path: Path) -> None:
    for folder, name in (("good", "hole_{}.png"), ("good", "NOK{}.png"), ("NG", "OK_{}.png")):
        root = _images(tmp_path / name, ["good", "NG"])
        touch(root / folder, *map(name.format, range(3)))
        contrary = "defective" if folder == "good" else "good"
        with pytest.raises(DataError, match=rf"the names of 3 of 9 files say {contrary} \("):
            open_dataset("good_defect", root)


def test_masks_are_found_from_the_folder_around_them(tmp_path: Path) -> None:
    splits = [f"{s}/{k}" for s in ("train", "test") for k in ("normal", "anomaly", "masks")]
    for old, new, folders, count in (
        ("NG", "Masks", ["OK", "NG/cut", "Masks/cut"], 6),
        ("anomaly", "masks", splits, 12),
    ):
        root = _images(tmp_path / old, folders)
        defects = [s for s in open_dataset(recognise(root).layout, root).test if s.is_defect]
        assert len(defects) == count
        assert all(s.mask_path == root / s.name.replace(old, new) for s in defects)


def test_names_that_are_no_text_stay_in_the_list(tmp_path: Path) -> None:
    root = _images(tmp_path / "part", ["OK", "NG", "July"])
    name = os.fsdecode(b"K\xfchler.png")  # Windows-1252
    try:
        (root / "OK" / name).write_bytes(b"")
    except OSError:
        pytest.skip("names are text here")
    found = recognise(root, ask=lambda question: "good")
    write(tmp_path / "images.csv", found.listing)
    train = open_dataset("csv", tmp_path / "images.csv")
    samples = [*train.train, *train.test]
    assert all(sample.path.exists() for sample in samples)
    assert name in {sample.path.name for sample in samples}


def test_folders_without_images_hold_no_defects(tmp_path: Path) -> None:
    """Runs, as `start .` makes them, and notes."""
    for others, layout, inner in (([], "folder", "OK"), (["NG"], "good_defect", "")):
        root = _images(tmp_path / layout, ["OK", *others])
        (root / "runs" / "part").mkdir(parents=True)
        found = recognise(root)
        assert (found.layout, found.root) == (layout, root / inner)
        assert found.reason == "good images in OK" + (", others in NG" if others else "")


def test_a_part_of_a_data_set_is_not_taken_for_good_images(tmp_path: Path) -> None:
    root = _images(tmp_path / "part", ["train/good", "test/good", "test/bent"])
    for part in ("test", "test/bent"):
        with pytest.raises(DataError, match=f"is a part of {root}, which looks like a data set"):
            recognise(root / part)
        assert recognise(root / part, "folder").root == root / part
    for part in ("train", "train/good"):
        assert recognise(root / part).layout == "folder"


def test_lists_are_recognised(tmp_path: Path) -> None:
    listing = tmp_path / "part" / "list.csv"
    touch(tmp_path, "a.txt", "part/list.csv")
    for place in (listing, listing.parent):
        assert (recognise(place).layout, recognise(place).root) == ("csv", listing)
    touch(tmp_path, "part/another.csv")
    for place, says in (
        (listing.parent, r"but lists: give one of them, e\.g\. .*another\.csv"),
        (tmp_path / "nothing", "doesn't exist"),
        (tmp_path / "a.txt", "is a file; give the folder"),
    ):
        with pytest.raises(DataError, match=says):
            recognise(place)


UNTOLD: list[tuple[list[str], str]] = [
    ([], "no images in"),
    (["bottle/train/good", "cable/train/good"], "several data sets: bottle, cable"),
    (["defect", "photos"], "don't say whether .* photos"),
    (["defect"], "no training images in"),
    (["Juni", "Mai"], r"Juni would be taken as good, .* but that folder's name doesn't say so"),
    (["Juni", "Risse"], "don't say whether .* Juni"),
    (["good", "Juni"], r"don't say whether .* Juni\. Rename them \(`good …`, `defect …`\)"),
    (["good", "0", "1"], r"don't say whether .* 0, 1\. "),
    ([".", "good"], r"don't say whether images are good or defective: the images outside"),
    (["ok", "ng/good", "ng/hole"], "don't say whether .* ng/good"),
    (["good/scratch", "good"], "don't say whether .* good/scratch"),
    (["false_ok", "photos"], "don't say whether .* false_ok, photos"),
    (["good", "good_scratch", "NG"], "don't say whether .* good_scratch"),
    (["good", "defect", "Juni"], "don't say whether .* Juni"),
    ([".", "scratch"], "don't say whether .* the images outside of folders"),
]


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    for number, (folders, message) in enumerate(UNTOLD):
        root = tmp_path / str(number) / "part"
        root.mkdir(parents=True)
        with pytest.raises(DataError, match=message):
            open_dataset(recognise(_images(root, folders)).layout, root)


def _report(
    size: str, images: int = 200, mode: str = "rgb8", bits: int | None = None
) -> DataReport:
    counts = Counter({size: images}), Counter({mode: images})
    split = SplitSummary(images, 0, images, *counts)
    return DataReport({"train": split}, (), bits)


def test_settings_that_suit() -> None:
    usual, deep = {"model.coreset_ratio": 0.02}, _report("900×900", mode="grey16", bits=12)
    for report, settings, word in (
        (_report("900×900"), usual, "keeping 2 %"),
        (_report("900×900", images=4), {"model.coreset_ratio": 1.0}, "very few"),
        (_report("900×900", images=12), {"model.coreset_ratio": 0.1}, "learn from (12)"),
        (_report("4096×3000"), usual | {"image.tile": 1024}, "12 times"),
        (_report("8000×100"), usual | {"image.tile": 100}, "strips"),
        (_report("9×700"), usual | {"image.tile": 64}, "strips"),
        (deep, usual | {"image.bit_depth": 12}, "12 bits"),
    ):
        given = list(setting_hints(report))
        assert {one.key: one.value for one in given} == settings
        assert any(word in one.reason for one in given)
