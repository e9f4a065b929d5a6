"""What check refuses, train and evaluate refuse with the same sentence."""

import io
import shutil
import unicodedata
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import write_part, write_product
from PIL import Image as Pillow

import anomaly
from anomaly.cli import start
from anomaly.datasets import Dataset, Sample, open_dataset
from anomaly.datasets.check import Fault, Reading, Severity, check
from anomaly.datasets.copies import frames
from anomaly.datasets.recognise import recognise
from anomaly.errors import DataError
from anomaly.evaluation.evaluate import score_test_split
from anomaly.imaging.looks import look_of
from anomaly.imaging.read import read_image
from anomaly.storage.load import load_model

SETTINGS = {
    "backbone": {"name": "tiny", "weights": "random"},
    "image": {"area": 64},
    "precision": "fp32",
}


def _faults(dataset: Dataset, kind: str) -> list[Fault]:
    return [fault for fault in check(dataset, Reading()).faults if fault.kind == kind]


def _refused_by_evaluate(run_folder: Path, dataset: Dataset) -> str:
    with pytest.raises(DataError) as refused:
        score_test_split(load_model(run_folder, torch.device("cpu")), dataset.test)
    return str(refused.value)


def _in_other_bytes(source: Path, copy: Path) -> None:
    """The same pixels, in another kind of file or in 16 bits."""
    pixels = cv2.imread(str(source))
    wide = copy.suffix == ".tif"
    cv2.imwrite(str(copy), pixels.astype(np.uint16) * 257 if wide else pixels)


@pytest.mark.parametrize("suffix", [".bmp", ".tif"])
def test_one_picture_as_good_and_as_a_defect_in_the_test_split(
    suffix: str, run_folder: Path, tmp_path: Path
) -> None:
    folder = write_product(tmp_path / "disc")
    _in_other_bytes(folder / "test/good/001.png", folder / f"test/spot/other{suffix}")
    dataset = open_dataset("mvtec", folder)
    (fault,) = _faults(dataset, "two_labels")
    assert (fault.severity, fault.name) == (Severity.WRONG, f"test/spot/other{suffix}")
    assert "is the same picture as" in fault.detail
    assert _refused_by_evaluate(run_folder, dataset) == fault.detail


def test_a_defect_among_the_training_images(tmp_path: Path) -> None:
    folder = write_product(tmp_path / "disc", n_train=4)
    _in_other_bytes(folder / "test/spot/001.png", folder / "train/good/z.bmp")
    dataset = open_dataset("mvtec", folder)
    (fault,) = _faults(dataset, "two_labels")
    assert fault.name == "test/spot/001.png"
    with pytest.raises(DataError) as refused:
        anomaly.fit(dataset, SETTINGS, device="cpu")
    assert str(refused.value) == fault.detail


def test_a_defect_that_the_model_has_learned_as_good(run_folder: Path, product: Path) -> None:
    learned = product / "train" / "good" / "003.png"
    test = [*open_dataset("mvtec", product).test, Sample(learned, "x.png", "dent")]
    with pytest.raises(DataError, match=r"the model has learned it as good \(train/good/003.png\)"):
        anomaly.evaluate(anomaly.load(run_folder, device="cpu"), test)


def test_images_that_are_all_equal(tmp_path: Path) -> None:
    write_part(tmp_path / "0.png", seed=0)
    for i in range(1, 5):
        _in_other_bytes(tmp_path / "0.png", tmp_path / f"{i}.bmp")
    dataset = open_dataset("folder", tmp_path)
    (fault,) = _faults(dataset, "too_few_images")
    assert fault.severity is Severity.WRONG
    with pytest.raises(DataError) as refused:
        anomaly.fit(dataset, SETTINGS, device="cpu")
    assert str(refused.value) == fault.detail


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
    anomaly.fit(dataset, SETTINGS, device="cpu")
    assert fault.detail in caplog.text


def test_near_copies_in_the_test_split_are_told(tmp_path: Path) -> None:
    folder = write_product(tmp_path / "disc", n_train=2)
    cv2.imwrite(str(folder / "train/good/a.png"), _frame(0))
    cv2.imwrite(str(folder / "test/good/a.jpg"), _frame(0), [1, 80])
    (fault,) = _faults(open_dataset("mvtec", folder), "near_copies")
    assert "1 of 4 other good images are near copies of training images" in fault.detail


def test_parts_that_look_alike_are_no_copies(tmp_path: Path) -> None:
    for i in range(20):
        write_part(tmp_path / f"{i}.png", seed=i)
    assert not check(open_dataset("folder", tmp_path), Reading()).faults


def test_frames_are_found_among_many(tmp_path: Path) -> None:
    """More than are compared at once, the copies far apart."""
    write_part(tmp_path / "0.png", seed=0)
    look = look_of(read_image(tmp_path / "0.png"))
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 9, (2500, 256))
    rows[2400:] = rows[:100] + rng.normal(0, 0.2, (100, 256))
    looks = {i: type(look)(str(i), row.astype(np.float16)) for i, row in enumerate(rows)}
    shown = frames(looks)
    assert [shown[i] for i in range(2400)] == [*range(2400)]
    assert [shown[i] for i in range(2400, 2500)] == [*range(100)]


def _mask_of(folder: Path) -> Path:
    return folder / "ground_truth" / "spot" / "001_mask.png"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("mask_inverted", "marks 99.1% of"),
        ("mask_inverted", "marks 100.0% of"),
        ("mask_size", "-sample 120x96!"),
        ("mask_size", "turned by its EXIF orientation"),
    ],
)
def test_masks_that_contradict_their_images(
    kind: str, says: str, run_folder: Path, tmp_path: Path
) -> None:
    folder = write_product(tmp_path / "disc")
    mask = cv2.imread(str(_mask_of(folder)), cv2.IMREAD_GRAYSCALE)
    if "99" in says:
        mask = 255 - mask
    elif "100" in says:
        mask |= 1  # a background that isn't 0
    elif "sample" in says:
        mask = cv2.resize(mask, (240, 192), interpolation=cv2.INTER_NEAREST)
    else:
        _turn(folder / "test/spot/001.png", 6)
        mask = np.rot90(mask)
    cv2.imwrite(str(_mask_of(folder)), mask)
    dataset = open_dataset("mvtec", folder)
    (fault,) = _faults(dataset, kind)
    assert (fault.severity, fault.name) == (Severity.WRONG, "test/spot/001.png")
    assert says in fault.detail
    assert _refused_by_evaluate(run_folder, dataset) == fault.detail


def _turn(image: Path, orientation: int) -> None:
    """Store an image turned, with an orientation that brings it upright again."""
    upright = Pillow.open(io.BytesIO(image.read_bytes()))
    turns = {3: Pillow.Transpose.ROTATE_180, 6: Pillow.Transpose.ROTATE_90}
    exif = Pillow.Exif()
    exif[0x112] = orientation
    upright.transpose(turns[orientation]).save(image, exif=exif)


def test_a_mask_that_may_be_turned_is_told(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_product(tmp_path / "disc")
    _turn(folder / "test/spot/001.png", 3)
    _turn(folder / "test/spot/002.png", 6)  # the size says that its mask is upright
    dataset = open_dataset("mvtec", folder)
    (fault,) = _faults(dataset, "mask_maybe_turned")
    assert (fault.severity, fault.name) == (Severity.NOTE, "test/spot/001.png")
    score_test_split(load_model(run_folder, torch.device("cpu")), dataset.test)
    assert caplog.text.count(fault.detail) == 1
    _turn(_mask_of(folder), 3)
    assert not _faults(dataset, "mask_maybe_turned")


NAMES = "{}_mask {}-mask {}_label {}_gt {}_seg {}_ground_truth {} mask_{} gt-{} Label.{}"


@pytest.mark.parametrize("pattern", NAMES.split())
def test_masks_are_found_by_their_usual_names(pattern: str, tmp_path: Path) -> None:
    """In either form of Unicode, whatever the image's is."""
    composed, apart = (unicodedata.normalize(form, "Kühler 1") for form in ("NFC", "NFD"))
    folder = tmp_path / "p"
    write_part(folder / "good" / "1.png", seed=0)
    for number, (image, mask) in enumerate([(composed, apart), (apart, composed)]):
        place = folder / "defect" / unicodedata.normalize("NFC", f"Riß ü{number}")
        write_part(place / f"{image}.png", seed=number)
        masks = folder / "masks" / unicodedata.normalize("NFD", place.name)
        write_part(masks / f"{pattern.format(mask)}.bmp", seed=9)
    dataset = open_dataset("good_defect", folder)
    assert [s.mask_path is not None for s in dataset.test if s.is_defect] == [True, True]
    assert not dataset.unused_masks


def test_a_mask_is_that_of_the_image_with_its_whole_name(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    write_part(folder / "good" / "1.png", seed=0)
    for name in ("cap", "cap_label"):
        write_part(folder / "defect" / f"{name}.jpg", seed=1)
    write_part(folder / "masks" / "cap_label.png", seed=2)
    masks = {s.path.stem: s.mask_path for s in open_dataset("good_defect", folder).test}
    assert masks["cap"] is None
    assert masks["cap_label"] == folder / "masks" / "cap_label.png"


@pytest.mark.parametrize("layout", ["mvtec", "good_defect"])
def test_masks_without_images_are_told(
    layout: str, run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_product(tmp_path / "disc")
    stray = folder / "ground_truth" / "spot" / "x001.png"
    _mask_of(folder).rename(stray)
    if layout == "good_defect":
        for old, new in (("train/good", "good"), ("test/spot", "defect")):
            (folder / old).rename(folder / new)
        (folder / "ground_truth").rename(folder / "masks")
        (folder / "masks" / "spot").rename(folder / "masks" / "defect")
        stray = folder / "masks" / "defect" / "x001.png"
    dataset = open_dataset(layout, folder)
    (unused,) = _faults(dataset, "mask_unused")
    (missing,) = _faults(dataset, "mask_missing")
    assert (unused.severity, missing.severity) == (Severity.UNUSABLE, Severity.UNUSABLE)
    assert str(stray) in unused.detail
    assert "001.png has no mask" in missing.detail
    anomaly.evaluate(anomaly.load(run_folder, device="cpu"), dataset)
    assert unused.detail in caplog.text
    assert "1 of 3 defects have no mask" in caplog.text


def test_start_parts_no_copies(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    for kind in ("good", "defect"):
        (folder / kind).mkdir(parents=True)
    for seed in range(8):
        _write_near_copies(folder / "good", seed)
        shutil.copy(folder / "good" / f"{seed}_n.png", folder / "good" / f"again_{seed}.png")
    cv2.imwrite(str(folder / "defect" / "0.png"), _frame(99))
    taken = recognise(folder)
    assert any(len(names) < 4 for names in _frames_in(open_dataset("good_defect", folder)))
    taken, dataset, _ = start._look(taken, Reading(), tmp_path / "images.csv")
    assert (taken.layout, taken.root) == ("csv", tmp_path / "images.csv")
    assert all(len(names) == 4 for names in _frames_in(dataset))
    assert 0 < sum(not sample.is_defect for sample in dataset.test) < 8
    assert not _faults(dataset, "leak") + [
        fault for fault in _faults(dataset, "near_copies") if fault.split == "test"
    ]


def _frames_in(dataset: Dataset) -> list[set[str]]:
    """The names of good images in each split, by the frame that they show."""
    found: dict[tuple[bool, str], set[str]] = {}
    for tested, samples in enumerate((dataset.train, dataset.test)):
        for sample in samples:
            if not sample.is_defect:
                number = sample.path.stem.removeprefix("again_").partition("_")[0]
                found.setdefault((bool(tested), number), set()).add(sample.name)
    return [*found.values()]


def test_a_part_with_most_of_the_views_is_learned_from(tmp_path: Path) -> None:
    rows = [f"{i}.png,{'a' if i < 8 else i}" for i in range(10)]
    (tmp_path / "list.csv").write_text("\n".join(["path,group", *rows]))
    dataset = open_dataset("csv", tmp_path / "list.csv")
    assert len(dataset.test) == 2
    assert "a" not in {sample.group for sample in dataset.test}
