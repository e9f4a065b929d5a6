"""The three commands from end to end, and every bad input with its one clear message."""

import argparse
import csv
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import REPOSITORY, RUNS, Command, train_arguments, write_part, write_product
from picture_files import lossless_forms, written

from anomaly import cli
from anomaly.backbones.weights import search_folders
from anomaly.cli import COMMANDS
from anomaly.line.record import Record


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("kind", RUNS)
def test_train_infer_evaluate(
    kind: str, request: pytest.FixtureRequest, product: Path, tmp_path: Path, command: Command
) -> None:
    run = request.getfixturevalue(RUNS[kind])
    summary = json.loads((run / "train.json").read_text())
    assert summary["kind"] == kind
    assert summary["images"] == {
        "learned": 12,
        "grey": 0,
        "behind_thresholds": 12,
        "refused": 0,
    }
    assert summary["peak_memory_bytes"] > 50e6
    assert summary["seconds"]["total"] > 0
    assert (summary["bank_vectors"] is None) == (kind != "patchcore")

    code, out, _ = command(
        "infer", ["--model", run, "--input", product / "test", "--output", tmp_path / "out"]
    )
    assert code == 0
    assert "6 of 6 images scored" in out
    rows = _rows(tmp_path / "out" / "results.csv")
    lines = (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["path"] for line in lines] == [row["path"] for row in rows]
    assert len(rows) == 6
    scores = [float(row["image_score"]) for row in rows]
    assert max(scores[:3]) < min(scores[3:])  # good/…, then spot/…
    for row in rows:
        assert row["status"] == "ok"
        assert row["threshold_label"] == "calibrated"
        assert row["model_id"] == summary["model_id"]
        rejected = float(row["image_score"]) > float(row["threshold"])
        assert row["verdict"] == ("reject" if rejected else "good")
        picture = cv2.imread(str(tmp_path / "out" / row["heatmap"]))
        assert picture.shape == (96, 120, 3)
    assert all(row["verdict"] == "reject" for row in rows[3:])

    code, out, _ = command("evaluate", ["--model", run, "--output", tmp_path / "figures"])
    assert code == 0
    metrics = json.loads((tmp_path / "figures" / "metrics.json").read_text())
    figures = metrics["categories"]["disc"]
    assert figures["image_auroc"] == metrics["mean"]["image_auroc"] == 1.0
    assert figures["pixel_auroc"] > 0.9
    assert (figures["n_good"], figures["n_defect"]) == (3, 3)
    assert "disc" in out
    assert len(_rows(tmp_path / "figures" / "scores.csv")) == 6


def test_the_same_picture_in_every_lossless_form_has_the_same_score(
    product: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    picture = cv2.imread(str(product / "test" / "spot" / "001.png"))
    for i, data in enumerate(lossless_forms(np.ascontiguousarray(picture[..., ::-1]))):
        written(tmp_path, data, f"{i:02}.png")
    output = tmp_path / "out"
    base = ["--model", run_folder, "--input", tmp_path, "--output", output]
    assert command("infer", base)[0] == 0
    scores = [float(row["image_score"]) for row in _rows(output / "results.csv")]
    assert len(scores) == 16
    assert max(scores) > 0
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "pixels"),
    [
        # 96 × 120 pixels are seen as 64 × 64, and a patch of ResNet-18's layer2 has 8 × 8 of them.
        ([], [12, 15]),
        (["image.resize=96", "image.crop=64"], [8, 10]),
        (["image.tile=64"], [8, 8]),
        (["image.tile=64", "image.area=32"], [16, 16]),
        (["backbone.layers=[layer1]"], [6, 7.5]),
    ],
)
def test_what_one_patch_covers(
    settings: list[str], pixels: list[float], product: Path, tmp_path: Path, command: Command
) -> None:
    arguments = train_arguments(product, tmp_path / "run", *settings, "image.mm_per_pixel=0.05")
    code, out, err = command("train", [*arguments, "--no-calibrate"])
    assert code == 0, err
    said = json.loads((tmp_path / "run" / "train.json").read_text())["patch_size"]
    assert said == {"pixels": pixels, "mm": pytest.approx([0.05 * side for side in pixels])}
    assert f"one patch covers {pixels[0]:.0f} × {pixels[1]:.0f} original pixels, " in out


def test_few_images_dont_show_what_is_usual(tmp_path: Path, command: Command) -> None:
    for count, says in ((7, True), (8, False)):
        product = write_product(tmp_path / f"part{count}", n_train=count)
        code, out, _ = command("train", train_arguments(product, tmp_path / f"run{count}"))
        assert (code, "lens cap isn't recognised" in out) == (0, says)
    summary = json.loads((tmp_path / "run8" / "train.json").read_text())
    assert summary["patch_size"]["mm"] is None


def test_long_names_among_the_suspects(tmp_path: Path, command: Command) -> None:
    product = write_product(tmp_path / "disc", n_train=0)
    for i in range(4):
        write_part(tmp_path / "part.png", seed=i)
        name = f"{i}" + ("検査画像" * 20 + "不良" if i % 2 else "x" * 250) + ".png"
        target = product / "train" / "good" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "part.png").rename(target)
    assert command("train", train_arguments(product, tmp_path / "run"))[0] == 0
    suspects = json.loads((tmp_path / "run" / "train.json").read_text())["suspects"]
    assert len(suspects) == 4
    assert all((tmp_path / "run" / suspect["heatmap"]).is_file() for suspect in suspects)


def test_what_the_system_refuses_ends_in_one_message(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from anomaly.cli import layers

    for error, code, says in (
        (
            PermissionError(13, "Permission denied", "/locked/file"),
            2,
            "/locked/file: Permission denied",
        ),
        (OSError(5, "Input/output error"), 4, "Input/output error"),
        (OSError("odd"), 2, "odd"),
    ):

        def fail(_: object, error: OSError = error) -> int:
            raise error

        monkeypatch.setattr(layers, "run", fail)
        assert command("layers", ["--backbone", "resnet18"]) == (code, "", f"error: {says}\n")
    long = tmp_path / ("x" * 300)
    code, _, err = command("infer", ["--model", long, "--input", long, "--output", long])
    assert (code, err.count("\n"), "File name too long" in err) == (2, 1, True)
    code, _, err = command("check", ["--config", "folder.yaml", "--set", f"data.root={long}"])
    assert (code, err.count("\n"), "File name too long" in err) == (2, 1, True)


def test_a_mark_on_a_cropped_oblong_image_comes_back_at_its_pixel(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    import torch

    from anomaly.scoring.prediction import Prediction
    from anomaly.storage.load import load_model

    output = tmp_path / "run"
    overrides = ["image.resize=96", "image.crop=80", "backbone.layers=[layer1]"]
    assert command("train", train_arguments(product, output, *overrides))[0] == 0
    detector = load_model(output, torch.device("cpu"))
    for mark in [(20, 40), (60, 75), (40, 90)]:
        write_part(tmp_path / "marked.png", seed=7, mark=mark)
        (result,) = detector.predict([tmp_path / "marked.png"])
        assert isinstance(result, Prediction)
        anomaly_map = result.anomaly_map
        assert anomaly_map.shape == (96, 120)
        assert np.isnan(anomaly_map[:8]).all()
        assert not np.isnan(anomaly_map[8:88, 10:110]).any()
        row, column = np.unravel_index(np.nanargmax(anomaly_map), anomaly_map.shape)
        assert abs(row - (mark[0] + 4.5)) <= 6  # a patch is 4 pixels high
        assert abs(column - (mark[1] + 4.5)) <= 6  # and 5 wide


def test_scripts_are_the_commands(product: Path, run_folder: Path, tmp_path: Path) -> None:
    """In a process of its own, from another folder, without any OpenMP workaround."""
    environment = {k: v for k, v in os.environ.items() if k != "KMP_DUPLICATE_LIB_OK"}
    for script in (REPOSITORY / "scripts").glob("*.py"):
        shown = subprocess.run(
            [sys.executable, script, "--help"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
    done = subprocess.run(
        [
            sys.executable, REPOSITORY / "scripts" / "infer.py", "--model", run_folder,
            "--input", product / "test" / "spot" / "000.png", "--output", "out", "--threads", "2",
        ],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(_rows(tmp_path / "out" / "results.csv")) == 1


def test_an_existing_output_is_refused_without_overwrite(
    product: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "run"
    assert command("train", train_arguments(product, output))[0] == 0
    before = (output / "model" / "manifest.json").read_bytes()
    code, _, err = command("train", train_arguments(product, output))
    assert (code, "exist already" in err, "--overwrite" in err) == (2, True, True)
    assert command("train", [*train_arguments(product, output), "--overwrite"])[0] == 0
    assert (output / "model" / "manifest.json").read_bytes() == before
    assert sorted(p.name for p in output.iterdir()) == ["model", "suspects", "train.json"]

    infer = ["--model", output, "--input", product / "test", "--output", tmp_path / "out"]
    assert command("infer", infer)[0] == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert command("infer", infer)[0] == 2
    assert command("infer", [*infer, "--overwrite"])[0] == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"

    evaluate = ["--model", output, "--output", tmp_path / "figures"]
    assert command("evaluate", evaluate)[0] == 0
    assert command("evaluate", evaluate)[0] == 2
    assert command("evaluate", [*evaluate, "--overwrite"])[0] == 0


def test_bad_files_have_rows_and_the_rest_goes_on(
    product: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    inputs = tmp_path / "inputs"
    shutil.copytree(product / "test" / "good", inputs)
    (inputs / "cut.png").write_bytes((inputs / "000.png").read_bytes()[:900])
    (inputs / "text.png").write_text("not an image")
    code, out, _ = command(
        "infer", ["--model", run_folder, "--input", inputs, "--output", tmp_path / "out"]
    )
    assert code == 3
    assert "3 of 5 images scored" in out
    rows = {Path(r["path"]).name: r for r in _rows(tmp_path / "out" / "results.csv")}
    assert rows["cut.png"]["status"] == "unreadable"
    assert rows["cut.png"]["image_score"] == rows["cut.png"]["verdict"] == ""
    assert "cut.png" in rows["cut.png"]["reason"]
    assert rows["text.png"]["status"] in ("unreadable", "unsupported")
    code, _, _ = command(
        "infer",
        ["--model", run_folder, "--input", inputs / "cut.png", "--output", tmp_path / "none"],
    )
    assert code == 2


def test_padim_refuses_an_image_of_another_shape_and_goes_on(
    product: Path, padim_folder: Path, tmp_path: Path, command: Command
) -> None:
    inputs = tmp_path / "inputs"
    shutil.copytree(product / "test" / "good", inputs)
    cv2.imwrite(str(inputs / "tall.png"), np.full((300, 90, 3), 90, np.uint8))
    code, _, _ = command(
        "infer", ["--model", padim_folder, "--input", inputs, "--output", tmp_path / "out"]
    )
    assert code == 3
    rows = {Path(r["path"]).name: r for r in _rows(tmp_path / "out" / "results.csv")}
    assert rows["tall.png"]["status"] == "unsupported"
    assert "patchcore" in rows["tall.png"]["reason"]
    assert rows["000.png"]["status"] == "ok"


def test_pictures_of_images_with_one_name_are_kept_apart(
    product: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    source = product / "test" / "good" / "000.png"
    for name in ("a/x.png", "b/x.png", "a/x.PNG", "a/x.bmp", "a/x.bmp.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(source, tmp_path / name)
    code, _, _ = command(
        "infer",
        [
            "--model",
            run_folder,
            "--input",
            tmp_path / "a",
            tmp_path / "b",
            "--output",
            tmp_path / "o",
        ],
    )
    assert code == 0
    pictures = [row["heatmap"] for row in _rows(tmp_path / "o" / "results.csv")]
    assert len(set(pictures)) == 5
    assert "heatmaps/a/x.png" in pictures
    assert "heatmaps/b/x.png" in pictures
    assert all((tmp_path / "o" / picture).is_file() for picture in pictures)


def test_a_split_that_leaves_figures_undefined_says_why(tmp_path: Path, command: Command) -> None:
    product = write_product(tmp_path / "data" / "disc")
    output = tmp_path / "run"
    assert command("train", train_arguments(product, output))[0] == 0
    shutil.move(product / "test" / "spot", tmp_path / "spot")
    code, out, _ = command("evaluate", ["--model", output, "--output", tmp_path / "no_defects"])
    figures = json.loads((tmp_path / "no_defects" / "metrics.json").read_text())["categories"][
        "disc"
    ]
    assert code == 0
    assert figures["image_auroc"] is None
    assert figures["pixel_auroc"] is None
    assert "defect" in figures["undefined"]["image_auroc"]
    assert "undefined" in out
    assert "disc: no pixel figures: no defective image with a ground-truth mask" in out
    assert "pixel_auroc, " not in out
    shutil.move(tmp_path / "spot", product / "test" / "spot")
    shutil.rmtree(product / "test" / "good")
    assert command("evaluate", ["--model", output, "--output", tmp_path / "no_good"])[0] == 0
    figures = json.loads((tmp_path / "no_good" / "metrics.json").read_text())["categories"]["disc"]
    assert figures["image_auroc"] is None
    assert "good" in figures["undefined"]["image_auroc"]
    assert figures["pixel_auroc"] is not None
    shutil.rmtree(product / "test")
    code, _, err = command("evaluate", ["--model", output, "--output", tmp_path / "none"])
    assert (code, "has no test images" in err) == (2, True)
    assert not (tmp_path / "none" / "metrics.json").exists()


def _train_with(product: Path, output: Path, *overrides: str) -> list[object]:
    return train_arguments(product, output, *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.root=null"], "data.root isn't set"),
        (["data.root=/nowhere/at/all"], "mvtec.com"),
        (["data.category=dsic"], "did you mean 'disc'?"),
        (["data.category=empty"], "no training images"),
        (["backbone.name=resnet19"], "did you mean 'resnet18'"),
        (["backbone.layers=[layer9]"], "did you mean 'layer"),
        (["backbone.weights=/nowhere.pth"], "doesn't exist"),
        (["model.kind=padim", "model.dimensions=5000"], "5000"),
        (["model.coreset_size=100000000"], "100000000"),
        (["image.aera=3"], "did you mean 'area'"),
        (["model.coreset_ratio=0"], "must be above 0"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)
def test_training_mistakes_end_in_one_message(
    product: Path, tmp_path: Path, command: Command, overrides: list[str], says: str
) -> None:
    (product.parent / "empty" / "train" / "good").mkdir(parents=True, exist_ok=True)
    output = tmp_path / "run"
    code, _, err = command("train", train_arguments(product, output, *overrides))
    aside = "warning", "features:"  # a busy machine shows its progress
    lines = [line for line in err.splitlines() if not line.startswith(aside)]
    assert code == 2
    assert lines[0].startswith("error: ")
    assert says in err
    assert "Traceback" not in err
    assert not output.exists()


def test_no_usable_training_image(tmp_path: Path, command: Command) -> None:
    good = tmp_path / "disc" / "train" / "good"
    good.mkdir(parents=True)
    (good / "a.png").write_text("no image")
    (good / "b.png").write_text("no image either")
    code, _, err = command("train", train_arguments(tmp_path / "disc", tmp_path / "run"))
    assert code == 2
    assert "can be used" in err
    assert not (tmp_path / "run").exists()


def test_broken_training_images_are_skipped_and_listed(
    tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    product = write_product(tmp_path / "disc")
    for name in ("aaa.png", "bbb.png", "zzz.png"):
        (product / "train" / "good" / name).write_text("no image")
    code, _, _ = command("train", train_arguments(product, tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "train.json").read_text())
    assert code == 3
    assert summary["images"]["refused"] == 3
    assert summary["images"]["learned"] == 12
    assert set(summary["refused"]) == {f"train/good/{n}.png" for n in ("aaa", "bbb", "zzz")}
    assert "aaa.png" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: (m / "scorer.safetensors").unlink(), "lacks scorer.safetensors"),
        (lambda m: (m / "config.yaml").write_text("seed: 5\n"), "another size"),
        (lambda m: _flip(m / "scorer.safetensors"), "changed since"),
        (lambda m: (m / "notes.txt").write_text("hello"), "isn't part of the model"),
        (lambda m: (m / "manifest.json").write_text("{"), "isn't JSON"),
        (lambda m: (m / "manifest.json").write_text('{"format": "other/3"}'), "isn't a manifest"),
        (lambda m: (m / "manifest.json").unlink(), "holds no model"),
        (lambda m: shutil.rmtree(m.parent), "no model at "),
    ],
)  # fmt: skip
def test_a_spoilt_model_folder_is_refused(
    run_folder: Path, product: Path, tmp_path: Path, command: Command, spoil: object, says: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    spoil(run / "model")  # type: ignore[operator]
    for name, rest in (("infer", ["--input", product / "test"]), ("evaluate", [])):
        code, _, err = command(name, ["--model", run, *rest, "--output", tmp_path / name])
        assert code == 2
        assert says in err
        assert "Traceback" not in err
    assert not list(tmp_path.glob("infer/*.csv"))


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_other_mistakes_on_the_command_line(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    model = ["--model", run_folder, "--output", tmp_path / "out"]
    code, _, err = command("infer", [*model, "--input", tmp_path / "nowhere"])
    assert (code, "doesn't exist" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    code, _, err = command("infer", [*model, "--input", tmp_path / "empty"])
    assert (code, "no images in" in err) == (2, True)
    code, _, err = command("infer", [*model, "--input", product, "--threads", "0"])
    assert (code, "--threads is 0" in err) == (2, True)
    code, _, err = command("train", ["--config", "nowhere.yaml"])
    assert (code, "no config nowhere.yaml" in err) == (2, True)
    code, _, err = command("trian", [])
    assert (code, err.partition("'train'")[0]) == (
        2,
        "error: there is no command 'trian'; did you mean ",
    )
    for mistyped in (["--ouput", "x"], ["--ouput=x"]):
        code, _, err = command("infer", [*model[:2], "--input", product, *mistyped])
        assert (code, "no option --ouput; did you mean '--output'" in err) == (2, True)
    wrong = ["--model", run_folder, "--output", tmp_path / "x", "--input", product / "tset"]
    code, _, err = command("infer", wrong)
    assert (code, f"in {product} did you mean 'test'?" in err) == (2, True)
    wrong = ["--model", run_folder.with_name("dics"), "--output", tmp_path / "x"]
    code, _, err = command("evaluate", wrong)
    assert (code, "did you mean 'disc'" in err) == (2, True)
    moved = tmp_path / "moved"
    shutil.copytree(run_folder / "model", moved)
    code, _, err = command("evaluate", ["--model", moved, "--output", tmp_path / "e"])
    assert (code, "--data-root" in err) == (2, True)
    code, _, _ = command(
        "evaluate", ["--model", moved, "--output", tmp_path / "e", "--data-root", product.parent]
    )
    assert code == 0


def test_help_is_quick_and_bare_call_explains() -> None:
    code = (
        "import sys; from anomaly.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    )
    code += "assert not {'torch', 'cv2', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_scoring_does_without_torchs_compiler(
    resnet_folder: Path, product: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from anomaly.cli import main\nassert main(sys.argv[1:]) == 0\n"
        "assert 'torch' in sys.modules\nassert 'torch._dynamo' not in sys.modules"
    )
    image = product / "test" / "spot" / "000.png"
    options = ["infer", "--model", resnet_folder, "--input", image, "--output", tmp_path / "o"]
    subprocess.run([sys.executable, "-c", code, *options], check=True, capture_output=True)


def test_modules_of_annexes_that_the_core_names_exist() -> None:
    """They are imported by name, so that nothing else notices one that has moved."""
    sources = [file.read_text("utf-8") for file in Path(cli.__file__).parent.glob("*.py")]
    named = {name for text in sources for name in re.findall(r'annex\("([a-z_.]+)"\)', text)}
    assert "cluster.actors" in named
    for name in named:
        assert importlib.util.find_spec(f"anomaly.{name}") is not None, name


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_takes_several_values_may_be_repeated(name: str) -> None:
    parser = argparse.ArgumentParser()
    cli._add_options(name, parser)
    for action in parser._actions:
        if action.nargs in ("+", "*") and action.option_strings:
            both = [action.option_strings[0], "1", action.option_strings[0], "2"]
            alone = argparse.ArgumentParser()
            alone._add_action(action)
            values = vars(alone.parse_args(both))[action.dest]
            assert [str(value) for value in values] == ["1", "2"], action.option_strings


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_commands_help_are_commands(name: str) -> None:
    for line in COMMANDS[name][1:]:
        arguments = shlex.split(line.partition(" > ")[0])
        assert arguments[0] == name
        cli._parser(name).parse_args(arguments)  # exits where it can't


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    parser = argparse.ArgumentParser()
    cli._add_options(name, parser)
    assert [action.dest for action in parser._actions if not action.help] == []


def test_a_user_without_name_or_home(
    run_folder: Path, product: Path, tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", run_folder, "--input", product / "test" / "good", "--output", "out"]
    assert command("infer", arguments)[0] == 0
    Record(Path("line.sqlite")).close()
    judged = ["--verdict", "good", "--images", product / "test" / "good" / "000.png"]
    assert command("feedback", ["--record", "line.sqlite", *judged])[0] == 0
    code, _, err = command("infer", ["--model", "~/run", *arguments[2:]])
    assert (code, "~/run" in err) == (2, True)
    assert all(folder.parts[0] != "~" for folder in search_folders())
    assert not Path("~").exists()
