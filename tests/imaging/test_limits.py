"""Whatever one file makes a parser do, it has its own row, in time, and the others are scored."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import REPOSITORY, write_part
from kit import until

from anomaly.cli import terminal
from anomaly.errors import AnomalyError, ImageError
from anomaly.imaging import pool, read
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage
from anomaly.imaging.pool import Decoders, read_all, read_one
from anomaly.imaging.read import COMPUTING_SECONDS, MODEST_PIXELS, Decoding, read_header, read_image

# A parser that a file's name makes do what no file should make it do.
_PARSER = """
import os, sys, time
sys.path[:] = {path!r}
from anomaly.imaging import loading, read
read.COMPUTING_SECONDS = 1.0
honest = read.read_image
def read_image(path, *options):
    tried, held = path.with_suffix(".tried").exists(), []
    path.with_suffix(".tried").touch()
    print("a library that prints")
    if "mortal" in path.name or "once" in path.name and not tried:
        os.kill(os.getpid(), 9)
    while "stuck" in path.name:
        sum(range(10**5))
    while "asleep" in path.name:
        time.sleep(1)
    while "hog" in path.name:
        held.append(b"x" * 20_000_000)
    return honest(path, *options)
read.read_image = loading.read_image = read_image
from anomaly.imaging.pool import serve
serve(300_000_000)
"""
# Starts that parser wherever images are decoded.
_START = """
import os, subprocess, sys
from anomaly.imaging import pool, read
def start():
    code = {parser!r}.format(path=sys.path)
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code], **pipes, stderr=subprocess.DEVNULL)
pool.start = start
"""
_MAIN = """
from anomaly.cli import main
sys.exit(main(sys.argv[1:]))
"""
_LOAD = """
print(pool.read_one(os.getpid, about="it"), flush=True)
sys.stdin.read()
"""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="nothing says here what a process uses"
)


@pytest.fixture
def bad_parser(own_pool: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser above in every decoding process, and limits that a test can wait for."""
    monkeypatch.setattr(pool, "start", pool.start)
    exec(_START.format(parser=_PARSER), {})
    monkeypatch.setattr(read, "COMPUTING_SECONDS", 1.0)


@needs_proc
def test_limits_hold_and_say_which(
    bad_parser: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = {
        "stuck": "took more than 1 s of computing, the limit",
        "hog": "more than the 0.3 GB of memory that a decoding process may use; if the file is "
        "sound, set the environment variable ANOMALY_DECODER_MEMORY",
        "mortal": "has crashed 2 decoding processes",
        "asleep": "took more than 2 s, the limit",
    }
    files = {name: tmp_path / f"{name}.png" for name in ("once", *says, "fine")}
    for file in files.values():
        write_part(file, seed=1)
    asleep = files.pop("asleep")
    decoders = Decoders(Preprocessing(Sizing(None, None, 32, 8), Decoding(10**6)))
    once, *found, fine = decoders.load_all(enumerate(files.values()))
    assert isinstance(once, NetworkInput)  # the second time it was read
    assert isinstance(fine, NetworkInput)
    # Functions are limited likewise.
    ended, seen = read_all(read_image, [files["mortal"], files["fine"]])
    with pytest.raises(ImageError, match="No such file"):
        read_one(read_header, tmp_path / "none.png", about=tmp_path)
    monkeypatch.setattr(pool, "CLOCK_SECONDS", 2.0)
    found.append(decoders.load(asleep))
    assert isinstance(ended, ImageError)
    assert (ended.status, says["mortal"] in str(ended)) == ("failed", True)
    assert seen.size == (96, 120)
    for (name, reason), item in zip(says.items(), found, strict=True):
        assert isinstance(item, UnusableImage)
        assert item.status == ("unsupported" if name == "hog" else "failed")
        assert f"{name}.png" in item.reason
        assert reason in item.reason


def test_large_images_get_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_part(tmp_path / "part.png", seed=1)

    def left(modest: int) -> float:
        monkeypatch.setattr(read, "MODEST_PIXELS", modest)
        signal.setitimer(signal.ITIMER_PROF, COMPUTING_SECONDS)
        try:
            read_image(tmp_path / "part.png")
            return signal.getitimer(signal.ITIMER_PROF)[0]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    assert left(96 * 120) < COMPUTING_SECONDS + 1  # the kernel counts in ticks
    assert 3 * COMPUTING_SECONDS < left(96 * 30) < 4 * COMPUTING_SECONDS + 1
    read_image(tmp_path / "part.png")
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0  # no limit has none to be extended


@needs_proc
@pytest.mark.usefixtures("decoding_processes")
def test_the_memory_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RGB of floats has 12 bytes a pixel; such a long file is read within the usual limit."""
    side, file = 4890, tmp_path / "long.tif"
    assert 12 * side**2 > 8 * MODEST_PIXELS + 64 * 1024**2
    tifffile.imwrite(file, np.zeros((side, side, 3), "f4"), photometric="rgb")
    assert read_one(read_image, file, about=file).size == (side, side)
    pool.close()
    monkeypatch.setenv("ANOMALY_DECODER_MEMORY", "lots")
    with pytest.raises(AnomalyError, match="'lots'; it must be a whole number of megabytes"):
        read_one(read_image, file, about=file)


def _run(program: str, *arguments: object) -> "subprocess.Popen[str]":
    """A program with the parser above, in a process of its own."""
    code = _START.format(parser=_PARSER) + program
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _is_alive(process: int) -> bool:
    try:
        said = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return said.rpartition(b")")[2].split()[0] != b"Z"


def _children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@needs_proc
def test_sigterm_ends_a_command_whose_parser_is_stuck(tmp_path: Path, run_folder: Path) -> None:
    write_part(tmp_path / "line" / "asleep.png", seed=1)
    places = ["--input", tmp_path / "line", "--output", tmp_path / "out"]
    process = _run(_MAIN, "infer", "--model", run_folder, *places)
    until((tmp_path / "line" / "asleep.tried").exists, 600)
    children = _children(process.pid)
    assert children
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in err) == (143, False)
    until(lambda: not any(map(_is_alive, children)))


@needs_proc
def test_nothing_outlives_a_parent_that_is_killed() -> None:
    process = _run(_LOAD)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert _is_alive(child)
    process.kill()
    process.communicate()
    until(lambda: not _is_alive(child))


def test_a_second_signal_says_how_to_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    resume = pytest.raises(terminal.Interrupted, match="continue with --resume")
    with resume as raised, terminal.Stopping() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        time.sleep(0.2)
        signal.raise_signal(signal.SIGINT)
    assert raised.value.exit_code == 143
    assert "a second signal ends it at once" in capfd.readouterr().err
    with pytest.raises(terminal.Interrupted), terminal.Stopping(politely=False):
        signal.raise_signal(signal.SIGINT)


def test_a_command_that_never_returns_ends_all_the_same() -> None:
    code = (
        "import ctypes, os, signal, threading, sys\n"
        "from anomaly.cli import terminal\n"
        "terminal.PATIENCE_SECONDS = 0.5\n"
        "with terminal.Stopping():\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    ctypes.CDLL(None).sleep(600); ctypes.CDLL(None).sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, "continue with --resume" in done.stderr) == (143, True)
