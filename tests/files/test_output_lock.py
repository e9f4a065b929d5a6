"""Two runs in one output folder: one works, the other says so at once and leaves nothing."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import FAST, REPOSITORY, Command, train_arguments, write_part, write_product

from anomaly.cli import COMMANDS
from anomaly.errors import OutputError
from anomaly.files import outputs
from anomaly.files.outputs import LOCK, locked, locked_file

_HOLD = """
import sys
from pathlib import Path
from anomaly.files.outputs import locked, locked_file
place = Path(sys.argv[1])
try:
    with locked_file(place) if place.suffix else locked(place):
        print("held", flush=True)
        sys.stdin.read()
except Exception as error:
    print(error, flush=True)
"""


def _hold(place: Path) -> "subprocess.Popen[str]":
    """Another process that tries to lock a folder or a file, and keeps it until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def _first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def occupied(tmp_path: Path) -> Iterator[Callable[[Path], int]]:
    """Has another process lock a folder or a file; returns its id."""
    holders: list[subprocess.Popen[str]] = []

    def occupy(place: Path) -> int:
        holders.append(_hold(place))
        assert _first_line(holders[-1]) == "held"
        return holders[-1].pid

    yield occupy
    for holder in holders:
        holder.communicate("")


def _files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


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


def test_a_file_is_locked_and_not_its_folder(
    tmp_path: Path, occupied: Callable[[Path], int]
) -> None:
    file = tmp_path / "new" / "line.db"
    with locked_file(file):
        assert [f.name for f in file.parent.iterdir()] == [f".line.db{LOCK}"]
        with locked_file(tmp_path / "new" / ".." / "new" / "line.db"), locked(file.parent):
            pass
    assert list(tmp_path.iterdir()) == []
    process = occupied(file)
    for name in ("line.db", "link.db"):  # by whatever name
        if name == "link.db":
            (tmp_path / name).symlink_to(file)
        place = file if name == "line.db" else tmp_path / name
        with pytest.raises(OutputError, match=f"{name} is in use by another run .* {process} on "):
            locked_file(place).__enter__()
    with locked(file.parent), locked_file(file.with_name("other.db")):
        pass


def test_another_thread_is_kept_out(tmp_path: Path) -> None:
    def enter() -> None:
        with locked(tmp_path):
            pass

    with ThreadPoolExecutor(1) as other:
        with locked(tmp_path):
            enter()
            with pytest.raises(OutputError, match=f"in use by another run .*{os.getpid()} on "):
                other.submit(enter).result()
        other.submit(enter).result()


def test_exactly_one_of_two_wins(tmp_path: Path) -> None:
    for turn in range(10):
        folder = tmp_path / str(turn)
        pair = [_hold(folder), _hold(folder)]
        said = {_first_line(process): process for process in pair}
        winner = said.pop("held")
        (loser,) = said
        assert loser.startswith(f"{folder} is in use by another run (process {winner.pid} on ")
        for process in pair:
            process.communicate("")
        assert list(folder.rglob("*")) == []


def test_the_lock_of_a_killed_run_is_free_at_once(
    tmp_path: Path, occupied: Callable[[Path], int]
) -> None:
    process = occupied(tmp_path)
    with pytest.raises(OutputError, match=f"in use by another run .process {process} on "):
        locked(tmp_path).__enter__()
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in the temporary folder stands in, which runs of this machine notice."""
    flock = fcntl.flock
    lock = tmp_path / "out" / LOCK

    def without(handle: int, operation: int) -> None:
        if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
            raise OSError(errno.ENOLCK, "No locks available")
        flock(handle, operation)

    (tmp_path / "local").mkdir()
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(tmp_path / "local"))
    monkeypatch.setattr(fcntl, "flock", without)
    with locked(tmp_path / "out"):
        assert not (tmp_path / "out" / LOCK).exists()
        assert len(list((tmp_path / "local").iterdir())) == 1
        monkeypatch.setattr(outputs, "_held", set())
        with pytest.raises(OutputError, match=f"process {os.getpid()} on "):
            locked(tmp_path / "out").__enter__()
    assert "another machine there goes unnoticed" in caplog.text
    assert list((tmp_path / "local").iterdir()) == []


def test_every_command_that_writes_minds_the_lock(
    tmp_path: Path,
    product: Path,
    run_folder: Path,
    command: Command,
    occupied: Callable[[Path], int],
) -> None:
    model = tmp_path / "run"
    shutil.copytree(run_folder, model)
    golden = tmp_path / "golden"
    write_part(golden / "a.png", seed=1)
    out = tmp_path / "out"
    record = out / "record.db"
    features = out / "features.npz"
    process = {place: occupied(place) for place in (out, model, golden, record, features)}
    before = _files(tmp_path)
    export = ["--model", model, "--to", "onnx", "--golden", golden, "--output", out]
    serve = ["--models", model, "--record", record, "--port", 0]
    lines = _commands(product, model, golden, out)
    update = ["--model", model, "--good", golden, "--output", out]
    lines += [("export", export, out), ("serve", serve, record)]
    lines += [("deploy", ["--to", model, "--back"], model)]
    save = ["--model", model, "--input", golden, "--output", features]
    lines += [("features", save, features)]
    lines += [("update", update, out)]
    lines += [("report", ["--record", record, "--from", "2026-05-01", "--output", out], out)]
    # These write one file that appears whole, add to a record or a store, or run others.
    single = {"region", "feedback", "demo", "tune"}
    nothing = {"check", "drift", "layers"}
    assert {name for name, _, _ in lines} == COMMANDS.keys() - nothing - single
    for name, arguments, folder in lines:
        code, said, err = command(name, arguments)
        assert (code, said) == (2, ""), name
        assert f"{folder} is in use by another run (process {process[folder]} on" in err
        assert err.count("error: ") == 1
    assert _files(tmp_path) == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["golden", "out", "run"]


def _commands(
    product: Path, model: Path, golden: Path, out: Path
) -> list[tuple[str, list[object], Path]]:
    image = product / "test" / "spot" / "000.png"
    infer = ["--model", model, "--input", product / "test", "--output", out]
    settings = [part for setting in FAST for part in ("--set", setting)]
    return [
        ("start", [product, *settings, "--output", out], out),
        ("train", train_arguments(product, out), out),
        ("infer", infer, out),
        ("infer", [*infer, "--resume"], out),
        ("infer", [*infer, "--watch"], out),
        ("evaluate", ["--model", model, "--output", out], out),
        ("explain", ["--model", model, "--input", image, "--output", out], out),
        ("missed", [image, "--model", model, "--output", out], out),
        ("calibrate", ["--model", model, "--review-rate", 0.2], model),
        ("calibrate", ["--model", model / "model", "--review-rate", 0.2], model),
        ("selfcheck", ["--model", model, "--golden", golden, "--record"], golden),
    ]


_TURNS = 20


@pytest.mark.slow
@pytest.mark.parametrize("index", range(11))
def test_two_processes_of_each_command_twenty_times(
    index: int, tmp_path: Path, run_folder: Path, command: Command
) -> None:
    """One wins, whichever. The first winner works to its end, the others are stopped then."""
    product = write_product(tmp_path / "disc")

    def start(place: Path, *, without: str = "") -> "subprocess.Popen[str]":
        run, golden, out = (place / each for each in ("run", "golden", "out"))
        name, arguments, _ = _commands(product, run, golden, out)[index]
        line = [REPOSITORY / "scripts" / f"{name.replace('-', '_')}.py", *arguments]
        line = [each for each in line if each != without]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *map(str, line)], **piped)

    def prepare(name: str) -> Path:
        shutil.copytree(run_folder, tmp_path / name / "run")
        write_part(tmp_path / name / "golden" / "a.png", seed=1)
        return tmp_path / name

    _, arguments, folder = _commands(product, Path("run"), Path("golden"), Path("out"))[index]
    watching, resumed = "--watch" in arguments, "--resume" in arguments
    in_use = 0
    for turn in range(_TURNS):
        place = prepare(str(turn))
        pair = [start(place, without="--resume")]
        while resumed and not (place / folder / LOCK).exists():
            time.sleep(0.01)  # what is to be resumed is at work
        pair.append(start(place))
        in_use += _one_of(pair, place / folder)
        _end(pair, stop=turn > 0, watching=watching)
        if turn > 0:  # one that took long to stop has left the file, but not the lock
            with locked(place / folder):
                pass
        assert not list(place.rglob(LOCK))
    assert in_use == _TURNS
    if not watching:
        alone = prepare("alone")
        _end([start(alone, without="--resume")], stop=False, watching=False)
        assert _files(tmp_path / "0").keys() == _files(alone).keys()


def _one_of(pair: "list[subprocess.Popen[str]]", folder: Path) -> bool:
    """One of two is refused, and is taken out; whether it was so for the other one's lock."""
    while not any(process.poll() == 2 for process in pair):
        assert any(process.poll() is None for process in pair), "both have won"
        time.sleep(0.01)
    loser = next(process for process in pair if process.poll() == 2)
    pair.remove(loser)
    said, err = loser.communicate()
    assert said == ""
    in_use = f"{folder} is in use by another run (process {pair[0].pid} on" in err
    assert in_use or re.search(" exists? already; ", err), err
    return in_use


def _end(pair: "list[subprocess.Popen[str]]", *, stop: bool, watching: bool) -> None:
    (winner,) = pair
    if watching:
        assert winner.stdout is not None
        winner.stdout.readline()  # "watching …"
    if stop or watching:
        winner.send_signal(signal.SIGTERM)
    _, err = winner.communicate()
    ended = {0, 2} if watching else {0, 128 + signal.SIGTERM} if stop else {0}
    assert winner.returncode in ended, err
