"""Two runs in one output folder: one works, the other says so at once and leaves nothing."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from conftest import FAST, REPOSITORY, Command, train_arguments, write_part

from anomaly.cli import COMMANDS
from anomaly.errors import OutputError
from anomaly.files.writing import LOCK, locked, locked_file

Enter = Callable[[AbstractContextManager[object]], object]
_HOLD = """
import sys
from pathlib import Path
from anomaly.files.writing import locked
try:
    with locked(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except Exception as error:
    print(error, flush=True)
"""


def _hold(folder: Path) -> "subprocess.Popen[str]":
    """Another process that tries to lock a folder, and keeps it until its input ends."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = [sys.executable, "-c", _HOLD, str(folder)]
    return subprocess.Popen(command, **pipes, text=True, cwd=REPOSITORY)


def _first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def other_thread() -> Iterator[Enter]:
    """Enters a lock in another thread, which keeps this one out like a process."""
    with ThreadPoolExecutor(1) as other:
        locks = ExitStack()
        yield lambda lock: other.submit(locks.enter_context, lock).result()
        other.submit(locks.close).result()


def test_nothing_is_left_of_a_lock(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with locked(folder):
        assert (folder / LOCK).exists()
        with locked(tmp_path / "new" / ".." / "new" / "out"):  # a command within a command
            pass
        assert (folder / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(folder):
        (folder / "result").touch()
    assert [f.name for f in folder.iterdir()] == ["result"]


def test_a_file_is_locked_and_not_its_folder(tmp_path: Path, other_thread: Enter) -> None:
    file = tmp_path / "new" / "line.db"
    with locked_file(file):
        assert [f.name for f in file.parent.iterdir()] == [f".line.db{LOCK}"]
        with locked_file(tmp_path / "new" / ".." / "new" / "line.db"), locked(file.parent):
            pass
    assert list(tmp_path.iterdir()) == []
    other_thread(locked_file(file))
    (tmp_path / "link.db").symlink_to(file)
    for name in (file, tmp_path / "link.db"):
        in_use = f"{name.name} is in use by another run .*{os.getpid()} on "
        with pytest.raises(OutputError, match=in_use), locked_file(name):
            pass
    with locked(file.parent), locked_file(file.with_name("other.db")):
        pass


def test_exactly_one_of_two_wins_and_a_killed_runs_lock_is_free_at_once(tmp_path: Path) -> None:
    for turn in range(2):
        folder = tmp_path / str(turn)
        pair = [_hold(folder), _hold(folder)]
        said = {_first_line(process): process for process in pair}
        winner = said.pop("held")
        (loser,) = said
        assert loser.startswith(f"{folder} is in use by another run (process {winner.pid} on ")
        if turn:
            winner.kill()
            os.waitid(os.P_PID, winner.pid, os.WEXITED | os.WNOWAIT)
            with locked(folder):
                pass
        for process in pair:
            process.communicate("")
        assert list(folder.rglob("*")) == []


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with locked(tmp_path / "out"):
        pass
    assert "other runs go unnoticed" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_every_command_that_writes_minds_the_lock(
    tmp_path: Path, product: Path, run_folder: Path, command: Command, other_thread: Enter
) -> None:
    model, golden, out = (tmp_path / name for name in ("run", "golden", "out"))
    shutil.copytree(run_folder, model)
    write_part(golden / "a.png", seed=1)
    record, features = out / "record.db", out / "features.npz"
    for place in (out, model, golden, record, features):
        other_thread(locked_file(place) if place.suffix else locked(place))

    def files() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    before = files()
    image = product / "test" / "spot" / "000.png"
    settings = [part for setting in FAST for part in ("--set", setting)]
    run, results = ["--model", model], ["--output", out]
    infer = [*run, "--input", product / "test", *results]
    lines: list[tuple[str, list[object], Path]] = [
        ("start", [product, *settings, *results], out),
        ("train", train_arguments(product, out), out),
        ("infer", infer, out),
        ("infer", [*infer, "--resume"], out),
        ("infer", [*infer, "--watch"], out),
        ("evaluate", [*run, *results], out),
        ("explain", [image, *run, *results], out),
        ("calibrate", [*run, "--review-rate", 0.2], model),
        ("calibrate", ["--model", model / "model", "--review-rate", 0.2], model),
        ("evaluate", [*run, "--golden", golden, "--overwrite"], golden),
        ("export", [*run, "--to", "onnx", "--golden", golden, *results], out),
        ("serve", ["--models", model, "--record", record, "--port", 0], record),
        ("deploy", ["--model", model, "--to", out], out),
        ("features", [*run, "--input", golden, "--output", features], features),
        ("update", [*run, "--good", golden, *results], out),
        ("report", ["--record", record, "--from", "2026-05-01", *results], out),
    ]
    # These write one file that appears whole, add to a record or a store, or run others.
    single = {"demo", "tune"}
    nothing = {"check", "layers"}
    assert {name for name, _, _ in lines} == COMMANDS.keys() - nothing - single
    for name, arguments, folder in lines:
        code, said, err = command(name, arguments)
        assert (code, said if name != "deploy" else "") == (2, ""), name
        assert f"{folder} is in use by another run (process {os.getpid()} on" in err
        assert err.count("error: ") == 1
    assert files() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["golden", "out", "run"]
