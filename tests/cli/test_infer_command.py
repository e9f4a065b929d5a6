"""A run that was broken off goes on, and ends with the same bytes."""

import io
import signal
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, result_files, write_part

from anomaly.cli import infer
from anomaly.imaging.loading import by_shape
from anomaly.inference import run as inference_run


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two shapes and a broken file, so that batches are cut across the list."""
    folder = tmp_path / "inputs"
    for i in range(22):
        write_part(folder / f"{i:02}.png", seed=900 + i, mark=(30, 50) if i % 5 == 0 else None)
        if i % 3 == 0:
            picture = cv2.imread(str(folder / f"{i:02}.png"))
            cv2.imwrite(str(folder / f"{i:02}.png"), np.hstack([picture, picture]))
    (folder / "07.png").write_bytes(b"broken")
    return folder


def _arguments(run: Path, inputs: Path, output: Path, *flags: object) -> list[object]:
    return ["--model", run, "--input", inputs, "--output", output, *flags]


class _After:
    """Stands in for a signal that comes once so many images are through, and for the count."""

    exit_code = 130

    def __init__(self, images: int) -> None:
        self._images = images
        self.signal: int | None = None

    def __enter__(self) -> "_After":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, stage: str, done: int, total: int) -> None:
        if done >= self._images:
            self.signal = signal.SIGINT


def test_stopped_again_and_again(
    run_folder: Path,
    inputs: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is begun of a batch is finished, so that several stops need several batches.
    monkeypatch.setattr(inference_run, "by_shape", lambda items, _: by_shape(items, 2))
    whole = tmp_path / "whole"
    assert command("infer", _arguments(run_folder, inputs, whole))[0] == 3
    output = tmp_path / "output"
    for step in range(3):
        with monkeypatch.context() as patched:
            after = _After(3)
            patched.setattr(infer, "Stopping", lambda stop=after: stop)
            patched.setattr(infer, "ProgressLine", lambda stop=after: stop)
            code, out, _ = command("infer", _arguments(run_folder, inputs, output, "--resume"))
        assert (code, "continue with --resume" in out) == (130, True)
        rows = (output / "results.csv").read_text().splitlines()[1:]
        assert len(rows) > step
        assert len(rows) < 22
    code, _, err = command("infer", _arguments(run_folder, inputs, output))
    assert (code, "add --resume" in err) == (2, True)
    (inputs / "08.png").rename(inputs / "99.png")
    code, _, err = command("infer", _arguments(run_folder, inputs, output, "--resume"))
    assert (code, "another list of images" in err) == (2, True)
    (inputs / "99.png").rename(inputs / "08.png")
    (output / "heatmaps" / ".anomaly-left.part").write_text("by a process that was killed")
    assert command("infer", _arguments(run_folder, inputs, output, "--resume"))[0] == 3
    assert result_files(output) == result_files(whole)
    code, out, _ = command("infer", _arguments(run_folder, inputs, output, "--resume"))
    assert (code, "is complete" in out) == (3, True)  # it still has an image without a score


def test_only_the_same_run_is_complete(
    run_folder: Path, padim_folder: Path, inputs: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "output"
    assert command("infer", _arguments(run_folder, inputs / "00.png", output))[0] == 0
    before = result_files(output)
    again = _arguments(run_folder, inputs / "00.png", output, "--resume")
    code, out, _ = command("infer", again)
    assert (code, "is complete" in out) == (0, True)
    for run, image, flags, says in (
        (run_folder, inputs, [], "another list of images"),
        (padim_folder, inputs / "00.png", [], "another model"),
        (run_folder, inputs / "00.png", ["--masks"], "another set of outputs"),
    ):
        code, out, err = command("infer", _arguments(run, image, output, "--resume", *flags))
        assert (code, says in err, out) == (2, True, "")
        assert "--overwrite" in err
    assert result_files(output) == before
    for text in ("{", "[]", '{"about": {}}'):
        (output / "results.done.json").write_text(text)
        code, _, err = command("infer", again)
        assert (code, "missing or damaged" in err) == (2, True)
    (output / "results.done.json").unlink()
    assert command("infer", again)[0] == 2
    overwritten = _arguments(run_folder, inputs / "07.png", output, "--overwrite")
    assert command("infer", overwritten)[0] == 2
    assert command("infer", [*overwritten[:-1], "--resume"])[0] == 2  # as it ended


def test_a_list_from_a_file_and_from_standard_input(
    run_folder: Path,
    inputs: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = f"{inputs / '01.png'}\r\n\n{inputs / 'gone.png'}\n{inputs / '01.png'}\n"
    (tmp_path / "list.txt").write_text(names)
    base = ["--model", run_folder, "--output"]
    code, out, _ = command("infer", [*base, tmp_path / "one", "--list", tmp_path / "list.txt"])
    assert (code, "1 of 2 images scored" in out) == (3, True)
    stdin = io.TextIOWrapper(io.BytesIO(names.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert command("infer", [*base, tmp_path / "two", "--list", "-"])[0] == 3
    assert result_files(tmp_path / "one") == result_files(tmp_path / "two")
    (tmp_path / "long.txt").write_text(f"{inputs / '01.png'}\n{'x' * 300}.png\na\0b.png\n")
    code, out, _ = command("infer", [*base, tmp_path / "long", "--list", tmp_path / "long.txt"])
    assert (code, "1 of 3 images scored" in out, "too long" in out) == (3, True, True)
    code, _, err = command("infer", [*base, tmp_path / "three", "--list", tmp_path / "none.txt"])
    assert (code, "none.txt can't be read" in err) == (2, True)
    code, _, err = command("infer", [*base, tmp_path / "three"])
    assert (code, "give --input, --list, or both" in err) == (2, True)
