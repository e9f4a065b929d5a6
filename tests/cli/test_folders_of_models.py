"""A folder that holds several models: `evaluate` goes through them, the others ask for one."""

import json
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
    shutil.rmtree(two_runs / "plate")
    code, _, err = command("evaluate", ["--model", two_runs, "--output", tmp_path / "one"])
    assert code == 0, err
    assert (tmp_path / "one" / "disc" / "report.html").is_file()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("infer", ("--input", "x.png", "--output", "out")),
        ("calibrate", ("--threshold", 1)),
        ("selfcheck", ("--golden", "x")),
        ("evaluate", ("--good", "x", "--output", "out")),
        ("evaluate", ("--defects", "x", "--output", "out")),
    ],
)
def test_other_commands_ask_for_one_of_the_models(
    two_runs: Path, command: Command, name: str, more: tuple[object, ...]
) -> None:
    code, _, err = command(name, ["--model", two_runs, *more])
    assert code == 2
    said = f"{two_runs} holds several models (disc, plate); give one of them, {two_runs / 'disc'}"
    assert said in err
    with pytest.raises(ModelError, match="holds several models"):
        anomaly.load(two_runs)


@pytest.mark.parametrize(
    "rest",
    [("train.json",), ("model/scorer.safetensors",), ("backbone.safetensors",), ("model",)],
    ids=["no model", "run", "model folder", "nothing in it yet"],
)
def test_a_model_that_was_copied_by_halves_is_named(
    two_runs: Path, tmp_path: Path, command: Command, rest: tuple[str, ...]
) -> None:
    half = two_runs / "half"
    (two_runs / "notes" / "data").mkdir(parents=True)  # no model
    (two_runs / "notes" / "data" / "train.json").write_text("{}")
    assert find_runs(two_runs) == [two_runs / "disc", two_runs / "plate"]
    for name in rest:
        source = two_runs / "disc" / name
        (half / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "backbone.safetensors":
            source = two_runs / "disc" / "model" / name
        (half / name).mkdir() if source.is_dir() else shutil.copyfile(source, half / name)
    for name, more in (
        ("infer", ["--input", tmp_path]),
        ("evaluate", []),
        ("calibrate", ["--threshold", 1]),
        ("serve", []),
    ):
        option = "--models" if name == "serve" else "--model"
        output = [] if name in ("serve", "calibrate") else ["--output", tmp_path / "out"]
        code, _, err = command(name, [option, two_runs, *output, *more])
        assert code == 2
        assert f"{half} holds parts of a model, but no manifest.json in it" in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
