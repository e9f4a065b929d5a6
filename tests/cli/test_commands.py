"""Commands from end to end, and what is wrong told in one clear message."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Command, Says, train_arguments, write_part, write_product
from kit import contents, table, with_data

from anomaly.backbones.weights import search_folders
from anomaly.cli import COMMANDS, explain
from anomaly.errors import ModelError
from anomaly.storage.models import load_model


def test_train_infer_evaluate(
    run_folder: Path, padim_folder: Path, inferred: Path, evaluated: Path
) -> None:
    for kind, run in (("patchcore", run_folder), ("padim", padim_folder)):
        summary = json.loads((run / "train.json").read_text())
        assert summary["kind"] == kind
        counts = {"learned": 12, "refused": 0}
        assert summary["images"] == counts
        assert summary["peak_memory_bytes"] > 50e6
        assert summary["seconds"]["total"] > 0
        assert (summary["bank_vectors"] is None) == (kind != "patchcore")

    rows = table(inferred)
    lines = (inferred / "results.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["path"] for line in lines] == [row["path"] for row in rows]
    assert len(rows) == 6
    scores = [float(row["image_score"]) for row in rows]
    assert max(scores[:3]) < min(scores[3:])  # good/…, then spot/…
    for row in rows:
        assert row["status"] == "ok"
        assert row["threshold_label"] == "calibrated"
        assert row["model_id"] == load_model(run_folder, "cpu").model_id
        rejected = float(row["image_score"]) > float(row["threshold"])
        assert row["verdict"] == ("reject" if rejected else "good")
        assert cv2.imread(str(inferred / row["heatmap"])).shape == (96, 120, 3)
    assert all(row["verdict"] == "reject" for row in rows[3:])

    metrics = json.loads((evaluated / "metrics.json").read_text())
    figures = metrics["categories"]["disc"]
    assert figures["image_auroc"] == metrics["mean"]["image_auroc"] == 1.0
    assert figures["pixel_auroc"] > 0.9
    assert (figures["n_good"], figures["n_defect"]) == (3, 3)
    assert len(table(evaluated, "scores.csv")) == 6


def test_few_images_with_long_names_and_broken_ones(
    tmp_path: Path, says: Says, caplog: pytest.LogCaptureFixture
) -> None:
    product = write_product(tmp_path / "disc", n_train=0)
    good = product / "train" / "good"
    good.mkdir(parents=True)
    for i in range(4):
        write_part(tmp_path / "part.png", seed=i)
        name = f"{i}" + ("検査画像" * 20 + "不良" if i % 2 else "x" * 250) + ".png"
        (tmp_path / "part.png").rename(good / name)
    broken = ("aaa.png", "zzz.png")
    for name in broken:
        (good / name).write_text("no image")
    said = says(3, "train", train_arguments(product, tmp_path / "run"))
    assert "lens cap isn't recognised" in said
    assert "aaa.png" in caplog.text
    summary = json.loads((tmp_path / "run" / "train.json").read_text())
    assert (summary["images"]["learned"], summary["images"]["refused"]) == (4, 2)
    assert set(summary["refused"]) == {f"train/good/{name}" for name in broken}
    assert summary["patch_size"]["mm"] is None
    assert len(summary["suspects"]) == 4
    assert all((tmp_path / "run" / suspect["heatmap"]).is_file() for suspect in summary["suspects"])


def test_what_the_system_refuses_ends_in_one_message(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, expected, says in (
        (PermissionError(13, "Permission denied", "/locked"), 2, "/locked: Permission denied\n"),
        (OSError(5, "Input/output error"), 4, "error: Input/output error\n"),
        (OSError("odd"), 2, "error: odd\n"),
        (torch.OutOfMemoryError("CUDA out of memory."), 2, "--set batch_size=1"),
    ):

        def fail(_: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(explain, "run_layers", fail)
        code, out, err = command("layers", ["--backbone", "resnet18"])
        assert (code, out, says in err, err.count("\n")) == (expected, "", True, 1), err


def test_a_mark_on_a_cropped_oblong_image_comes_back_at_its_pixel(
    product: Path, tmp_path: Path, says: Says
) -> None:
    run = tmp_path / "run"
    settings = ["image.resize=96", "image.crop=80", "backbone.layers=[layer1]"]
    arguments = train_arguments(product, run, *settings, "image.mm_per_pixel=0.05")
    said = says(0, "train", [*arguments, "--no-calibrate"])
    assert "one patch covers 4 × 5 original pixels, " in said
    said = json.loads((run / "train.json").read_text())["patch_size"]
    assert said == {"pixels": [4, 5], "mm": [0.2, 0.25]}
    detector = load_model(run, "cpu")
    for mark in [(20, 40), (60, 75), (40, 90)]:
        write_part(tmp_path / "marked.png", seed=7, mark=mark)
        anomaly_map = detector.predict(tmp_path / "marked.png").anomaly_map
        assert anomaly_map.shape == (96, 120)
        assert np.isnan(anomaly_map[:8]).all()
        assert not np.isnan(anomaly_map[8:88, 10:110]).any()
        row, column = np.unravel_index(np.nanargmax(anomaly_map), anomaly_map.shape)
        assert abs(row - (mark[0] + 4.5)) <= 6  # a patch is 4 pixels high
        assert abs(column - (mark[1] + 4.5)) <= 6  # and 5 wide


def test_scripts_are_the_commands(product: Path, resnet_folder: Path, tmp_path: Path) -> None:
    """From another folder, without any OpenMP workaround; scoring needs no compiler of torch."""
    scripts = {f.stem: f.read_text() for f in (REPOSITORY / "scripts").glob("*.py")}
    assert scripts.keys() == {"train", "infer", "evaluate"}
    alike = {text.replace(name, "infer") for name, text in scripts.items()}
    assert alike == {scripts["infer"]}
    code = (
        "import runpy, sys\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0, stop\n"
        "assert 'torch' in sys.modules\nassert 'torch._dynamo' not in sys.modules"
    )
    arguments = [
        REPOSITORY / "scripts" / "infer.py", "--model", resnet_folder,
        "--input", product / "test" / "spot" / "000.png", "--output", "out",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "KMP_DUPLICATE_LIB_OK"}
    code = f"import sys; del sys.argv[0]\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(table(tmp_path / "out")) == 1


def test_an_existing_output_is_refused_without_overwrite(
    run_folder: Path, inferred: Path, evaluated: Path, product: Path, tmp_path: Path,
    says: Says, command: Command,
) -> None:  # fmt: skip
    for made, name in ((run_folder, "run"), (inferred, "out"), (evaluated, "figures")):
        shutil.copytree(made, tmp_path / name)
    train = train_arguments(product, tmp_path / "run")
    infer = ["--model", run_folder, "--input", product / "test", "--output", tmp_path / "out"]
    evaluate = ["--model", run_folder, "--output", tmp_path / "figures"]
    for name, arguments in (("train", train), ("infer", infer), ("evaluate", evaluate)):
        code, _, err = command(name, arguments)
        assert (code, "exist already" in err, "--overwrite" in err) == (2, True, True), err
    says(0, "train", [*train, "--overwrite"])
    manifests = [folder / "model" / "manifest.json" for folder in (run_folder, tmp_path / "run")]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "model",
        "suspects",
        "train.json",
    ]
    (tmp_path / "out" / "notes.txt").write_text("mine")
    says(0, "infer", [*infer, "--overwrite"])
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_split_that_leaves_figures_undefined_says_why(
    run_folder: Path, product: Path, tmp_path: Path, says: Says
) -> None:
    moved = Path(shutil.copytree(product, tmp_path / "data" / product.name))
    shutil.rmtree(moved / "test" / "spot")
    run = shutil.copytree(run_folder, tmp_path / "run")
    with_data(run, moved)
    evaluate = ["--model", run, "--output", tmp_path / "figures"]
    said = says(0, "evaluate", evaluate)
    text = (tmp_path / "figures" / "metrics.json").read_text()
    figures = json.loads(text)["categories"]["disc"]
    assert figures["image_auroc"] is None
    assert figures["pixel_auroc"] is None
    assert "defect" in figures["undefined"]["image_auroc"]
    assert "undefined" in said
    assert "disc: no pixel figures: no defective image with a ground-truth mask" in said
    assert "pixel_auroc, " not in said
    shutil.rmtree(moved / "test")
    assert "has no test images" in says(2, "evaluate", [*evaluate, "--overwrite"])
    assert (tmp_path / "figures" / "metrics.json").read_text() == text


def test_training_mistakes_end_in_one_message(
    product: Path, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "broken" / "train" / "good"
    folder.mkdir(parents=True)
    for name in ("a.png", "b.png"):
        (folder / name).write_text(f"no image: {name}")
    for overrides, says in (
        (["data.root=null"], "data.root isn't set"),
        (["data.category=dsic"], "did you mean 'disc'?"),
        (["backbone.name=resnet19"], "did you mean 'resnet18'"),
        (["backbone.layers=[layer9]"], "did you mean 'layer"),
        (["model.kind=padim", "model.dimensions=5000"], "5000"),
        ([f"data.root={tmp_path}", "data.category=broken"], "can be used"),
    ):
        code, _, err = command("train", train_arguments(product, tmp_path / "run", *overrides))
        aside = "warning", "features:"  # a busy machine shows its progress
        lines = [line for line in err.splitlines() if not line.startswith(aside)]
        assert (code, lines[0].startswith("error: "), says in err) == (2, True, True), err
        assert "Traceback" not in err
        assert not (tmp_path / "run").exists()


def test_a_model_folder_that_holds_more_or_no_model_is_refused(
    run_folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(run_folder / "model", tmp_path / "model"))
    (model / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match="isn't part of the model"):
        load_model(model, "cpu")
    (model / "manifest.json").unlink()
    with pytest.raises(ModelError, match="holds no model"):
        load_model(model, "cpu")


def test_a_model_that_cannot_be_loaded_leaves_earlier_results(
    run_folder: Path, product: Path, inferred: Path, explained: Path, evaluated: Path,
    tmp_path: Path, says: Says,
) -> None:  # fmt: skip
    run = Path(shutil.copytree(run_folder, tmp_path / "damaged"))
    (run / "model" / "scorer.safetensors").write_bytes(b"damaged")
    damaged = ["--model", run, "--overwrite"]
    folder = product / "test" / "spot"
    for name, made, more in (
        ("infer", inferred, ["--input", folder]),
        ("infer", inferred, ["--input", folder, "--watch"]),
        ("explain", explained, [folder / "000.png"]),
        ("evaluate", evaluated, []),
    ):
        output = Path(shutil.copytree(made, tmp_path / "out"))
        assert "scorer.safetensors" in says(2, name, [*damaged, *more, "--output", output])
        assert contents(output) == contents(made)
        shutil.rmtree(output)


def test_options_have_help_may_be_repeated_and_their_examples_are_commands() -> None:
    for name, about in COMMANDS.items():
        parser = argparse.ArgumentParser()
        for add in about.options:
            add(parser)
        assert [action.dest for action in parser._actions if not action.help] == []
        for action in parser._actions:
            if action.nargs in ("+", "*") and action.option_strings:
                first, second = [*(action.choices or "12")][:2]
                both = [action.option_strings[0], first, action.option_strings[0], second]
                alone = argparse.ArgumentParser()
                alone._add_action(action)
                values = vars(alone.parse_args(both))[action.dest]
                assert [str(value) for value in values] == [first, second], action.option_strings
        for line in about.examples:
            command, *arguments = shlex.split(line.partition(" > ")[0])
            assert command == name
            parser.parse_args(arguments)  # exits where it can't


def test_a_user_without_name_or_home(
    run_folder: Path, product: Path, tmp_path: Path, says: Says,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", run_folder, "--input", product / "test" / "good", "--output", "out"]
    says(0, "infer", arguments)
    assert "~/run" in says(2, "infer", ["--model", "~/run", *arguments[2:]])
    assert all(folder.parts[0] != "~" for folder in search_folders())
    assert not Path("~").exists()
