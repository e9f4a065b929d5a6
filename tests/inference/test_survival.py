"""Runs of `infer` outlive what happens to them: killed processes, full disks, closed folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command, result_files, run_command, write_part
from kit import unprivileged, until


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
    assert command("infer", [*arguments, "--resume"])[0] == 0
    assert result_files(output) == result_files(undisturbed)


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
    others = {"results.csv", "results.jsonl", "heatmap_scale.png", "results.partial.jsonl"}
    assert set(left) - set(pictures) <= others
    ballast.unlink()
    assert command("infer", [*arguments, "--resume"])[0] == 0
    assert result_files(output) == whole


def test_folders_and_files_without_permission(run_folder: Path, tmp_path: Path) -> None:
    """Refused before anything is scored."""
    image, closed, locked = tmp_path / "a.png", tmp_path / "in" / "closed", tmp_path / "locked"
    write_part(image, seed=1)
    image.chmod(0)
    closed.mkdir(0, parents=True)
    locked.mkdir(0o500)
    infer = ["infer", "--model", run_folder, "--input"]
    commands = (
        [*infer, tmp_path / "in", "--output", tmp_path / "out"],
        [*infer, image, "--output", locked / "out"],
        ["region", image, "--output", tmp_path / "region.html"],
    )
    try:
        unlisted, unwritable, unread = unprivileged(*commands)
    finally:
        closed.chmod(0o700)
    assert {code for code, _ in (unlisted, unwritable, unread)} == {2}
    assert f"{closed}: can't list this folder (Permission denied)" in unlisted[1]
    assert "Permission denied" in unwritable[1]
    assert str(locked) in unwritable[1]
    assert "a.png: it can't be read (Permission denied)" in unread[1]
