"""A run that was broken off goes on, and ends with the same bytes."""

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Says, result_files, write_part
from kit import table

from anomaly.cli import infer
from anomaly.imaging.loading import by_shape
from anomaly.inference import pipeline

Infer = Callable[..., str]


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


@pytest.fixture
def run_infer(run_folder: Path, inputs: Path, tmp_path: Path, says: Says) -> Infer:
    """Runs the command into a folder, to an exit code; all that it says."""

    def run(
        code: int, name: str, *flags: object, model: Path = run_folder, images: Path | None = inputs
    ) -> str:
        given = [] if images is None else ["--input", images]
        arguments = ["--model", model, *given, "--output", tmp_path / name, *flags]
        return says(code, "infer", arguments)

    return run


@contextmanager
def interrupting() -> Iterator[Callable[[str, int, int], None]]:
    """Stands in for the line of progress: somebody presses Ctrl-C once three images are through."""
    pressed: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if done >= 3 and not pressed:
            pressed.append(done)
            signal.raise_signal(signal.SIGINT)

    yield progress


def test_stopped_again_and_again(
    run_infer: Infer, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is begun of a batch is finished, so that several stops need several batches.
    monkeypatch.setattr(pipeline, "by_shape", lambda items, _: by_shape(items, 2))
    run_infer(3, "whole")
    output = tmp_path / "output"
    for step in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(infer, "ProgressLine", interrupting)
            assert "continue with --resume" in run_infer(130, "output", "--resume")
        assert step < len(table(output)) < 22
    assert "add --resume" in run_infer(2, "output")
    (inputs / "08.png").rename(inputs / "99.png")
    assert "another list of images" in run_infer(2, "output", "--resume")
    (inputs / "99.png").rename(inputs / "08.png")
    (output / "heatmaps" / ".anomaly-left.part").write_text("by a process that was killed")
    run_infer(3, "output", "--resume")
    assert result_files(output) == result_files(tmp_path / "whole")
    said = run_infer(3, "output", "--resume")  # it still has an image without a score
    assert "is complete" in said


def test_only_the_same_run_is_complete(
    run_infer: Infer, padim_folder: Path, inputs: Path, tmp_path: Path
) -> None:
    one, output = inputs / "00.png", tmp_path / "output"
    run_infer(0, "output", images=one)
    before = result_files(output)
    assert "is complete" in run_infer(0, "output", "--resume", images=one)
    said = run_infer(2, "output", "--resume", images=one, model=padim_folder)
    assert "another model" in said
    assert "--overwrite" in said
    assert result_files(output) == before
    for text in ("{", "[]", '{"about": {}}'):
        (output / "results.done.json").write_text(text)
        assert "missing or damaged" in run_infer(2, "output", "--resume", images=one)
    (output / "results.done.json").unlink()
    run_infer(2, "output", "--resume", images=one)
    broken = inputs / "07.png"
    run_infer(2, "output", "--overwrite", images=broken)
    run_infer(2, "output", "--resume", images=broken)  # as it ended


def test_a_list_from_a_file_and_from_standard_input(
    run_infer: Infer, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, one = tmp_path / "list.txt", inputs / "01.png"
    names = f"{one}\r\n\n{inputs / 'gone.png'}\n{one}\n"
    listing.write_text(names)
    assert "1 of 2 images scored" in run_infer(3, "one", "--input", listing, images=None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names.encode())))
    run_infer(3, "two", "--input", "-", images=None)
    assert result_files(tmp_path / "one") == result_files(tmp_path / "two")
