"""The benchmark: delays that are put into a stage are found there, and nowhere else."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from anomaly.cli import benchmark
from anomaly.scoring.pipeline import Model
from anomaly.storage.load import load_model


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that takes 100 ms more, a map that takes 60 ms, and no process to be started."""

    def slower(name: str, seconds: float) -> Callable[..., Any]:
        function = getattr(Model, name)

        def call(*arguments: Any) -> Any:
            time.sleep(seconds)
            return function(*arguments)

        return call

    for name, seconds in (("embedded", 0.1), ("image_scores_of", 0.06)):
        monkeypatch.setattr(Model, name, slower(name, seconds))
    monkeypatch.setattr(benchmark, "_anomaly", lambda *words: "")


@pytest.mark.usefixtures("slowed")
def test_delays_are_found_in_their_stages(
    run_folder: Path, product: Path, command: Command
) -> None:
    arguments = ["--model", run_folder, "--images", product / "test", "--device", "cpu"]
    code, out, _ = command("benchmark", [*arguments, "--json", "--budget", "100s"])
    (figures,) = json.loads(out)
    assert (code, figures["parts"] >= 20) == (0, True)
    assert 0.9 <= figures["sum_of_stages"] <= 1.1
    assert all(times == sorted(times) for times in figures["milliseconds"].values())
    half = {stage: times[0] for stage, times in figures["milliseconds"].items()}
    assert half["network"] >= 100
    assert half["map"] >= 60 > half["search"]  # the map is counted by itself
    assert half["whole part"] >= 160
    assert min(half[stage] for stage in ("read", "network input", "draw", "row")) > 0

    code, out, _ = command("benchmark", [*arguments, "--budget", "80ms"])
    assert code == 1
    assert "torch: 80 ms a part doesn't hold, 99 % take" in out
    assert "- network takes" in out
    assert "coreset_ratio" not in out  # the search takes next to nothing
    assert command("benchmark", [*arguments, "--budget", "fast"])[0] == 2


def test_pictures_are_golden_ones_or_of_training_or_noise_of_their_size(
    run_folder: Path, product: Path, tmp_path: Path
) -> None:
    run, options = tmp_path / "run", benchmark.argparse.Namespace(images=[])
    shutil.copytree(run_folder / "model", run / "model")
    summary = json.loads((run_folder / "train.json").read_text())
    model = load_model(run, "cpu")

    def source(data: Path) -> tuple[list[Path], str]:
        (run / "train.json").write_text(json.dumps(summary | {"data_folder": str(data)}))
        options.model = run
        return benchmark._images(options, model, tmp_path)

    assert source(product)[0][0].is_relative_to(product)
    (noise,), words = source(tmp_path / "gone")
    side = benchmark.read_image(noise, max_pixels=10**6, bit_depth=None).size[0]
    assert side == pytest.approx((96 * 120) ** 0.5, rel=0.15)
    assert f"blurred noise of {side}×{side}" in words
    shutil.copytree(product / "test" / "good", run / "golden")
    (run / "golden" / "golden.json").write_text("{}")
    assert [path.parent for path in source(product)[0]] == [run / "golden"] * 3


@pytest.mark.slow
def test_engines_are_measured_in_processes_of_their_own(run_folder: Path, command: Command) -> None:
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    code, out, _ = command("benchmark", ["--model", run_folder, "--engine", "onnx", "--json"])
    own, exported = json.loads(out)
    assert (code, own["engine"], exported["engine"]) == (0, "torch", "onnx")
    assert min(own["cold_start_seconds"], exported["cold_start_seconds"]) > 0.2
