"""`--overwrite` loses nothing before there is something to take its place."""

import shutil
from pathlib import Path

import pytest
from conftest import Command


def _files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def _damaged(run: Path, to: Path) -> Path:
    """A copy of a run that can be found, but not loaded."""
    shutil.copytree(run, to)
    with (to / "model" / "scorer.safetensors").open("ab") as file:
        file.write(b"x")
    return to


@pytest.mark.parametrize("name", ["infer", "infer --watch", "explain", "evaluate"])
def test_a_model_that_cannot_be_loaded_leaves_earlier_results(
    name: str, run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    name, *more = name.split()
    folder = product / "test" / "spot"
    given = {"infer": ["--input", folder], "explain": ["--input", folder / "000.png"]}.get(name, [])
    rest = [*given, "--output", tmp_path / "out"]
    assert command(name, ["--model", run_folder, *rest])[0] == 0
    before = _files(tmp_path / "out")
    damaged = ["--model", _damaged(run_folder, tmp_path / "damaged"), *rest, *more]
    code, _, err = command(name, [*damaged, "--overwrite"])
    assert (code, "scorer.safetensors" in err) == (2, True)
    assert _files(tmp_path / "out") == before
