"""From a folder to a page without another word."""

import os
import re
import shlex
import urllib.error
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from conftest import FAST, Command, write_part

from anomaly.backbones import networks
from anomaly.backbones.networks import INSTALLED, backbone_at_hand
from anomaly.config.load import load_config
from anomaly.errors import WeightsError
from anomaly.storage.load import load_model

SETTINGS = [part for setting in FAST for part in ("--set", setting)]


def test_a_data_set_ends_in_a_report(product: Path, command: Command, tmp_path: Path) -> None:
    output = tmp_path / "run"
    code, out, err = command("start", [product, "--output", output, *SETTINGS])
    assert code == 0, err
    assert "is read as --format mvtec" in out
    for name in ("check", "train", "evaluate"):
        assert f"\n$ anomaly {name} " in out
    assert (output / "evaluation" / "index.html").is_file()
    assert f"Look at {output / 'evaluation' / 'disc' / 'report.html'}" in out
    config = load_config(output / "disc.yaml")
    assert (config.name, config.data.root) == ("disc", product)

    code, _, err = command("start", [product, "--output", output, *SETTINGS])
    assert code == 2
    assert "--overwrite" in err


def test_sixteen_bit_greys_under_names_of_ones_own(command: Command, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for folder, count in (("OK", 12), ("NG", 2)):
        (tmp_path / "part" / folder).mkdir(parents=True)
        for i in range(count):
            image = draw.integers(0, 4096, (80, 64), dtype=np.uint16)
            cv2.imwrite(str(tmp_path / "part" / folder / f"{i}.png"), image)
    output = tmp_path / "run"
    code, out, err = command("start", [tmp_path / "part", "--output", output, *SETTINGS])
    assert code == 0, err
    assert "good images in OK, others in NG" in out
    assert "- 2 of 12 good images are kept for testing, not for training" in out
    written = yaml.safe_load((output / "part.yaml").read_text())
    assert written["image"] == {"bit_depth": 12}
    assert written["data"] == {"format": "good_defect", "root": str(tmp_path / "part")}
    assert (output / "evaluation" / "index.html").is_file()


def test_defects_that_pass_are_said_with_what_to_try(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):  # the defects look like good parts
        folder = "NG" if i >= 12 else "OK"
        write_part(tmp_path / "part" / folder / f"{i}.png", seed=i)
    output = tmp_path / "run"
    code, out, err = command("start", [tmp_path / "part", "--output", output, *SETTINGS])
    assert code == 0, err
    missed = re.search(r"1\. (\d) of 8 defects pass as good", out)
    assert missed
    assert int(missed[1]) > 1
    tune = shlex.split(re.search(r"anomaly (tune .*)", out)[1])
    tune[-1] = str(tmp_path / "tuned.yaml")
    code, out, err = command(tune[0], [*tune[1:], "--budget", "0.01s"])
    assert code == 0, err
    assert f"Your settings, unchanged, are in {tmp_path / 'tuned.yaml'}" in out
    model = ["--model", output, "--input", tmp_path / "part" / "NG", "--output", tmp_path / "new"]
    code, out, err = command("infer", model)
    assert f"in evaluation, {missed[1]} of 8 defects passed as good" in out


@pytest.mark.parametrize("shape", [(9, 600), (600, 9)], ids=str)
def test_strips_are_seen_in_tiles(shape: tuple[int, int], command: Command, tmp_path: Path) -> None:
    for i in range(3):
        picture = np.random.default_rng(i).integers(90, 150, shape, dtype=np.uint8)
        (tmp_path / "strips").mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / "strips" / f"{i}.png"), picture)
    output = tmp_path / "run"
    code, out, err = command("start", [tmp_path / "strips", "--output", output, *SETTINGS])
    assert code == 0, err
    assert "too thin to be seen as a whole: each is seen in tiles of 64 pixels" in out
    assert yaml.safe_load((output / "strips.yaml").read_text())["image"] == {"tile": 64}


def test_a_picture_with_two_labels_ends_it(command: Command, tmp_path: Path) -> None:
    for i in range(4):
        write_part(tmp_path / "part" / "OK" / f"{i}.png", seed=i)
        write_part(tmp_path / "part" / "NG" / f"{i}.png", seed=3 + i)
    output = tmp_path / "run"
    code, out, err = command("start", [tmp_path / "part", "--output", output, *SETTINGS])
    assert code == 2
    assert "3.png" in err
    assert "$ anomaly check" in out
    assert "$ anomaly train" not in out


def test_it_looks_with_the_settings_given(product: Path, command: Command, tmp_path: Path) -> None:
    few = ["--set", "image.max_pixels=100"]
    code, _, err = command("start", [product, "--output", tmp_path / "run", *SETTINGS, *few])
    assert code == 2
    assert "more than image.max_pixels allows" in err
    assert "$ anomaly train" not in err


def test_good_images_alone_end_in_a_page(product: Path, command: Command, tmp_path: Path) -> None:
    output = tmp_path / "run"
    good = product / "train" / "good"
    code, out, err = command("start", [good, "--name", "disc", "--output", output, *SETTINGS])
    assert code == 0, err
    assert "no other images to test with" in out
    assert f"looked most unusual in training are in {output / 'suspects'}" in out
    assert err.count("good images to learn from, so thresholds aren't reliable") == 1
    assert (output / "results" / "results.html").is_file()


def test_what_is_no_image_is_named_once(command: Command, tmp_path: Path) -> None:
    for i in range(8):
        write_part(tmp_path / "part" / "OK" / f"{i}.png", seed=i)
    write_part(tmp_path / "part" / "NG" / "0.png", seed=9, mark=(30, 40))
    (tmp_path / "part" / "OK" / "notes.png").write_text("no picture")
    code, out, err = command("start", [tmp_path / "part", "--output", tmp_path / "run", *SETTINGS])
    assert (code, (out + err).count("notes.png")) == (3, 1)
    assert "exit code 3: files that can't be used were left out" in err


def test_a_single_image_ends_in_heatmaps_without_verdicts(
    product: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    image = sorted((product / "train" / "good").iterdir())[0]
    (tmp_path / "one" / image.name).write_bytes(image.read_bytes())
    code, out, err = command("start", [tmp_path / "one", "--output", tmp_path / "out", *SETTINGS])
    assert "no thresholds and no verdicts" in out + err
    assert "1 of 1 images scored: no verdicts" in out
    assert (tmp_path / "out" / "results" / "heatmaps" / image.name).exists()
    assert code in (0, 3)
    assert "--no-calibrate" in out + err  # as the command that can be run alone


def test_a_method_without_a_bank_is_not_told_how_much_to_keep(
    product: Path, command: Command, tmp_path: Path
) -> None:
    given = [*SETTINGS, "--set", "model.kind=padim"]
    folder = product / "train" / "good"
    code, out, err = command("start", [folder, "--output", tmp_path / "out", *given])
    assert code == 0, err
    assert "their patches is kept" not in out
    assert "coreset_ratio" not in (tmp_path / "out" / "good.yaml").read_text()


def test_settings_of_an_earlier_start_are_not_lost(
    product: Path, command: Command, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    bad = ["--set", "backbone.name=no_such_network"]
    code, _, _ = command("start", [product, "--output", output, *bad])
    assert code == 2
    code, _, err = command("start", [product, "--output", output, *SETTINGS])
    assert code == 2
    assert f"anomaly train --config {output / 'disc.yaml'} --output {output}" in err
    assert "--overwrite" in err


def test_nothing_is_written_among_runs(
    product: Path, run_folder: Path, command: Command, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "disc").symlink_to(run_folder, target_is_directory=True)
    code, _, err = command("start", [product, "--output", runs, *SETTINGS])
    assert (code, "holds the runs disc" in err) == (2, True)
    assert [entry.name for entry in runs.iterdir() if not entry.name.startswith(".")] == ["disc"]


def test_image_names_that_are_no_text(command: Command, tmp_path: Path) -> None:
    for i in range(8):
        write_part(tmp_path / "part" / "OK" / f"{i}.png", seed=i)
    write_part(tmp_path / "part" / "NG" / "0.png", seed=9, mark=(30, 40))
    try:
        for i in range(8):  # in Windows-1252
            name = os.fsdecode(f"Kühler {i}.png".encode("cp1252"))
            (tmp_path / "part" / "OK" / f"{i}.png").rename(tmp_path / "part" / "OK" / name)
    except OSError:
        pytest.skip("names are text here")
    output = tmp_path / "run"
    code, _, err = command("start", [tmp_path / "part", "--output", output, *SETTINGS])
    assert code == 0, err
    assert (output / "evaluation" / "index.html").is_file()


def test_a_name_that_no_folder_can_have(
    product: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command("start", [product, "--name", "..", *SETTINGS])
    assert (code, "--name: name is '..': must be a name" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr(networks, "PACKAGES", {})
    with pytest.raises(WeightsError, match="can't be downloaded from"):
        backbone_at_hand()


def test_a_folder_ends_in_a_page_without_a_network_connection(
    offline: Path, product: Path, command: Command, tmp_path: Path
) -> None:
    settings = ["--set", "image.area=64"]
    code, out, err = command("start", [product, "--output", tmp_path / "run", *settings])
    assert code == 0, err
    assert out.count("the network is timm/tf_efficientnet_lite2: its weights came with") == 1
    assert "can't be downloaded" not in out + err
    assert (tmp_path / "run" / "evaluation" / "index.html").is_file()
    backbone = load_model(tmp_path / "run").manifest["backbone"]
    assert backbone["name"] == INSTALLED
    assert backbone["weights_sha256"].startswith("9656183e")
    assert backbone["weights_licence"] == "apache-2.0"
    assert (backbone["strides"], backbone["mean"]) == ([8, 16], [0.5, 0.5, 0.5])
    config = (tmp_path / "run" / "disc.yaml").read_text()
    assert f"name: {INSTALLED}" in config


@pytest.mark.parametrize(
    ("suffix", "says"),
    [(".heic", "it is a HEIC picture, not a PNG, JPEG"), (".cr2", "(but 3 .cr2, in a format that")],
)
def test_files_that_cannot_be_read_are_told_by_kind(
    suffix: str, says: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "part").mkdir()
    for i in range(3):
        head = b"\0\0\0\x18ftypheic" + bytes(100)
        (tmp_path / "part" / f"{i}{suffix}").write_bytes(head)
    code, out, err = command("start", [tmp_path / "part", "--output", tmp_path / "o", *SETTINGS])
    assert (code, says in err) == (2, True), err
    assert "convert" in err
    assert "few" not in out + err
    root = ["--config", "folder.yaml", "--set", f"data.root={tmp_path / 'part'}"]
    code, out, err = command("check", root)
    assert (code, says in out + err) == (2, True)
