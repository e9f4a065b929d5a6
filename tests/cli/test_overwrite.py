"""`--overwrite` loses nothing before there is something to take its place."""

import shutil
from pathlib import Path

from conftest import Command


def _files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def _damaged(run: Path, to: Path) -> Path:
    """A copy of a run that can be found, but not loaded."""
    shutil.copytree(run, to)
    with (to / "model" / "scorer.safetensors").open("ab") as file:
        file.write(b"x")
    return to


def test_a_model_that_cannot_be_loaded_leaves_earlier_results(
    run_folder: Path, product: Path, inferred: Path, explained: Path, evaluated: Path,
    tmp_path: Path, command: Command,
) -> None:  # fmt: skip
    damaged = ["--model", _damaged(run_folder, tmp_path / "damaged"), "--overwrite"]
    folder = product / "test" / "spot"
    for name, made, more in (
        ("infer", inferred, ["--input", folder]),
        ("infer", inferred, ["--input", folder, "--watch"]),
        ("explain", explained, ["--input", folder / "000.png"]),
        ("evaluate", evaluated, []),
    ):
        output = Path(shutil.copytree(made, tmp_path / "out"))
        code, _, err = command(name, [*damaged, *more, "--output", output])
        assert (code, "scorer.safetensors" in err) == (2, True), err
        assert _files(output) == _files(made)
        shutil.rmtree(output)
