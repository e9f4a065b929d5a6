"""Runs of `infer` outlive what happens to them: killed processes, full disks, closed folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command, result_files, run_command, write_part
from kit import until
from test_infer_page import data_of


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images for a few batches."""
    folder = tmp_path_factory.mktemp("inputs")
    for i in range(80):
        write_part(folder / f"{i % 7}" / f"{i:02}.png", i, mark=(30, 50) if i % 9 == 0 else None)
    return folder


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nothing happens to writes."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    run_command("infer", ["--model", run_folder, "--input", inputs, "--output", output])
    return output


def done(output: Path) -> int:
    """How many images the journal says are done; a torn last line doesn't count."""
    journal = output / "results.partial.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)[1:] if journal.exists() else []
    return sum(len(json.loads(line)["images"]) for line in lines if line.endswith(b"\n"))


def test_a_killed_run_is_resumed(
    run_folder: Path, inputs: Path, undisturbed: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "out"
    arguments = ["--model", run_folder, "--input", inputs, "--output", output]
    process = subprocess.Popen([sys.executable, "-m", "anomaly", "infer", *map(str, arguments)])
    with process:
        until(lambda: done(output) or process.poll() is not None)
        process.kill()
    assert 0 < done(output) < 80
    assert not (output / "results.html").exists()
    code, _, err = command("infer", [*arguments, "--resume", "--write", "masks"])
    assert (code, "another set of outputs" in err) == (2, True)
    assert command("infer", [*arguments, "--resume"])[0] == 0
    assert result_files(output) == result_files(undisturbed)
    pages = data_of(output), data_of(undisturbed)
    for page in pages:
        assert page.pop("provenance")
    assert pages[0] == pages[1]


def test_a_full_disk(
    run_folder: Path, inputs: Path, undisturbed: Path, small_disk: Path, command: Command
) -> None:
    whole = result_files(undisturbed)
    ballast, output = small_disk / "ballast", small_disk / "out"
    ballast.write_bytes(bytes(3_600_000))
    arguments = ["--model", run_folder, "--input", inputs, "--output", output]
    code, _, err = command("infer", arguments)
    assert code == 4
    # A picture, or the journal's line of a batch: whichever comes first.
    assert "can't be written: No space left on device (0.0 MB are free in" in err
    assert "continue with --resume" in err
    finished = done(output)
    assert 0 < finished < 80
    assert f"{finished} of 80 images are done" in err
    # Whatever has its final name is whole.
    left = result_files(output)
    pictures = {name: data for name, data in left.items() if name.startswith("heatmaps/")}
    assert len(pictures) >= finished
    assert all(whole[name] == data for name, data in pictures.items())
    others = {"results.csv", "results.jsonl", "results.partial.jsonl"}
    assert set(left) - set(pictures) <= others
    ballast.unlink()
    assert command("infer", [*arguments, "--resume"])[0] == 0
    assert result_files(output) == whole
