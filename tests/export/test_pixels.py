"""Graphs from pixels to the verdict, in other programs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import REPOSITORY, run_command, train_arguments
from kit import bgr

import anomaly
from anomaly.backbones.engine import Graph
from anomaly.errors import DataError, ModelError
from anomaly.export.commands import VERDICTS, pixel_comparisons, proven_equal
from anomaly.export.graph import write_graph
from anomaly.storage.models import load_model

EXAMPLES = REPOSITORY / "examples"
REGION = "image.region={polygons: [[[0.1, 0.1], [0.8, 0.1], [0.8, 0.9]]]}"


@pytest.fixture(scope="module")
def exported(product: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A PatchCore run and its export for ONNX Runtime."""
    folder = tmp_path_factory.mktemp("pixels")
    run_command("train", train_arguments(product, folder / "run", REGION))
    return folder / "run", export(folder, product, "onnx")


def export(folder: Path, product: Path, engine: str, *more: object) -> Path:
    run, output = folder / "run", folder / "export"
    camera = ["--pixels", "120x96", "--golden", product / "test", *more]
    run_command("export", ["--model", run, "--to", engine, "--output", output, *camera])
    return output / "model"


@pytest.fixture
def picture(product: Path, tmp_path: Path) -> Path:
    """A defect as a PPM file."""
    file = tmp_path / "part.ppm"
    cv2.imwrite(str(file), np.asarray(cv2.imread(str(product / "test" / "spot" / "000.png"))))
    return file


def check_said(said: str, run: Path, picture: Path) -> None:
    verdict, score, reason, highest = said.split()
    expected = anomaly.load(run, "cpu", "fp32").predict(bgr(cv2.imread(str(picture))))
    assert (verdict, reason) == (expected.verdict, "0")
    assert float(score) == pytest.approx(expected.score, rel=1e-4)
    assert float(highest) == pytest.approx(np.nanmax(expected.anomaly_map), rel=1e-4)


def test_in_python(exported: tuple[Path, Path], picture: Path) -> None:
    script = EXAMPLES / "verdict.py"
    assert "anomaly." not in script.read_text()
    command = [sys.executable, script, exported[1] / "whole.onnx", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_said(done.stdout, exported[0], picture)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["verdict.cpp", "verdict.c"])
def test_in_c_and_cpp(source: str, exported: tuple[Path, Path], picture: Path) -> None:
    is_c = source.endswith(".c")
    compiler, found = shutil.which("gcc" if is_c else "g++"), importlib.util.find_spec("openvino")
    folder = Path(found.origin).parent if found and found.origin else Path()
    library = "libopenvino_c.so*" if is_c else "libopenvino.so*"
    libraries = sorted((folder / "libs").glob(library))
    if compiler is None or not libraries or not (folder / "include").is_dir():
        pytest.skip("needs a compiler, and OpenVINO's headers and library")
    program = picture.parent / "verdict"
    subprocess.run(
        [compiler, "-std=c11" if is_c else "-std=c++17", "-Wall", "-Wextra", "-Werror",
         EXAMPLES / source, "-isystem", folder / "include", libraries[0], "-lm",
         f"-Wl,-rpath,{folder / 'libs'}", "-o", program], check=True,
    )  # fmt: skip
    command = [program, exported[1] / "whole.onnx", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_said(done.stdout, exported[0], picture)
    wrong = subprocess.run([program, command[1], __file__], capture_output=True, text=True)
    assert (wrong.returncode, "isn't a PPM file" in wrong.stderr) == (1, True)


@pytest.mark.slow
def test_in_javascript(exported: tuple[Path, Path], picture: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    # Without scripts: they fetch libraries for GPUs from elsewhere.
    install = [npm, "install", "--ignore-scripts", "--prefix", picture.parent, "onnxruntime-node"]
    if subprocess.run(install, capture_output=True, cwd=picture.parent).returncode:
        pytest.skip("needs onnxruntime-node from npm")
    command = [node, EXAMPLES / "verdict.js", exported[1] / "whole.onnx", picture]
    modules = {"NODE_PATH": str(picture.parent / "node_modules")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | modules, check=True
    )
    check_said(done.stdout, exported[0], picture)


def check_graph(run: Path, export: Path, images: list[Path]) -> list[str]:
    """See that verdicts, scores, maps and patch scores are those of the files; gives verdicts."""
    said = json.loads((export / "export.json").read_text())
    graph = Graph(export / said["whole"]["file"], said["engine"], 2)
    expected = anomaly.load(run, "cpu", "fp32").predict(images)
    pixels = [np.asarray(cv2.imread(str(file)))[..., ::-1] for file in images]
    for batch in (1, len(images)):
        for one, values, verdict, score, reason, shown, patches in zip(
            expected[:batch], pixels, *graph(np.stack(pixels[:batch])), strict=False
        ):
            assert values.shape[:2] == one.anomaly_map.shape
            assert VERDICTS[verdict] == one.verdict
            assert (reason > 0) == bool(one.reason)
            assert score == pytest.approx(one.score, rel=1e-4)
            scale = np.nanmax(one.anomaly_map)
            np.testing.assert_allclose(shown, one.anomaly_map, atol=1e-4 * scale)
            np.testing.assert_allclose(patches, one.patch_scores, atol=1e-4 * scale)
    return [one.verdict for one in expected]


def test_the_graph_says_what_infer_says_of_files(
    exported: tuple[Path, Path], product: Path
) -> None:
    images = sorted((product / "test").rglob("*.png"))
    assert set(check_graph(*exported, images)) == {"good", "reject"}


def test_foreign_images_are_for_review_where_no_score_is_rejected(
    product: Path, tmp_path: Path
) -> None:
    """Blank, dark and without contrast; in OpenVINO, with Gaussians, a crop and blue first."""
    settings = ["model.kind=padim", "image.resize=64", "image.crop=48"]
    settings += ["model.image_score=map_top_relative"]
    run_command("train", train_arguments(product, tmp_path / "run", *settings))
    loose = anomaly.load(tmp_path / "run", "cpu").calibrate(threshold=1e9, force=True)
    loose.save(tmp_path / "run" / "model", overwrite=True)
    images = sorted((product / "test" / "good").iterdir())
    for name, value in (("blank", 0.0), ("dark", 0.2), ("flat", 0.02)):
        picture = np.asarray(cv2.imread(str(images[0])), np.float64)
        changed = 20 + value * (picture - 20) if name == "flat" else value * picture
        cv2.imwrite(str(tmp_path / f"{name}.png"), changed.astype(np.uint8))
        images.append(tmp_path / f"{name}.png")
    model = export(tmp_path, product, "openvino")
    verdicts = check_graph(tmp_path / "run", model, images)
    assert verdicts == ["good"] * 3 + ["review"] * 3
    before = signal.signal(signal.SIGINT, lambda *_: verdicts.clear())
    signal.raise_signal(signal.SIGINT)  # handled, though the engine has prepared AMX
    signal.signal(signal.SIGINT, before)
    assert verdicts == []


def test_a_planted_difference_or_another_camera_is_no_export(
    exported: tuple[Path, Path], product: Path, tmp_path: Path
) -> None:
    model = load_model(exported[0], "cpu", "fp32")
    graph = Graph(exported[1] / "whole.onnx", "onnx", 1)
    images = sorted((product / "test" / "spot").iterdir())
    found = proven_equal(pixel_comparisons(model, graph, images, (96, 120)))
    assert found["largest_difference"] < 1e-4
    section = model.config.model.model_copy(update={"halo_damping": 0.6})
    config = model.config.model_copy(update={"model": section})
    with pytest.raises(ModelError, match="the export's scores differ"):
        proven_equal(pixel_comparisons(replace(model, config=config), graph, images, (96, 120)))
    with pytest.raises(DataError, match="have 8 bits and the camera's size"):
        proven_equal(pixel_comparisons(model, graph, images, (120, 96)))
    with pytest.raises(DataError, match="too thin"):
        write_graph(model, tmp_path, "onnx", (1000, 12))
