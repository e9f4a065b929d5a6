"""A folder that holds several models: `evaluate` goes through them, the others ask for one."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import Command

import anomaly
from anomaly.errors import ModelError
from anomaly.storage.folder import find_runs


@pytest.fixture
def two_runs(run_folder: Path, tmp_path: Path) -> Path:
    """A folder of two runs; those of one model are enough to tell folders apart."""
    runs = tmp_path / "runs"
    for name in ("disc", "plate"):
        shutil.copytree(run_folder, runs / name)
    return runs


def test_each_model_of_a_folder_is_evaluated(
    two_runs: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "evaluation"
    code, _, err = command("evaluate", ["--model", two_runs, "--output", output])
    assert code == 0, err
    figures = json.loads((output / "metrics.json").read_text())["categories"]
    assert list(figures) == ["disc", f"disc ({two_runs / 'plate'})"]
    assert len([entry for entry in output.iterdir() if entry.is_dir()]) == 2


def test_a_model_that_was_copied_by_halves_is_named(two_runs: Path) -> None:
    (two_runs / "notes" / "data").mkdir(parents=True)  # no model
    (two_runs / "notes" / "data" / "train.json").write_text("{}")
    assert find_runs(two_runs) == [two_runs / "disc", two_runs / "plate"]
    with pytest.raises(ModelError, match=r"holds several models \(disc, plate\); give one of them"):
        anomaly.load(two_runs)
    half = two_runs / "half"
    for part in ("train.json", "model/scorer.safetensors", "backbone.safetensors", "model/"):
        (half / part).parent.mkdir(parents=True)
        (half / part).mkdir() if part.endswith("/") else (half / part).touch()
        for refuse in (find_runs, anomaly.load):
            says = f"{half} holds parts of a model, but no manifest.json in it"
            with pytest.raises(ModelError, match=re.escape(says)):
                refuse(two_runs)
        shutil.rmtree(half)
