"""Every fault planted in a broken data set is found, and nothing else."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import REPOSITORY, Command, write_part, write_product

import anomaly
from anomaly.datasets.layouts import open_dataset
from anomaly.desk import check as data_check
from anomaly.desk.check import Reading, Severity, check
from anomaly.imaging.read import Decoding, Image, read_image


def _arguments(folder: Path, *settings: str) -> list[object]:
    arguments: list[object] = ["--config", REPOSITORY / "configs" / "folder.yaml"]
    for setting in ("data.format=mvtec", f"data.root={folder}", *settings):
        arguments += ["--set", setting]
    return arguments


def test_a_healthy_set_has_no_faults_and_one_image_is_too_few(
    tmp_path: Path, command: Command
) -> None:
    folder = write_product(tmp_path / "disc", n_train=20)
    code, out, err = command("check", _arguments(folder))
    assert (code, err) == (0, "")
    assert "20 good, 0 defective" in out
    assert "3 good, 3 defective" in out
    assert "all 120×96; all rgb8" in out
    assert "no faults" in out
    train = sorted((folder / "train" / "good").iterdir())
    for file in train[1:]:
        file.unlink()
    code, out, _ = command("check", _arguments(folder))
    assert (code, "needs at least 2 different training images, not 1" in out) == (2, True)


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
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
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
    for (kind, name), says in planted.items():
        details = [fault.detail for fault in report.faults if fault.kind == kind]
        assert any(name in detail and says in detail for detail in details), (kind, name)
    assert report.splits["train"].usable == report.splits["train"].good - 12
    code, out, _ = command("check", _arguments(folder))
    assert code == 2
    for heading in ("would be wrong: 3", "can't be used as it is: 16", "worth knowing: 1"):
        assert heading in out
    assert out.count("unsupported:") == 10
    few = "\n".join(report.lines(5))
    assert (few.count("unsupported:"), "… and 5 more (anomaly check" in few) == (6, True)


def test_padim_wants_one_aspect(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc")
    for name, width in (("near", 130), ("far", 150)):
        picture = np.random.default_rng(width).integers(0, 255, (96, width, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / "test" / "good" / f"{name}.png"), picture)
    assert command("check", _arguments(folder))[0] == 0
    code, out, _ = command("check", _arguments(folder, "model.kind=padim"))
    assert code == 3
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
        settings = {
            "backbone": {"name": "tiny", "weights": "random"},
            "image": {"area": 64, "bit_depth": declared},
        }
        files = [sample.path for sample in dataset.train[:3]]
        anomaly.fit(files, settings, device="cpu", calibrate=False)
        assert (fault.detail in caplog.text) == (declared is None)


def test_where_to_look_must_fit(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc")
    mask = tmp_path / "mask.png"
    cv2.imwrite(str(mask), np.eye(96, 120, dtype=np.uint8))
    for name in ("train/good/small.png", "test/good/small.png"):
        picture = np.random.default_rng(len(name)).integers(0, 255, (60, 60, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / name), picture)
    code, out, _ = command("check", _arguments(folder, f"image.ignore={{png: {mask}}}"))
    assert (code, out.count("unsupported:")) == (3, 2)
    assert "small.png: its 60×60 pixels have another shape" in out
    assert "13 good, 0 defective; 12 of these 13 can be used" in out
    cv2.imwrite(str(mask), np.eye(100, dtype=np.uint8))
    code, out, _ = command("check", _arguments(folder, f"image.region={{png: {mask}}}"))
    assert (code, "2 different training images, not 1" in out) == (2, True)


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
