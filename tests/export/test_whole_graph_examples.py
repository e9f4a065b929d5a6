"""The examples that read a whole graph without this package give its patch scores."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import REPOSITORY

from anomaly.storage.load import load_model

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def picture(product: Path, tmp_path: Path) -> Path:
    """An image of the network's size, so that nothing is resized."""
    image = cv2.imread(str(product / "test" / "spot" / "000.png"))
    assert image is not None
    file = tmp_path / "part.ppm"
    cv2.imwrite(str(file), image[16:80, 28:92])
    file.write_bytes(file.read_bytes().replace(b"P6\n", b"P6\n# from a camera\n", 1))
    return file


def check(said: str, run_folder: Path, picture: Path) -> None:
    image = cv2.cvtColor(np.asarray(cv2.imread(str(picture))), cv2.COLOR_BGR2RGB)
    expected = load_model(run_folder, "cpu", "fp32").predict(image).patch_scores
    *rows, highest = said.splitlines()
    scores = np.array([[float(value) for value in row.split()] for row in rows])
    assert scores.shape == expected.shape
    np.testing.assert_allclose(scores, expected, atol=1e-4 * expected.max())
    assert float(highest.removeprefix("highest: ")) == pytest.approx(expected.max(), rel=1e-4)


def test_in_python(bank_export: Path, run_folder: Path, picture: Path) -> None:
    script = EXAMPLES / "patch_scores.py"
    assert "anomaly." not in script.read_text()
    command = [sys.executable, script, bank_export / "model" / "whole.onnx", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=picture.parent)
    picture_of_half = picture.with_name("half.ppm")
    picture_of_half.write_bytes(picture.read_bytes()[:-1])
    short = subprocess.run([*command[:-1], picture_of_half], capture_output=True, text=True)
    assert (short.returncode, short.stderr) == (1, f"{picture_of_half} is cut short\n")
    said, _, score = done.stdout.partition("image score: ")
    check(said, run_folder, picture)
    detector = load_model(run_folder, "cpu", "fp32")
    assert detector.config.model.border_damping == 0.2
    image = cv2.cvtColor(np.asarray(cv2.imread(str(picture))), cv2.COLOR_BGR2RGB)
    assert float(score) == pytest.approx(detector.predict(image).score, rel=1e-4)


@pytest.mark.parametrize("arguments", [[], ["."], [__file__, "."], [".", "x.ppm"]])
def test_wrong_arguments_end_in_a_line_of_usage(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "patch_scores.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "usage: patch_scores.py whole.onnx image.ppm\n"


@pytest.mark.slow
def test_in_cpp(bank_export: Path, run_folder: Path, picture: Path) -> None:
    compiler, found = shutil.which("g++"), importlib.util.find_spec("openvino")
    folder = Path(found.origin).parent if found and found.origin else Path()
    libraries = sorted((folder / "libs").glob("libopenvino.so*"))
    if compiler is None or not libraries or not (folder / "include").is_dir():
        pytest.skip("needs g++, and OpenVINO's headers and library")
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "SSE41":
        pytest.skip("OpenVINO can't resize between layers on processors below AVX2")
    program = picture.parent / "patch_scores"
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", EXAMPLES / "patch_scores.cpp",
         "-isystem", folder / "include", libraries[0], f"-Wl,-rpath,{folder / 'libs'}", "-o",
         program], check=True,
    )  # fmt: skip
    command = [program, bank_export / "model" / "whole.onnx", picture]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(done.stdout, run_folder, picture)
    wrong = subprocess.run([program, command[1], __file__], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "isn't a PPM file" in wrong.stderr
