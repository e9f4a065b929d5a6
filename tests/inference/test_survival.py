"""Runs of `infer` outlive what happens to them: killed processes, full disks, vanished files."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import REPOSITORY, Command, result_files, write_part

_KILLS = 20


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough images that a run takes a few seconds, some of them broken."""
    folder = tmp_path_factory.mktemp("inputs")
    for i in range(600):
        write_part(folder / f"{i % 7}" / f"{i:03}.png", i, mark=(30, 50) if i % 9 == 0 else None)
    for broken in ("3/010.png", "0/315.png"):
        (folder / broken).write_bytes((folder / broken).read_bytes()[:500])
    return folder


@pytest.fixture(scope="module")
def undisturbed(run_folder: Path, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nothing happens to writes."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    assert _start(run_folder, inputs, output).wait() == 3
    return output


def _start(run: Path, inputs: Path, output: Path, *flags: str) -> "subprocess.Popen[str]":
    arguments = ["--model", run, "--input", inputs, "--output", output, *flags]
    return subprocess.Popen(
        [sys.executable, REPOSITORY / "scripts" / "infer.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _until(happened: Callable[[], object], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.005)


def _rows(output: Path) -> int:
    """How many images the journal says are done; a torn last line doesn't count."""
    journal = output / "results.partial.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)[1:] if journal.exists() else []
    return sum(len(json.loads(line)["images"]) for line in lines if line.endswith(b"\n"))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.mark.clock
def test_killed_at_random_points(
    run_folder: Path, inputs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Each kill comes at another number of rows, from none to all but a few."""
    rng = random.Random(0)
    expected = result_files(undisturbed)
    kills = rounds = 0
    while kills < _KILLS:
        output = tmp_path / str(rounds)
        rounds += 1
        for _ in range(5):
            process = _start(run_folder, inputs, output, "--resume")
            wanted = _rows(output) + rng.randrange(250)
            _until(lambda p=process, w=wanted, o=output: p.poll() is not None or _rows(o) >= w)  # type: ignore[misc]
            time.sleep(rng.random() / 20)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
        assert _start(run_folder, inputs, output, "--resume").wait() in (0, 3)
        assert result_files(output) == expected


@pytest.mark.clock
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find processes")
def test_killed_decoding_processes_are_replaced(
    run_folder: Path, inputs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    expected = result_files(undisturbed)
    kills = rounds = 0
    while kills < _KILLS:
        output = tmp_path / str(rounds)
        rounds += 1
        process = _start(run_folder, inputs, output)
        _until(lambda o=output: _rows(o) > 0)  # type: ignore[misc]
        while process.poll() is None:
            children = _children(process.pid)
            if children and _rows(output) < 500:
                os.kill(rng.choice(children), signal.SIGKILL)
                kills += 1
            # The same image twice would be its fault; a new process takes a while to be there.
            time.sleep(0.7 + rng.random() / 2)
        assert process.returncode == 3
        assert result_files(output) == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2000k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can't be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(run_folder: Path, tmp_path: Path, small_disk: Path, command: Command) -> None:
    inputs = tmp_path / "inputs"
    for i in range(40):
        write_part(inputs / f"{i:02}.png", seed=i)
    base = ["--model", run_folder, "--input", inputs, "--output"]
    assert command("infer", [*base, tmp_path / "whole"])[0] == 0
    whole = result_files(tmp_path / "whole")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_600_000))
    output = small_disk / "out"
    code, _, err = command("infer", [*base, output])
    assert code == 4
    # A picture, or the journal's line of a batch: whichever comes first.
    assert "can't be written: No space left on device (0.0 MB are free in" in err
    assert "continue with --resume" in err
    done = _rows(output)
    assert 0 < done < 40
    assert f"{done} of 40 images are done" in err
    # Whatever has its final name is whole.
    left = result_files(output)
    left.pop("results.partial.jsonl")
    pictures = {name: data for name, data in left.items() if name.startswith("heatmaps/")}
    assert len(pictures) >= done
    assert all(whole[name] == data for name, data in pictures.items())
    assert set(left) - set(pictures) <= {"results.csv", "results.jsonl", "heatmap_scale.png"}
    if "results.csv" in left:
        assert whole["results.csv"].startswith(left["results.csv"][:100])
        assert left["results.csv"].count(b"\n") == done + 1
    code, _, err = command("infer", [*base, output, "--resume"])  # still full
    assert (code, "No space left on device" in err) == (4, True)
    ballast.unlink()
    assert command("infer", [*base, output, "--resume"])[0] == 0
    assert result_files(output) == whole


def _without_privileges() -> list[str]:
    """What makes a command respect permissions."""
    if os.name != "posix":
        pytest.skip("permissions are POSIX's")
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root without setpriv may read everything")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.mark.slow
def test_folders_without_permission(run_folder: Path, tmp_path: Path) -> None:
    prefix = _without_privileges()
    write_part(tmp_path / "inputs" / "a.png", seed=1)
    write_part(tmp_path / "inputs" / "closed" / "b.png", seed=2)

    def infer(inputs: Path, output: Path) -> tuple[int, str]:
        arguments = ["--model", run_folder, "--input", inputs, "--output", output]
        command = [*prefix, sys.executable, REPOSITORY / "scripts" / "infer.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    closed = tmp_path / "inputs" / "closed"
    locked = tmp_path / "locked"
    locked.mkdir()
    try:
        closed.chmod(0)
        locked.chmod(0o500)
        code, said = infer(tmp_path / "inputs", tmp_path / "one")
        assert (code, f"{closed}: can't list this folder (Permission denied)" in said) == (2, True)
        code, said = infer(tmp_path / "inputs" / "a.png", locked / "out")
        assert (code, "Permission denied" in said and str(locked) in said) == (2, True)
        closed.chmod(0o700)
        (closed / "b.png").chmod(0)
        code, said = infer(tmp_path / "inputs", tmp_path / "two")
        assert (code, "b.png: it can't be read (Permission denied)" in said) == (3, True)
    finally:
        closed.chmod(0o700)
        locked.chmod(0o700)


def test_a_file_that_vanishes_before_it_is_read(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anomaly.datasets import inputs as inputs_module

    for i in range(3):
        write_part(tmp_path / "inputs" / f"{i}.png", seed=i)
    listed = inputs_module.list_files

    def list_and_lose(folder: Path) -> list[Path]:
        found = listed(folder)
        found[1].unlink()
        return found

    monkeypatch.setattr(inputs_module, "list_files", list_and_lose)
    output = tmp_path / "out"
    code, out, _ = command(
        "infer", ["--model", run_folder, "--input", tmp_path / "inputs", "--output", output]
    )
    assert (code, "2 of 3 images scored" in out) == (3, True)
    row = (output / "results.csv").read_text().splitlines()[2]
    assert "unreadable" in row
    assert "No such file" in row
