"""From a folder to a page without another word."""

import os
import re
import shutil
import urllib.error
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from conftest import Says, fast, write_part
from moving_parts import draw, poses

from anomaly.backbones import networks
from anomaly.backbones.networks import INSTALLED, backbone_at_hand
from anomaly.config.load import load_config
from anomaly.datasets.layouts import open_dataset
from anomaly.desk.check import pose_hints
from anomaly.errors import WeightsError
from anomaly.imaging.read import Decoding
from anomaly.storage.models import load_model

Start = Callable[..., str]


@pytest.fixture
def start(says: Says, tmp_path: Path) -> Start:
    """Runs the command into tmp_path / "run", to an exit code; all that it says."""

    def run(code: int, folder: Path, *flags: object) -> str:
        quick = [part for setting in fast(*map(str, flags)) for part in ("--set", setting)]
        return says(code, "start", [folder, "--output", tmp_path / "run", *quick, *flags])

    return run


def test_a_data_set_ends_in_a_report(product: Path, start: Start, tmp_path: Path) -> None:
    output = tmp_path / "run"
    said = start(0, product)
    assert "is read as --format mvtec" in said
    for name in ("check", "train", "evaluate"):
        assert f"\n$ anomaly {name} " in said
    assert f"Look at {output / 'evaluation' / 'disc' / 'report.html'}" in said
    config = load_config(output / "disc.yaml")
    assert (config.name, config.data.root) == ("disc", product)

    assert "--overwrite" in start(2, product)
    shutil.rmtree(output / "model")  # its settings aren't lost
    said = start(2, product)
    train = f"anomaly train --config {output / 'disc.yaml'} --output {output}"
    assert ("--overwrite" in said, train in said) == (True, True)


def test_sixteen_bit_greys_under_names_of_ones_own(start: Start, tmp_path: Path) -> None:
    """In Windows-1252 and so no text, and one isn't an image."""
    draw, part = np.random.default_rng(0), tmp_path / "part"
    for folder, count in (("OK", 12), ("NG", 2)):
        (part / folder).mkdir(parents=True)
        for i in range(count):
            image = draw.integers(0, 4096, (80, 64), dtype=np.uint16)
            cv2.imwrite(str(part / folder / f"{i}.png"), image)
            with suppress(OSError):  # names are text on some systems
                name = os.fsdecode(f"Kühler {i}.png".encode("cp1252"))
                (part / folder / f"{i}.png").rename(part / folder / name)
    (part / "OK" / "notes.png").write_text("no picture")
    said = start(3, part)
    assert said.count("notes.png") == 1
    assert "exit code 3: files that can't be used were left out" in said
    assert "good images in OK, others in NG" in said
    assert re.search(r"- \d of 13 good images are kept for testing, not for training", said)
    written = yaml.safe_load((tmp_path / "run" / "part.yaml").read_text())
    assert written["image"] == {"bit_depth": 12}
    assert written["data"] == {"format": "good_defect", "root": str(part)}
    assert (tmp_path / "run" / "evaluation" / "part" / "report.html").is_file()


def test_defects_that_pass_are_said_with_what_to_try(
    start: Start, says: Says, tmp_path: Path
) -> None:
    for i in range(20):  # the defects look like good parts
        write_part(tmp_path / "part" / ("NG" if i >= 12 else "OK") / f"{i}.png", seed=i)
    said = start(0, tmp_path / "part")
    missed = re.search(r"(\d) of 8 defects pass as good", said)
    assert missed
    assert int(missed[1]) > 1
    assert "anomaly tune " in said
    infer = ["--model", tmp_path / "run", "--input", tmp_path / "part" / "NG"]
    said = says(0, "infer", [*infer, "--output", tmp_path / "new"])
    assert f"in evaluation, {missed[1]} of 8 defects passed as good" in said


def test_it_asks_what_it_cannot_tell(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, count, mark in (("OK", 8, None), ("July", 3, (30, 40))):
        for i in range(count):
            write_part(tmp_path / "part" / folder / f"{i}.png", seed=100 + i, mark=mark)
    assert "July. Rename them (`good …`, `defect …`)" in start(2, tmp_path / "part")
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "d")
    assert "1 good, 3 defective" in start(0, tmp_path / "part")
    (question,) = asked
    assert "July" in question


def test_strips_are_seen_in_tiles(start: Start, tmp_path: Path) -> None:
    (tmp_path / "strips").mkdir()
    for i in range(3):
        picture = np.random.default_rng(i).integers(90, 150, (600, 9), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / "strips" / f"{i}.png"), picture)
    said = start(0, tmp_path / "strips")
    assert "too thin to be seen as a whole: each is seen in tiles of 64 pixels" in said
    config = yaml.safe_load((tmp_path / "run" / "strips.yaml").read_text())
    assert config["image"] == {"tile": 64}


def test_parts_that_lie_turned_are_aligned_and_surfaces_are_not(tmp_path: Path) -> None:
    for i, (turn, x, y) in enumerate(poses(12, 3, 180)):
        for name, pose in (("turned", (turn, x, y)), ("shifted", (0.0, 2 * x, 2 * y))):
            file = tmp_path / name / f"{i}.png"
            file.parent.mkdir(exist_ok=True)
            cv2.imwrite(str(file), draw(pose, i))
        (tmp_path / "surface").mkdir(exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 255, (160, 200), np.uint8)
        cv2.imwrite(str(tmp_path / "surface" / f"{i}.png"), noise)
    for name, one_grid, expected in (
        ("turned", False, ["rigid"]),
        ("shifted", False, []),
        ("shifted", True, ["shift"]),
        ("surface", True, []),
    ):
        good = open_dataset("folder", tmp_path / name).train
        hints = pose_hints(good, Decoding(), one_grid=one_grid)
        assert [hint.value for hint in hints] == expected, name


def test_a_picture_with_two_labels_ends_it(start: Start, tmp_path: Path) -> None:
    for i in range(4):
        write_part(tmp_path / "part" / "OK" / f"{i}.png", seed=i)
        write_part(tmp_path / "part" / "NG" / f"{i}.png", seed=3 + i)
    said = start(2, tmp_path / "part")
    assert "3.png" in said
    assert ("$ anomaly check" in said, "$ anomaly train" in said) == (True, False)


def test_it_looks_with_the_settings_given(product: Path, start: Start) -> None:
    said = start(2, product, "--set", "image.max_pixels=100")
    assert "more than image.max_pixels allows" in said
    assert "$ anomaly train" not in said


def test_good_images_alone_end_in_a_page(product: Path, start: Start, tmp_path: Path) -> None:
    output = tmp_path / "run"
    given = ["--set", "name=disc", "--set", "model.kind=padim"]
    said = start(0, product / "train" / "good", *given)
    assert "their patches is kept" not in said  # PaDiM keeps none
    assert "coreset_ratio" not in (output / "disc.yaml").read_text()
    assert "no other images to test with" in said
    assert f"looked most unusual in training are in {output / 'suspects'}" in said
    assert said.count("good images can't guarantee a false-reject rate below") == 1
    assert (output / "results" / "results.html").is_file()


def test_a_single_image_ends_in_heatmaps_without_verdicts(start: Start, tmp_path: Path) -> None:
    write_part(tmp_path / "one" / "000.png", seed=0)
    said = start(0, tmp_path / "one")
    assert "no thresholds and no verdicts" in said
    assert "1 of 1 images scored: no verdicts" in said
    assert (tmp_path / "run" / "results" / "heatmaps" / "000.png").exists()
    assert "--no-calibrate" in said  # as the command that can be run alone


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Without a network connection, and with one folder for weights, which is empty."""
    from anomaly.backbones import weights

    def unreachable(url: str) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(weights, "_opened", unreachable)
    monkeypatch.setattr(weights, "search_folders", lambda: [tmp_path / "weights"])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def test_without_a_network_connection_the_best_network_at_hand_is_taken(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, why = backbone_at_hand()
    assert name == INSTALLED
    assert "came with the installation" in why
    assert "put wide_resnet50_2-95faca4d.pth or resnet50-0676ba61.pth into weights/" in why
    (offline / "resnet50-0676ba61.pth").write_bytes(b"")
    name, why = backbone_at_hand()
    assert name == "resnet50"
    assert "are on disk" in why
    assert "put wide_resnet50_2-95faca4d.pth into" in why
    (offline / "wide_resnet50_2-95faca4d.pth").write_bytes(b"")
    assert backbone_at_hand()[0] == "wide_resnet50_2"

    for file in offline.iterdir():
        file.unlink()
    monkeypatch.setattr(networks, "installed_file", lambda: None)
    with pytest.raises(WeightsError, match="can't be downloaded from"):
        backbone_at_hand()


def test_a_folder_ends_in_a_page_without_a_network_connection(
    offline: Path, says: Says, tmp_path: Path
) -> None:
    for i in range(4):
        write_part(tmp_path / "disc" / f"{i}.png", seed=i)
    settings = ["--set", "image.area=64"]
    said = says(0, "start", [tmp_path / "disc", "--output", tmp_path / "run", *settings])
    assert said.count("the network is timm/tf_efficientnet_lite2: its weights came with") == 1
    assert "can't be downloaded" not in said
    assert (tmp_path / "run" / "results" / "results.html").is_file()
    model = load_model(tmp_path / "run")
    backbone = model.manifest["backbone"]
    assert model.config.backbone.name == INSTALLED
    assert backbone["weights_sha256"].startswith("9656183e")
    assert backbone["weights_licence"] == "apache-2.0"
    assert [layout["stride"] for layout in backbone["layouts"]] == [8, 16]
    assert backbone["mean"] == [0.5, 0.5, 0.5]
    config = (tmp_path / "run" / "disc.yaml").read_text()
    assert f"name: {INSTALLED}" in config


def test_files_that_cannot_be_read_are_told_by_kind(start: Start, tmp_path: Path) -> None:
    for suffix, says in (
        (".heic", "it is a HEIC or AVIF picture, not a PNG, JPEG"),
        (".cr2", "(but 3 .cr2, in a format that"),
    ):
        part = tmp_path / suffix[1:]
        part.mkdir()
        for i in range(3):
            (part / f"{i}{suffix}").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
        said = start(2, part)
        assert says in said
        assert "convert" in said
        assert "few" not in said
