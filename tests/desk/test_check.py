"""Every fault planted in a broken data set is found, and nothing else.

What check refuses, train and evaluate refuse with the same sentence.
"""

import io
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Says, write_part, write_product
from kit import tiny, touch
from PIL import Image as Pillow

import anomaly
from anomaly.datasets.inputs import listing_of
from anomaly.datasets.layouts import open_dataset
from anomaly.datasets.samples import Dataset, Sample, frames
from anomaly.desk import check as data_check
from anomaly.desk.check import DataReport, Fault, Reading, Severity, check
from anomaly.errors import DataError
from anomaly.evaluation.evaluate import score_test_split
from anomaly.files.writing import write
from anomaly.imaging.loading import look_of
from anomaly.imaging.read import Decoding, Image, read_image
from anomaly.storage.models import load_model


def _arguments(folder: Path, *settings: str) -> list[object]:
    arguments: list[object] = ["--config", REPOSITORY / "configs" / "folder.yaml"]
    for setting in ("data.format=mvtec", f"data.root={folder}", *settings):
        arguments += ["--set", setting]
    return arguments


def test_a_healthy_set_has_no_faults_and_one_image_is_too_few(tmp_path: Path, says: Says) -> None:
    folder = write_product(tmp_path / "disc", n_train=20)
    out = says(0, "check", _arguments(folder))
    assert "20 good, 0 defective" in out
    assert "3 good, 3 defective" in out
    assert "all 120×96; all rgb8" in out
    assert "no faults" in out
    train = sorted((folder / "train" / "good").iterdir())
    for file in train[1:]:
        file.unlink()
    out = says(2, "check", _arguments(folder))
    assert "needs at least 2 different training images, not 1" in out


def _break(folder: Path) -> dict[tuple[str, str], str]:
    """Plant one fault of each kind; (kind, name) of each and what its message must hold."""
    train, test = folder / "train" / "good", folder / "test"
    (train / "000.png").write_bytes((train / "000.png").read_bytes()[:2000])
    (train / "002.png").write_bytes(b"GIF89a" + bytes(100))
    picture = cv2.imread(str(train / "003.png"))
    cv2.imwrite(str(test / "good" / "leaked.bmp"), picture)  # the same pixels in another file
    shutil.copy(test / "spot" / "000.png", train / "planted.png")
    shutil.copy(train / "004.png", train / "again.png")
    masks = folder / "ground_truth" / "spot"
    for i in (3, 4):
        write_part(test / "spot" / f"00{i}.png", seed=300 + i, mark=(30, 40))
    (masks / "001_mask.png").unlink()
    cv2.imwrite(str(masks / "002_mask.png"), np.zeros((96, 120), np.uint8))
    cv2.imwrite(str(masks / "003_mask.png"), np.full((100, 384), 255, np.uint8))
    (masks / "004_mask.png").write_text("not a mask")
    texts = [f"text{i}.png" for i in range(9)]
    for name in texts:
        (train / name).write_text("not an image")
    return {
        ("unreadable", "train/good/000.png"): "000.png",
        ("failed", "train/good/001.png"): "001.png: ZeroDivisionError: a mistake in a decoder",
        ("failed", "test/good/001.png"): "001.png: ZeroDivisionError: a mistake in a decoder",
        ("unsupported", "train/good/002.png"): "GIF",
        **{("unsupported", f"train/good/{name}"): "text file" for name in texts},
        ("leak", "test/good/leaked.bmp"): "003.png",
        ("two_labels", "test/spot/000.png"): "planted.png",
        ("duplicate", "train/good/again.png"): "004.png",
        ("mask_missing", "test/spot/001.png"): "no mask",
        ("mask_empty", "test/spot/002.png"): "marks no defect",
        ("mask_size", "test/spot/003.png"): "384×100",
        ("mask_unusable", "spot/004_mask.png"): "004_mask.png",
    }


def test_every_planted_fault_is_found(
    tmp_path: Path, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, *options: Any) -> Image:
        if path.name == "001.png" and path.parent.name == "good":
            raise ZeroDivisionError("a mistake in a decoder")
        return read_image(path, *options)

    folder = write_product(tmp_path / "disc", n_train=24)
    monkeypatch.setattr(data_check, "read_image", read)
    planted = _break(folder)
    report = check(open_dataset("mvtec", folder), Reading())
    assert len(report.faults) == len(planted)
    for (kind, name), text in planted.items():
        details = [fault.detail for fault in report.faults if fault.kind == kind]
        assert any(name in detail and text in detail for detail in details), (kind, name)
    assert report.splits["train"].usable == report.splits["train"].good - 12
    out = says(2, "check", _arguments(folder))
    for heading in ("would be wrong: 3", "can't be used as it is: 16", "worth knowing: 1"):
        assert heading in out
    assert out.count("unsupported:") == 10
    few = "\n".join(report.lines(5))
    assert (few.count("unsupported:"), "… and 5 more (anomaly check" in few) == (6, True)


def test_padim_wants_one_aspect(tmp_path: Path, says: Says) -> None:
    folder = write_product(tmp_path / "disc")
    for name, width in (("near", 130), ("far", 150)):
        picture = np.random.default_rng(width).integers(0, 255, (96, width, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / "test" / "good" / f"{name}.png"), picture)
    says(0, "check", _arguments(folder))
    out = says(3, "check", _arguments(folder, "model.kind=padim"))
    assert "far.png has another shape than the training images by 25%" in out
    assert "near.png" not in out


def test_twelve_bits_in_files_of_sixteen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    for i in range(20):
        picture = rng.integers(0, 4096, (40, 40), dtype=np.uint16)
        cv2.imwrite(str(tmp_path / f"{i}.png"), picture)
    dataset = open_dataset("folder", tmp_path)
    (fault,) = check(dataset, Reading()).faults
    assert (fault.kind, fault.severity) == ("bit_depth", Severity.NOTE)
    assert "image.bit_depth=12" in fault.detail
    assert not check(dataset, Reading(Decoding(bit_depth=12))).faults
    kinds = Counter(f.kind for f in check(dataset, Reading(Decoding(bit_depth=8))).faults)
    assert kinds == {"unsupported": 20, "too_few_images": 1}
    for declared in (None, 12):  # training says the same
        caplog.clear()
        settings = tiny(image={"area": 64, "bit_depth": declared})
        files = [sample.path for sample in dataset.train[:3]]
        anomaly.fit(files, settings, device="cpu", calibrate=False)
        assert (fault.detail in caplog.text) == (declared is None)


def test_where_to_look_must_fit(tmp_path: Path, says: Says) -> None:
    folder = write_product(tmp_path / "disc")
    mask = tmp_path / "mask.png"
    cv2.imwrite(str(mask), np.eye(96, 120, dtype=np.uint8))
    for name in ("train/good/small.png", "test/good/small.png"):
        picture = np.random.default_rng(len(name)).integers(0, 255, (60, 60, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / name), picture)
    out = says(3, "check", _arguments(folder, f"image.ignore={{png: {mask}}}"))
    assert out.count("unsupported:") == 2
    assert "small.png: its 60×60 pixels have another shape" in out
    assert "13 good, 0 defective; 12 of these 13 can be used" in out
    cv2.imwrite(str(mask), np.eye(100, dtype=np.uint8))
    out = says(2, "check", _arguments(folder, f"image.region={{png: {mask}}}"))
    assert "2 different training images, not 1" in out


def test_no_mask_at_all_is_worth_knowing(tmp_path: Path) -> None:
    folder = write_product(tmp_path / "disc", n_train=20)
    shutil.rmtree(folder / "ground_truth")
    (fault,) = check(open_dataset("mvtec", folder), Reading()).faults
    assert (fault.kind, fault.severity) == ("no_masks", Severity.NOTE)
    assert "none of the 3 defects has a mask" in fault.detail
    shutil.rmtree(folder / "test" / "spot")
    assert not check(open_dataset("mvtec", folder), Reading()).faults


def test_a_good_image_with_a_mask_is_wrong(tmp_path: Path) -> None:
    for i in range(21):
        write_part(tmp_path / f"{i}.png", seed=i)
    mask = np.zeros((96, 120), np.uint8)
    mask[3, 4] = 1
    cv2.imwrite(str(tmp_path / "m.png"), mask)
    train = [f"{i}.png,,,train" for i in range(20)]
    rows = ["path,label,mask,split", *train, "20.png,,m.png,test"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    dataset = open_dataset("csv", tmp_path / "list.csv")
    (fault,) = check(dataset, Reading()).faults
    assert (fault.kind, fault.severity) == ("mask_on_good", Severity.WRONG)


def _check(dataset: Dataset) -> DataReport:
    return check(dataset, Reading())


def _faults(dataset: Dataset, kind: str) -> list[Fault]:
    return [fault for fault in _check(dataset).faults if fault.kind == kind]


def _in_other_bytes(source: Path, copy: Path) -> None:
    """The same pixels, in another kind of file or in 16 bits."""
    pixels = cv2.imread(str(source))
    wide = copy.suffix == ".tif"
    cv2.imwrite(str(copy), pixels.astype(np.uint16) * 257 if wide else pixels)


def _turn(image: Path, orientation: int) -> None:
    """Store an image turned, with an orientation that brings it upright again."""
    upright = Pillow.open(io.BytesIO(image.read_bytes()))
    turns = {3: Pillow.Transpose.ROTATE_180, 6: Pillow.Transpose.ROTATE_90}
    exif = Pillow.Exif()
    exif[0x112] = orientation
    upright.transpose(turns[orientation]).save(image, exif=exif)


def _mask_of(folder: Path) -> Path:
    return folder / "ground_truth" / "spot" / "001_mask.png"


def _refused(dataset: Dataset, kind: str, refuse: Callable[[], object]) -> Fault:
    """The fault of this kind, with whose sentence a function refuses the data set, too."""
    (fault,) = _faults(dataset, kind)
    with pytest.raises(DataError) as refused:
        refuse()
    assert (fault.severity, str(refused.value)) == (Severity.WRONG, fault.detail)
    return fault


def _refused_by_evaluate(run_folder: Path, folder: Path, kind: str) -> Fault:
    dataset, model = open_dataset("mvtec", folder), load_model(run_folder, torch.device("cpu"))
    return _refused(dataset, kind, lambda: score_test_split(model, dataset.test))


def _refused_by_fit(dataset: Dataset, kind: str) -> Fault:
    return _refused(dataset, kind, lambda: anomaly.fit(dataset, tiny(), device="cpu"))


def test_one_picture_as_good_and_as_a_defect_in_the_test_split(
    run_folder: Path, tmp_path: Path
) -> None:
    for suffix in (".bmp", ".tif"):
        folder = write_product(tmp_path / suffix, n_train=2)
        _in_other_bytes(folder / "test/good/001.png", folder / f"test/spot/other{suffix}")
        fault = _refused_by_evaluate(run_folder, folder, "two_labels")
        assert f"test/spot/other{suffix} is labelled as a defect" in fault.detail
        assert "is the same picture as" in fault.detail


WRONG_MASKS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "marks 99.1% of": ("mask_inverted", lambda mask: 255 - mask),
    "marks 100.0% of": ("mask_inverted", lambda mask: mask | 1),  # a background that isn't 0
    "-sample 120x96!": ("mask_size", lambda mask: np.kron(mask, np.ones((2, 2), np.uint8))),
    "turned by its EXIF orientation": ("mask_size", np.rot90),
}


def test_masks_that_contradict_their_images(run_folder: Path, tmp_path: Path) -> None:
    for number, (says, (kind, change)) in enumerate(WRONG_MASKS.items()):
        folder = write_product(tmp_path / str(number), n_train=2)
        mask = cv2.imread(str(_mask_of(folder)), cv2.IMREAD_GRAYSCALE)
        cv2.imwrite(str(_mask_of(folder)), change(mask))
        if "turned" in says:
            _turn(folder / "test/spot/001.png", 6)
        fault = _refused_by_evaluate(run_folder, folder, kind)
        assert "test/spot/001.png" in fault.detail
        assert says in fault.detail


def test_a_defect_among_the_training_images(tmp_path: Path) -> None:
    folder = write_product(tmp_path / "disc", n_train=4)
    _in_other_bytes(folder / "test/spot/001.png", folder / "train/good/z.bmp")
    fault = _refused_by_fit(open_dataset("mvtec", folder), "two_labels")
    assert "test/spot/001.png is labelled as a defect" in fault.detail


def test_a_defect_that_the_model_has_learned_as_good(run_folder: Path, product: Path) -> None:
    learned = product / "train" / "good" / "003.png"
    test = [*open_dataset("mvtec", product).test, Sample(learned, "x.png", "dent")]
    with pytest.raises(DataError, match=r"learned that it is good, as train/good/003\.png\."):
        anomaly.load(run_folder, device="cpu").evaluate(test)


def test_images_that_are_all_equal(tmp_path: Path) -> None:
    write_part(tmp_path / "0.png", seed=0)
    _in_other_bytes(tmp_path / "0.png", tmp_path / "1.bmp")
    _refused_by_fit(open_dataset("folder", tmp_path), "too_few_images")


def _frame(seed: int) -> np.ndarray:
    """A picture (200, 240, 3) with something else in each."""
    rng = np.random.default_rng(seed)
    return cv2.resize(rng.integers(40, 200, (9, 9, 3), np.uint8), (240, 200))


def _write_near_copies(folder: Path, seed: int) -> None:
    """Three: in two JPEG qualities, and with noise."""
    frame = _frame(seed)
    for quality in (50, 90):
        cv2.imwrite(str(folder / f"{seed}_{quality}.jpg"), frame, [1, quality])
    noise = np.random.default_rng(seed).normal(0, 4, frame.shape)
    cv2.imwrite(str(folder / f"{seed}_n.png"), np.clip(frame + noise, 0, 255).astype(np.uint8))


def test_near_copies_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(3):
        _write_near_copies(tmp_path, seed)
    for seed in range(10, 14):
        cv2.imwrite(str(tmp_path / f"{seed}.png"), _frame(seed))
    dataset = open_dataset("folder", tmp_path)
    (fault,) = _faults(dataset, "near_copies")
    assert fault.severity is Severity.NOTE
    assert "6 of 13 training images are near copies" in fault.detail
    assert "which leaves 7 different images" in fault.detail
    anomaly.fit(dataset, tiny(), device="cpu", calibrate=False)
    assert fault.detail in caplog.text


def test_near_copies_in_the_test_split_are_told(tmp_path: Path) -> None:
    folder = write_product(tmp_path / "disc", n_train=2)
    cv2.imwrite(str(folder / "train/good/a.png"), _frame(0))
    cv2.imwrite(str(folder / "test/good/a.jpg"), _frame(0), [1, 80])
    (fault,) = _faults(open_dataset("mvtec", folder), "near_copies")
    assert "1 of 4 other good images are near copies of training images" in fault.detail


def test_frames_are_found_among_many(tmp_path: Path) -> None:
    """More than are compared at once, the copies far apart."""
    write_part(tmp_path / "0.png", seed=0)
    look = look_of(read_image(tmp_path / "0.png"))
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 9, (2500, 256))
    rows[2400:] = rows[:100] + rng.normal(0, 0.2, (100, 256))
    looks = {i: type(look)(str(i), row.astype(np.float16)) for i, row in enumerate(rows)}
    shown = frames(looks)
    assert [shown[i] for i in range(2500)] == [*range(2400), *range(100)]


def test_copies_are_kept_together_where_the_split_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    for kind in ("good", "defect"):
        (folder / kind).mkdir(parents=True)
    for seed in range(8):
        _write_near_copies(folder / "good", seed)
        shutil.copy(folder / "good" / f"{seed}_n.png", folder / "good" / f"again_{seed}.png")
    cv2.imwrite(str(folder / "defect" / "0.png"), _frame(99))
    dataset = open_dataset("good_defect", folder)
    assert any(len(names) < 4 for names in _frames_in(dataset))
    write(tmp_path / "images.csv", listing_of(dataset, _check(dataset).copies))
    dataset = open_dataset("csv", tmp_path / "images.csv")
    assert all(len(names) == 4 for names in _frames_in(dataset))
    assert 0 < sum(not sample.is_defect for sample in dataset.test) < 32
    assert not _faults(dataset, "leak")


def _frames_in(dataset: Dataset) -> list[set[str]]:
    """The names of good images in each split, by the frame that they show."""
    found: dict[tuple[bool, str], set[str]] = {}
    for tested, samples in enumerate((dataset.train, dataset.test)):
        for sample in samples:
            if not sample.is_defect:
                number = sample.path.stem.removeprefix("again_").partition("_")[0]
                found.setdefault((bool(tested), number), set()).add(sample.name)
    return [*found.values()]


def test_a_mask_that_may_be_turned_is_told(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_product(tmp_path / "disc", n_train=2)
    _turn(folder / "test/spot/001.png", 3)
    _turn(folder / "test/spot/002.png", 6)  # the size says that its mask is upright
    dataset = open_dataset("mvtec", folder)
    (fault,) = _faults(dataset, "mask_maybe_turned")
    assert fault.severity is Severity.NOTE
    assert "test/spot/001.png is turned" in fault.detail
    score_test_split(load_model(run_folder, torch.device("cpu")), dataset.test)
    assert caplog.text.count(fault.detail) == 1
    _turn(_mask_of(folder), 3)
    assert not _faults(dataset, "mask_maybe_turned")


NAMES = "{}_mask {}-mask {}_label {}_gt {}_seg {}_ground_truth {} mask_{} gt-{} Label.{}"


def test_masks_are_found_by_their_usual_names(tmp_path: Path) -> None:
    """In either form of Unicode, whatever the image's is."""
    composed, apart = (unicodedata.normalize(form, "Kühler 1") for form in ("NFC", "NFD"))
    for which, pattern in enumerate(NAMES.split()):
        folder = tmp_path / str(which)
        touch(folder, "good/1.png")
        for number, (image, mask) in enumerate([(composed, apart), (apart, composed)]):
            place, masks = (unicodedata.normalize(f, f"Riß ü{number}") for f in ("NFC", "NFD"))
            touch(
                folder, f"defect/{place}/{image}.png", f"masks/{masks}/{pattern.format(mask)}.bmp"
            )
        dataset = open_dataset("good_defect", folder)
        found = [s.mask_path is not None for s in dataset.test if s.is_defect]
        assert (found, dataset.unused_masks) == ([True, True], ()), pattern


def test_a_mask_is_that_of_the_image_with_its_whole_name(tmp_path: Path) -> None:
    names = ("good/1.png", "defect/cap.jpg", "defect/cap_label.jpg", "masks/cap_label.png")
    touch(tmp_path, *names)
    masks = {s.path.stem: s.mask_path for s in open_dataset("good_defect", tmp_path).test}
    assert masks["cap"] is None
    assert masks["cap_label"] == tmp_path / "masks" / "cap_label.png"


def test_masks_without_images_are_told(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_product(tmp_path / "disc", n_train=6)
    _mask_of(folder).rename(_mask_of(folder).with_name("x001.png"))
    for layout, stray in (
        ("mvtec", folder / "ground_truth" / "spot" / "x001.png"),
        ("good_defect", folder / "masks" / "defect" / "x001.png"),
    ):
        if layout == "good_defect":
            for old, new in (("train/good", "good"), ("test/spot", "defect")):
                (folder / old).rename(folder / new)
            (folder / "ground_truth").rename(folder / "masks")
            (folder / "masks" / "spot").rename(folder / "masks" / "defect")
        dataset = open_dataset(layout, folder)
        (unused,) = _faults(dataset, "mask_unused")
        (missing,) = _faults(dataset, "mask_missing")
        assert (unused.severity, missing.severity) == (Severity.UNUSABLE, Severity.UNUSABLE)
        assert str(stray) in unused.detail
        assert "001.png has no mask" in missing.detail
    anomaly.load(run_folder, device="cpu").evaluate(dataset)
    assert unused.detail in caplog.text
    assert "1 of 3 defects have no mask" in caplog.text
