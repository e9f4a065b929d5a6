"""Every fault planted in a broken copy of the sample set is found, and nothing else."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from conftest import REPOSITORY, Command, train_arguments, write_part, write_product

from anomaly.datasets import check as data_check
from anomaly.datasets import open_dataset
from anomaly.datasets.check import Reading, Severity, check
from anomaly.imaging.read import Image
from anomaly.sample_data import write_sample_data


@pytest.fixture(scope="module")
def sample_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    write_sample_data(folder)
    return folder / "brushed_plate"


def _arguments(folder: Path, *flags: str) -> list[object]:
    config = REPOSITORY / "configs" / "folder.yaml"
    return [
        "--config",
        config,
        "--set",
        "data.format=mvtec",
        "--set",
        f"data.root={folder}",
        *flags,
    ]


def test_a_healthy_set_has_no_faults(sample_set: Path, command: Command) -> None:
    code, out, err = command("check", _arguments(sample_set))
    assert (code, err) == (0, "")
    assert "40 good, 0 defective" in out
    assert "20 good, 30 defective (30 with masks)" in out
    assert "all 384×384; all 8-bit colour" in out
    assert "no faults" in out


def _break(folder: Path) -> dict[tuple[str, str], str]:
    """Plant one fault of each kind; (kind, name) of each and what its message must hold."""
    train, test = folder / "train" / "good", folder / "test"
    (train / "000.png").write_bytes((train / "000.png").read_bytes()[:2000])
    (train / "001.png").write_text("not an image")
    (train / "002.png").write_bytes(b"GIF89a" + bytes(100))
    picture = cv2.imread(str(train / "003.png"))
    cv2.imwrite(str(test / "good" / "leaked.bmp"), picture)  # the same pixels in another file
    shutil.copy(test / "scratch" / "000.png", train / "planted.png")
    shutil.copy(train / "004.png", train / "again.png")
    masks = folder / "ground_truth"
    (masks / "dent" / "000_mask.png").unlink()
    cv2.imwrite(str(masks / "dent" / "001_mask.png"), np.zeros((384, 384), np.uint8))
    cv2.imwrite(str(masks / "dent" / "002_mask.png"), np.full((100, 384), 255, np.uint8))
    (masks / "dent" / "003_mask.png").write_text("not a mask")
    return {
        ("unreadable", "train/good/000.png"): "000.png",
        ("unsupported", "train/good/001.png"): "text file",
        ("unsupported", "train/good/002.png"): "GIF",
        ("leak", "test/good/leaked.bmp"): "003.png",
        ("two_labels", "test/scratch/000.png"): "planted.png",
        ("duplicate", "train/good/again.png"): "004.png",
        ("mask_missing", "test/dent/000.png"): "no mask",
        ("mask_empty", "test/dent/001.png"): "marks no defect",
        ("mask_size", "test/dent/002.png"): "384×100",
        ("mask_unusable", "test/dent/003.png"): "003_mask.png",
    }


def test_every_planted_fault_is_found(sample_set: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(sample_set, folder)
    planted = _break(folder)
    code, out, _ = command("check", _arguments(folder, "--json"))
    report = json.loads(out)
    found = {(f["kind"], f["name"]): f["detail"] for f in report["faults"]}
    # Of two equal pictures, either may be called the second.
    if ("duplicate", "train/good/004.png") in found:
        found["duplicate", "train/good/again.png"] = found.pop(("duplicate", "train/good/004.png"))
        planted["duplicate", "train/good/again.png"] = "again.png"
    assert code == 2
    assert found.keys() == planted.keys()
    for key, says in planted.items():
        assert says in found[key]
    assert report["splits"]["train"]["usable"] == report["splits"]["train"]["images"] - 3
    assert report["splits"]["test"]["with_mask"] == 29
    code, out, _ = command("check", _arguments(folder))
    assert code == 2
    for heading in ("would be wrong: 3", "can't be used as it is: 6", "worth knowing: 1"):
        assert heading in out


def test_files_that_cannot_be_used_are_exit_code_3(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc")
    (folder / "train" / "good" / "000.png").write_text("no image")
    code, out, _ = command("check", _arguments(folder))
    assert code == 3
    # What can't be used is still said to be good.
    assert "12 good, 0 defective; 11 of these 12 can be used" in out


def test_hardly_any_training_image_is_wrong(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc", n_train=1)
    code, out, _ = command("check", _arguments(folder))
    assert code == 2
    assert "needs at least 2 different training images, not 1" in out


def test_few_training_images_are_worth_knowing(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc", n_train=19)
    code, out, _ = command("check", _arguments(folder))
    assert (code, "there are only 19 different training images" in out) == (0, True)
    write_part(folder / "train" / "good" / "019.png", seed=19)
    assert "no faults" in command("check", _arguments(folder))[1]


def test_long_lists_are_cut_short_unless_asked_for(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc")
    for i in range(9):
        (folder / "train" / "good" / f"text{i}.png").write_text("no image")
    _, out, _ = command("check", _arguments(folder))
    assert "… and 4 more" in out
    _, out, _ = command("check", _arguments(folder, "--all"))
    assert out.count("unsupported:") == 9


def test_padim_wants_one_aspect(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc")
    for name, width in (("near", 130), ("far", 150)):
        picture = np.random.default_rng(width).integers(0, 255, (96, width, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / "test" / "good" / f"{name}.png"), picture)
    assert command("check", _arguments(folder))[0] == 0
    code, out, _ = command("check", [*_arguments(folder), "--set", "model.kind=padim"])
    assert code == 3
    assert "far.png has another shape than the training images by 25%" in out
    assert "near.png" not in out


def test_twelve_bits_in_a_file_of_sixteen(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(20):
        picture = rng.integers(0, 4096, (40, 40), dtype=np.uint16)
        cv2.imwrite(str(tmp_path / f"{i}.png"), picture)
    dataset = open_dataset("folder", tmp_path, None)
    (fault,) = check(dataset, Reading()).faults
    assert (fault.kind, fault.severity) == ("bit_depth", Severity.NOTE)
    assert "image.bit_depth=12" in fault.detail
    assert not check(dataset, Reading(bit_depth=12)).faults
    kinds = Counter(f.kind for f in check(dataset, Reading(bit_depth=8)).faults)
    assert kinds == {"unsupported": 20, "too_few_images": 1}


def test_train_says_the_same_of_twelve_bits(tmp_path: Path, command: Command) -> None:
    product = write_product(tmp_path / "disc", n_train=4)
    for file in (product / "train" / "good").iterdir():
        picture = cv2.imread(str(file))
        cv2.imwrite(str(file), picture.astype(np.uint16) * 16)
    dataset = open_dataset("mvtec", tmp_path, "disc")
    said = next(f.detail for f in check(dataset, Reading()).faults if f.kind == "bit_depth")
    for name, declared in (("without", []), ("with", ["image.bit_depth=12"])):
        arguments = train_arguments(product, tmp_path / name, *declared)
        _, _, err = command("train", [*arguments, "--no-calibrate"])
        assert (said in err) == (name == "without")


def test_dark_floats_of_sixteen_bits_lack_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(20):
        tifffile.imwrite(tmp_path / f"{i}.tif", (rng.random((40, 40)) / 5).astype(np.float16))
    report = check(open_dataset("folder", tmp_path, None), Reading())
    assert report.splits["train"].modes == {"greyfloat16": 20}
    assert (report.bit_depth, report.faults) == (None, ())


def test_where_to_look_must_fit(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc")
    arguments = [*_arguments(folder), "--set"]
    code, _, err = command("check", [*arguments, "image.ignore={png: /nowhere.png}"])
    assert (code, "/nowhere.png" in err) == (2, True)
    mask = tmp_path / "mask.png"
    cv2.imwrite(str(mask), np.eye(96, 120, dtype=np.uint8))
    assert command("check", [*arguments, f"image.ignore={{png: {mask}}}"])[0] == 0
    for name in ("train/good/small.png", "test/good/small.png"):
        picture = np.random.default_rng(len(name)).integers(0, 255, (60, 60, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / name), picture)
    code, out, _ = command("check", [*arguments, f"image.ignore={{png: {mask}}}"])
    assert code == 3
    assert out.count("region:") == 2
    assert "small.png doesn't fit the region to look at: its 60×60 pixels have another shape" in out
    assert "13 good, 0 defective; 12 of these 13 can be used" in out
    cv2.imwrite(str(mask), np.eye(100, dtype=np.uint8))
    code, out, _ = command("check", [*arguments, f"image.region={{png: {mask}}}"])
    assert (code, "2 different training images, not 1" in out) == (2, True)


def test_no_mask_at_all_is_worth_knowing(tmp_path: Path, command: Command) -> None:
    folder = write_product(tmp_path / "disc", n_train=20)
    shutil.rmtree(folder / "ground_truth")
    code, out, _ = command("check", _arguments(folder))
    assert code == 0
    assert "worth knowing: 1" in out
    assert "none of the 3 defects has a mask" in out
    shutil.rmtree(folder / "test" / "spot")
    assert "no faults" in command("check", _arguments(folder))[1]


def test_a_mistake_in_a_decoder_is_one_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(21):
        write_part(tmp_path / f"{i}.png", seed=i)

    def read(path: Path, **options: Any) -> Image:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(data_check, "read_image", read)
    sample = open_dataset("folder", tmp_path, None).train[0]
    (fault,) = data_check._check_image(Reading(), ("train", sample)).faults
    assert (fault.kind, fault.severity, fault.name) == ("failed", Severity.UNUSABLE, "0.png")
    assert "0.png: ZeroDivisionError: oh" in fault.detail


def test_a_good_image_with_a_mask_is_wrong(tmp_path: Path) -> None:
    for i in range(21):
        write_part(tmp_path / f"{i}.png", seed=i)
    mask = np.zeros((96, 120), np.uint8)
    mask[3, 4] = 1
    cv2.imwrite(str(tmp_path / "m.png"), mask)
    train = [f"{i}.png,,,train" for i in range(20)]
    rows = ["path,label,mask,split", *train, "20.png,,m.png,test"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    dataset = open_dataset("csv", tmp_path / "list.csv", None)
    (fault,) = check(dataset, Reading()).faults
    assert (fault.kind, fault.severity) == ("mask_on_good", Severity.WRONG)
    assert not check(dataset, Reading(mask_above=1)).faults
