"""The commands on a GPU: the same verdicts as on the processor, for every method.

Scores differ by up to 0.2 %: a GPU rounds what a convolution in fp32 multiplies to TF32, which has
10 binary digits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import RUNS, Command, run_command, train_arguments, write_part
from kit import table

import anomaly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

DEVICE = "cuda"
SETTINGS = {
    "plain": (),
    "gaussians": ("model.kind=padim",),
    "tiles": ("image.tile=64",),
    "turned copies": ("model.turned_copies=quarter_turns_and_mirrors",),
    "paper's score": ("model.image_score=reweighted",),
}


def on_gpu(command: Command, name: str, *arguments: object, device: str = DEVICE) -> None:
    code, _, err = command(name, [*arguments, "--device", device])
    assert code == 0, err


def scored(command: Command, model: Path, images: Path, output: Path, device: str) -> None:
    options = ["--model", model, "--input", images, "--output", output]
    on_gpu(command, "infer", *options, device=device)


def agree_on_both(command: Command, model: Path, images: Path, folder: Path) -> None:
    """See that both devices give the same verdicts, and scores that differ by rounding."""
    scored(command, model, images, folder / "on-gpu", DEVICE)
    scored(command, model, images, folder / "on-cpu", "cpu")
    for a, b in zip(table(folder / "on-gpu"), table(folder / "on-cpu"), strict=True):
        assert a["path"] == b["path"]
        assert float(a["image_score"]) == pytest.approx(float(b["image_score"]), rel=3e-3)
        assert a["verdict"] == b["verdict"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_of_the_gpu_is_one_of_the_processor(
    name: str, product: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    on_gpu(command, "train", *train_arguments(product, run, *SETTINGS[name]))
    agree_on_both(command, run, product / "test", tmp_path)
    if name == "plain":
        on_gpu(command, "evaluate", "--model", run, "--output", tmp_path / "evaluation")
        on_gpu(command, "evaluate", "--model", run, "--golden", product / "test", "--overwrite")


@pytest.mark.parametrize("method", RUNS)
def test_models_of_the_processor_go_on_on_a_gpu(
    method: str, product: Path, tmp_path: Path, command: Command, request: pytest.FixtureRequest
) -> None:
    run = shutil.copytree(request.getfixturevalue(RUNS[method]), tmp_path / "run")
    agree_on_both(command, run, product / "test", tmp_path)
    good = tmp_path / "good"
    for i in range(6):
        write_part(good / f"{i}.png", seed=300 + i)
    learned = ["--model", run, "--good", good]  # on the GPU by themselves
    run_command("calibrate", [*learned, "--yes"])
    run_command("update", [*learned, "--output", tmp_path / "next"])
    scored(command, tmp_path / "next", product / "test", tmp_path / "after", DEVICE)


def test_explanations_come_from_the_gpu(run_folder: Path, product: Path) -> None:
    image = product / "test" / "spot" / "000.png"
    found, expected = (
        anomaly.load(run_folder, device=device).explain(image) for device in (DEVICE, "cpu")
    )
    assert found.prediction.score == pytest.approx(expected.prediction.score, rel=3e-3)


def test_images_of_a_gpu_are_taken(run_folder: Path) -> None:
    detector = anomaly.load(run_folder, device=DEVICE)
    image = torch.randint(0, 255, (3, 96, 120), dtype=torch.uint8)
    on_the_gpu, on_the_cpu = detector.predict(
        [anomaly.image(each, layout="CHW") for each in (image.to(DEVICE), image)]
    )
    assert on_the_gpu.score == pytest.approx(on_the_cpu.score)
