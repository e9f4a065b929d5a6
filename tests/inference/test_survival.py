"""Runs of `infer` outlive what happens to them: killed processes, full disks, torn journals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command, result_files, run_command, write_part
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import until
from test_infer import data_of

from anomaly.errors import OutputError
from anomaly.inference.pipeline import Finished, RunJournal
from anomaly.inference.results import Outputs, Row, as_jsonl


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


def _finished(index: int) -> Finished:
    row = Row(
        f"ä\udcff\n{index}", "00", "ok", 0.1 + index, None, 0.5, 1.0, "good", "h", "m", "1", "", ""
    )
    return Finished(index, row)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.integers(0, 2000))
def test_a_torn_line_is_dropped_and_the_run_goes_on(tmp_path: Path, cut: int) -> None:
    file, outputs = tmp_path / "results.partial.jsonl", Outputs(tmp_path)
    file.unlink(missing_ok=True)
    with RunJournal(outputs, {"model": "a"}) as journal:
        for i in (2, 0, 1):
            journal.add([_finished(i)])
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    again = RunJournal(outputs, {"model": "a"})
    lines = whole[:cut].count(b"\n")
    assert list(again.done.values()) == [_finished(i) for i in (2, 0, 1)][: max(0, lines - 1)]
    with again:
        for i in (2, 0, 1):
            if i not in again.done:
                again.add([_finished(i)])
    assert file.read_bytes() == whole
    rows = as_jsonl(_finished(i).row for i in range(3))
    assert (tmp_path / "results.jsonl").read_text("utf-8") == rows


def test_a_damaged_journal_is_not_continued(tmp_path: Path) -> None:
    file, outputs = tmp_path / "results.partial.jsonl", Outputs(tmp_path)
    row = b'{"about": {"model": "a"}}\n{"index": 3}'
    for lines in (b"[" * 100_000, b'{"about": 1e400}', b'{"about": NaN}', b"[]", row):
        file.write_bytes(lines + b"\n")
        with pytest.raises(OutputError, match=r"l\.jsonl is damaged \(.*start again with --over"):
            RunJournal(outputs, {"model": "a"})
