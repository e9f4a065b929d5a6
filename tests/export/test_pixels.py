"""Graphs from pixels to the verdict, in other programs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, SHARED, Command, MadeOnce, run_command, train_arguments

import anomaly
from anomaly.backbones.engine import Graph
from anomaly.calibration import thresholds_by_hand
from anomaly.errors import DataError, ModelError
from anomaly.export.equality import Camera, compare_pixels
from anomaly.export.graph import _Network
from anomaly.export.pixels import PixelsToVerdict
from anomaly.scoring.prediction import Prediction
from anomaly.storage.load import load_model

EXAMPLES = REPOSITORY / "examples"
CODES = {"good": 0, "review": 1, "reject": 2}


def exported(run: Path, output: Path, *more: object) -> Path:
    arguments = ["--model", run, "--output", output, "--threads", 2, *more]
    run_command("export", [str(one) for one in arguments])
    return output


@pytest.fixture(scope="module")
def pixel_export(run_folder: Path, product: Path, made_once: MadeOnce) -> Path:
    """The PatchCore run for ONNX Runtime, from pixels; read only."""
    golden = ["--to", "onnx", "--golden", product / "test", "--whole", "--pixels", "120x96"]
    return made_once("exports/pixels", lambda folder: exported(run_folder, folder, *golden))


@pytest.fixture
def picture(product: Path, tmp_path: Path) -> Path:
    """A defect as a PPM file, with its verdict by this program."""
    file = tmp_path / "part.ppm"
    cv2.imwrite(str(file), np.asarray(cv2.imread(str(product / "test" / "spot" / "000.png"))))
    return file


def check_said(said: str, run: Path, picture: Path) -> None:
    verdict, score, reason, highest = said.split()
    image = cv2.cvtColor(np.asarray(cv2.imread(str(picture))), cv2.COLOR_BGR2RGB)
    expected = anomaly.load(run, "cpu", "fp32").predict(image, channels="rgb")
    assert (verdict, reason) == (expected.verdict, "0")
    assert float(score) == pytest.approx(expected.score, rel=1e-4)
    assert float(highest) == pytest.approx(np.nanmax(expected.anomaly_map), rel=1e-4)


def test_in_python(pixel_export: Path, run_folder: Path, picture: Path) -> None:
    script = EXAMPLES / "verdict.py"
    assert "anomaly." not in script.read_text()
    command = [sys.executable, script, pixel_export / "model" / "whole.onnx", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_said(done.stdout, run_folder, picture)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["verdict.cpp", "verdict.c"])
def test_in_c_and_cpp(source: str, pixel_export: Path, run_folder: Path, picture: Path) -> None:
    is_c = source.endswith(".c")
    compiler, found = shutil.which("gcc" if is_c else "g++"), importlib.util.find_spec("openvino")
    folder = Path(found.origin).parent if found and found.origin else Path()
    library = "libopenvino_c.so*" if is_c else "libopenvino.so*"
    libraries = sorted((folder / "libs").glob(library))
    if compiler is None or not libraries or not (folder / "include").is_dir():
        pytest.skip("needs a compiler, and OpenVINO's headers and library")
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "SSE41":
        pytest.skip("OpenVINO can't resize between layers on processors below AVX2")
    program = picture.parent / "verdict"
    subprocess.run(
        [compiler, "-std=c11" if is_c else "-std=c++17", "-Wall", "-Wextra", "-Werror",
         EXAMPLES / source, "-isystem", folder / "include", libraries[0], "-lm",
         f"-Wl,-rpath,{folder / 'libs'}", "-o", program], check=True,
    )  # fmt: skip
    command = [program, pixel_export / "model" / "whole.onnx", picture]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_said(done.stdout, run_folder, picture)
    wrong = subprocess.run([program, command[1], __file__], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "isn't a PPM file" in wrong.stderr


@pytest.mark.slow
def test_in_javascript(pixel_export: Path, run_folder: Path, picture: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    # Without scripts: they fetch libraries for GPUs from elsewhere.
    install = [npm, "install", "--ignore-scripts", "--prefix", picture.parent, "onnxruntime-node"]
    if subprocess.run(install, capture_output=True, cwd=picture.parent).returncode:
        pytest.skip("needs onnxruntime-node from npm")
    done = subprocess.run(
        [node, EXAMPLES / "verdict.js", pixel_export / "model" / "whole.onnx", picture],
        capture_output=True, text=True,
        env=os.environ | {"NODE_PATH": str(picture.parent / "node_modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_said(done.stdout, run_folder, picture)


def graph_equals_files(run: Path, export: Path, images: list[Path], *, bgr: bool = False) -> None:
    """In batches of 1, 3 and 8, verdicts, scores, maps and patch scores are those of the files."""
    said = json.loads((export / "model" / "export.json").read_text())
    graph = Graph(export / "model" / said["whole"]["file"], said["engine"], "fp32", 2)
    model = load_model(run, "cpu", "fp32")
    found = sorted(model.score_all(images), key=lambda one: one.index)
    expected = [one for one in found if isinstance(one, Prediction)]
    pixels = [np.asarray(cv2.imread(str(file)))[..., :: 1 if bgr else -1] for file in images]
    for batch in (1, 3, 8):
        for start in range(0, len(images), batch):
            outputs = graph(np.stack(pixels[start : start + batch]))
            for one, verdict, score, reason, shown, patches in zip(
                expected[start : start + batch], *outputs, strict=True
            ):
                assert verdict == CODES[one.verdict]
                assert (reason > 0) == bool(one.reason)
                assert score == pytest.approx(one.score, rel=1e-4)
                scale = np.nanmax(one.anomaly_map)
                np.testing.assert_allclose(shown, one.anomaly_map, atol=1e-4 * scale)
                np.testing.assert_allclose(patches, one.patch_scores, atol=1e-4 * scale)


def test_the_graph_says_what_infer_says(
    pixel_export: Path, run_folder: Path, product: Path, tmp_path: Path
) -> None:
    """Of foreign images, too: blank, dark, without contrast."""
    images = sorted((product / "test").rglob("*.png"))
    for name, value in (("blank", 0.0), ("dark", 0.2), ("flat", 0.02)):
        picture = np.asarray(cv2.imread(str(images[0])), np.float64)
        changed = 20 + value * (picture - 20) if name == "flat" else value * picture
        cv2.imwrite(str(tmp_path / f"{name}.png"), changed.astype(np.uint8))
        images.append(tmp_path / f"{name}.png")
    graph_equals_files(run_folder, pixel_export, images)
    model = load_model(run_folder, "cpu", "fp32")
    # Where no score is rejected, the foreign ones are for review.
    assert model.thresholds is not None
    loose = replace(model, thresholds=thresholds_by_hand(model.thresholds.good, 1e9, 1e9))
    graph = PixelsToVerdict(loose, _Network(loose), Camera((96, 120), True))
    shown = np.stack([np.asarray(cv2.imread(str(image))) for image in images])
    with torch.inference_mode():
        verdicts, _, reasons, *_ = graph(torch.from_numpy(shown))
    assert verdicts.tolist() == (reasons > 0).tolist() == [0] * (len(images) - 3) + [1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
@pytest.mark.parametrize(
    "more",
    [
        ["model.kind=padim"],
        ["image.resize=64", "image.crop=48"],
        [
            "image.region={polygons: [[[0.1, 0.1], [0.8, 0.1], [0.8, 0.9]]]}",
            "model.image_score=max",
        ],
        ["model.image_score=map_top_relative", "model.turned_copies=quarter_turns"],
    ],
)
def test_methods_regions_and_scores(
    more: list[str], engine: str, product: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    assert command("train", train_arguments(product, run, *more))[0] == 0
    golden = ["--golden", product / "test", "--whole", "--pixels", "120x96", "--bgr"]
    export = exported(run, tmp_path / "export", "--to", engine, *golden)
    graph_equals_files(run, export, sorted((product / "test").rglob("*.png")), bgr=True)


def test_a_planted_difference_is_no_export(
    pixel_export: Path, run_folder: Path, product: Path
) -> None:
    model = load_model(run_folder, "cpu", "fp32")
    graph = Graph(pixel_export / "model" / "whole.onnx", "onnx", "fp32", 1)
    images = sorted((product / "test").rglob("*.png"))[:5]
    assert compare_pixels(model, graph, images, Camera((96, 120)), workers=1) < 1e-4
    section = model.config.model.model_copy(update={"halo_damping": 0.6})
    config = model.config.model_copy(update={"model": section})
    with pytest.raises(ModelError, match=r"scores of the graph from pixels differ"):
        compare_pixels(replace(model, config=config), graph, images, Camera((96, 120)), workers=1)
    with pytest.raises(DataError, match="none of 5 golden images has 8 bits and 96×120 pixels"):
        compare_pixels(model, graph, images, Camera((120, 96)), workers=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pixels", "120x96"], "add --whole"),
        (["--whole", "--bgr"], "add --pixels"),
        (["--whole", "--pixels", "120"], "isn't width x height"),
        (["--whole", "--pixels", "12x1000"], "too thin"),
    ],
)
def test_refusals(
    options: list[str], said: str, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "export"
    arguments = ["--model", run_folder, "--to", "onnx", "--output", output, *options]
    code, _, err = command("export", arguments)
    assert code == 2
    assert said in err
    assert not output.exists() or not (output / "model").exists()


@pytest.mark.skipif(not (SHARED / "data" / "casting").is_dir(), reason="needs ../shared/data")
@pytest.mark.slow
def test_castings_from_pixels(tmp_path: Path, command: Command) -> None:
    folder, run = SHARED / "data" / "casting", tmp_path / "run"
    values = (
        f"data.root={folder / 'train' / 'good'}",
        "precision=fp32",
        "model.coreset_ratio=0.02",
        "backbone.name=timm/tf_efficientnet_lite2",
    )
    settings = [part for value in values for part in ("--set", value)]
    arguments = ["--config", "folder.yaml", *settings]
    assert command("train", [*arguments, "--output", run])[0] == 0
    images = sorted((folder / "test").rglob("*.*"))[::8]
    height, width = np.asarray(cv2.imread(str(images[0]))).shape[:2]
    golden = tmp_path / "golden"
    golden.mkdir()
    for i, image in enumerate(images):
        shutil.copyfile(image, golden / f"{i:03}{image.suffix}")
    size = ["--golden", golden, "--whole", "--pixels", f"{width}x{height}"]
    export = exported(run, tmp_path / "export", "--to", "onnx", *size)
    graph_equals_files(run, export, sorted(golden.iterdir()))
