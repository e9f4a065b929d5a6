"""Whatever one file makes a parser do, it has its own row, in time, and the others are scored."""

import csv
import json
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import REPOSITORY, Command, train_arguments, write_part, write_product

from anomaly.cli import stopping
from anomaly.errors import AnomalyError, ImageError
from anomaly.imaging import decoder_pool, read
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage
from anomaly.imaging.read import COMPUTING_SECONDS, MODEST_PIXELS, read_header, read_image

pytestmark = pytest.mark.usefixtures("decoding_processes")

# A parser that a file's name makes do what no file should make it do.
_PARSER = """
import os, sys, time
sys.path[:] = {path!r}
import anomaly.datasets.check
from anomaly.imaging import loading, read
read.COMPUTING_SECONDS = {seconds}
honest = read.read_image
def read_image(path, **options):
    if "stuck" in path.name or "asleep" in path.name or "hog" in path.name:
        path.with_suffix(".tried").touch()
    held = []
    if "mortal" in path.name:
        os._exit(1)
    while "stuck" in path.name:
        sum(range(10**5))
    while "asleep" in path.name:
        time.sleep(1)
    while "hog" in path.name:
        held.append(b"x" * 20_000_000)
        time.sleep(0.01)
    return honest(path, **options)
for module in (read, loading, anomaly.datasets.check):
    module.read_image = read_image
from anomaly.imaging.decoder_worker import serve
serve({parent}, {memory})
"""
_START = """
import os, subprocess, sys
from anomaly.imaging import decoder_pool, read
parser = {parser!r}
def start():
    limits = dict(memory=decoder_pool._memory_limit(), seconds=read.COMPUTING_SECONDS)
    code = parser.format(path=sys.path, parent=os.getpid(), **limits)
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code], **pipes, stderr=subprocess.DEVNULL)
decoder_pool.start = start
"""
_MAIN = """
from anomaly.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def bad_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser above in every decoding process, and limits that a test can wait for."""
    monkeypatch.setattr(decoder_pool, "start", decoder_pool.start)
    exec(_START.format(parser=_PARSER), {})
    monkeypatch.setattr(read, "COMPUTING_SECONDS", 2.0)
    monkeypatch.setenv(read.MEMORY_SETTING, "300")


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="nothing says here what a process uses"
)


def _png(width: int, height: int) -> bytes:
    """A black picture of any shape, in a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checked = kind + body
        return struct.pack(">I", len(body)) + checked + struct.pack(">I", zlib.crc32(checked))

    data = zlib.compress(bytes((width + 1) * height), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _attacks(folder: Path) -> list[str]:
    """Files that would take for ever, or all memory; their names."""
    names = ["stuck.png", "hog.png"]
    for name in names:
        write_part(folder / name, seed=1)
    for width, height in ((1, 10_000), (100_000, 1)):
        (folder / f"thin {width}.png").write_bytes(_png(width, height))
        names.append(f"thin {width}.png")
    return names


def _check_reason(name: str, reason: str) -> None:
    expected = {
        "stuck": "s of computing, the limit",
        "hog": "set the environment variable ANOMALY_DEC",
    }
    kind = name.split(".")[0].split(" ")[0]
    assert name in reason
    assert expected.get(kind, "pixels are too thin") in reason


def _rows(output: Path) -> dict[str, dict[str, str]]:
    with (output / "results.csv").open(newline="") as stream:
        return {Path(row["path"]).name: row for row in csv.DictReader(stream)}


def _task(**sizing: object) -> Task:
    rule = {"resize": None, "crop": None, "area": 32, "multiple": 8, **sizing}
    return Task(Preprocessing(Sizing(**rule), None, 10**6))  # type: ignore[arg-type]


@pytest.mark.clock
@needs_proc
def test_limits_hold_and_say_which(
    bad_parser: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*_attacks(tmp_path), "fine.png"]
    write_part(tmp_path / "fine.png", seed=2)
    with Decoders(3, _task()) as decoders:
        *refused, fine = decoders.load_all((i, tmp_path / name) for i, name in enumerate(names))
    assert isinstance(fine, NetworkInput)
    for name, item in zip(names, refused, strict=False):
        assert isinstance(item, UnusableImage)
        assert item.status == ("failed" if "stuck" in name else "unsupported")
        _check_reason(name, item.reason)
    write_part(tmp_path / "asleep.png", seed=1)
    monkeypatch.setattr(decoder_pool, "CLOCK_SECONDS", 5.0)
    with Decoders(1, _task()) as decoders:
        asleep = decoders.load(tmp_path / "asleep.png")
    assert isinstance(asleep, UnusableImage)
    assert "took more than 5 s, the limit" in asleep.reason


@needs_proc
def test_functions_are_limited_likewise(bad_parser: None, tmp_path: Path) -> None:
    for name in ("stuck.png", "fine.png"):
        write_part(tmp_path / name, seed=1)
    with Decoders(1) as decoders:
        found = list(decoders.map(read_image, [tmp_path / "stuck.png", tmp_path / "fine.png"]))
        assert isinstance(found[0], ImageError)
        assert (found[0].status, "2 s of computing" in str(found[0])) == ("failed", True)
        assert found[1].size == (96, 120)
        with pytest.raises(ImageError, match="No such file"):
            decoders.call(read_header, tmp_path / "none.png", about=tmp_path)


def test_large_images_get_more_time(tmp_path: Path, command: Command) -> None:
    side = 2 * int(MODEST_PIXELS**0.5)
    (tmp_path / "large").mkdir()
    large = tmp_path / "large" / "large.png"
    large.write_bytes(_png(side, side))
    write_part(tmp_path / "small.png", seed=1)

    def left(path: Path) -> float:
        signal.setitimer(signal.ITIMER_PROF, COMPUTING_SECONDS)
        try:
            read_image(path)
            return signal.getitimer(signal.ITIMER_PROF)[0]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    assert left(tmp_path / "small.png") < COMPUTING_SECONDS + 1  # the kernel counts in ticks
    assert 3 * COMPUTING_SECONDS < left(large) < 4 * COMPUTING_SECONDS
    assert read_image(large).size == (side, side)
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0  # no limit has none to be extended
    with pytest.raises(ImageError, match=r"allows \(25\.0 million\)"):
        read_image(large, max_pixels=MODEST_PIXELS)
    config = ["--config", REPOSITORY / "configs" / "folder.yaml"]
    arguments = [*config, "--set", f"data.root={tmp_path / 'large'}", "--json"]
    _, out, _ = command("check", arguments)
    assert [f["kind"] for f in json.loads(out)["faults"]] == ["too_few_images"]


@needs_proc
def test_the_memory_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = 2 * int(MODEST_PIXELS**0.5)
    (tmp_path / "large.png").write_bytes(_png(side, side))
    write_part(tmp_path / "small.png", seed=1)
    monkeypatch.setenv("ANOMALY_DECODER_MEMORY", "400")
    with Decoders(1) as decoders:
        paths = [tmp_path / "large.png", tmp_path / "small.png"]
        with pytest.raises(ImageError, match=r"more than the 0\.4 GB .*ANOMALY_DECODER_MEMORY"):
            decoders.call(read_image, paths[0], about=paths[0])
        assert decoders.call(read_image, paths[1], about=paths[1]).size == (96, 120)
    monkeypatch.setenv("ANOMALY_DECODER_MEMORY", "lots")
    with pytest.raises(AnomalyError, match="'lots'; it must be a whole number of megabytes"):
        Decoders(1)


@needs_proc
def test_a_process_that_ends_by_itself_costs_one_image(bad_parser: None, tmp_path: Path) -> None:
    for name in ("mortal.png", "fine.png"):
        write_part(tmp_path / name, seed=1)
    with Decoders(1) as decoders:
        ended, fine = decoders.map(read_image, [tmp_path / "mortal.png", tmp_path / "fine.png"])
    assert "has crashed 2 decoding processes" in str(ended)
    assert fine.size == (96, 120)


@pytest.mark.parametrize(("dtype", "beside"), [("f4", 0), ("u1", 500_000_000)])
def test_long_files_of_modest_images_are_read(dtype: str, beside: int, tmp_path: Path) -> None:
    """RGB of floats has 12 bytes a pixel; and what lies beside the pixels takes room, too."""
    side = 4890
    assert 12 * side**2 > 8 * MODEST_PIXELS + 64 * 1024**2
    tifffile.imwrite(tmp_path / "long.tif", np.zeros((side, side, 3), dtype), photometric="rgb")
    with (tmp_path / "long.tif").open("ab") as file:
        file.truncate(file.tell() + beside)
    with Decoders(1) as decoders:
        (image,) = decoders.map(read_image, [tmp_path / "long.tif"])
    assert image.size == (side, side)


@pytest.mark.slow
@needs_proc
def test_infer_and_check(
    bad_parser: None, tmp_path: Path, run_folder: Path, command: Command
) -> None:
    names = _attacks(tmp_path / "line")
    for i in range(3):
        write_part(tmp_path / "line" / f"good {i}.png", seed=700 + i)
    base = ["--model", run_folder, "--input", tmp_path / "line", "--output", tmp_path / "out"]
    code, out, _ = command("infer", base)
    assert (code, "3 of 7 images scored" in out) == (3, True)
    rows = _rows(tmp_path / "out")
    for name in names:
        assert rows[name]["status"] in ("failed", "unsupported")
        _check_reason(name, rows[name]["reason"])
    config = ["--config", REPOSITORY / "configs" / "folder.yaml"]
    code, out, _ = command("check", [*config, "--set", f"data.root={tmp_path / 'line'}", "--json"])
    report = json.loads(out)
    assert code == 3
    faults = {f["name"]: f["detail"] for f in report["faults"] if f["severity"] == "unusable"}
    assert sorted(faults) == sorted(names)
    for name in names:
        _check_reason(name, faults[name])


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_train_and_evaluate(bad_parser: None, tmp_path: Path, command: Command, kind: str) -> None:
    product = write_product(tmp_path / "disc", n_train=8)
    names = [*_attacks(product / "train" / "good"), *_attacks(product / "test" / "good")]
    arguments = train_arguments(product, tmp_path / "run", f"model.kind={kind}")
    assert command("train", arguments)[0] == 3
    summary = json.loads((tmp_path / "run" / "train.json").read_text())
    assert summary["images"]["learned"] == 8
    for name, reason in summary["refused"].items():
        _check_reason(Path(name).name, reason)
    assert len(summary["refused"]) == len(names) / 2
    base = ["--model", tmp_path / "run", "--output", tmp_path / "evaluation"]
    assert command("evaluate", base)[0] == 3
    with (tmp_path / "evaluation" / "scores.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    refused = {Path(row["path"]).name: row["reason"] for row in rows if not row["image_score"]}
    assert (len(rows), sorted(refused)) == (10, sorted(names[4:]))
    for name, reason in refused.items():
        _check_reason(name, reason)


def _run(name: str, arguments: Sequence[object]) -> "subprocess.Popen[str]":
    """A command with the parser above, in a process of its own."""
    code = _START.format(parser=_PARSER) + _MAIN
    return subprocess.Popen(
        [sys.executable, "-c", code, name, *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _until(happened: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def _serving(parent: int) -> list[int]:
    """Living decoding processes of a parent, also when it is gone."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            said = (place / "cmdline").read_bytes()
            state = (place / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if f"serve({parent}, ".encode() in said and state != b"Z":
            found.append(int(place.name))
    return found


def _commands(tmp_path: Path, run: Path) -> dict[str, tuple[str, list[object]]]:
    """Every command that reads images, one of which is stuck."""
    product = write_product(tmp_path / "disc", n_train=6)
    bad = [product / "train" / "good", product / "test" / "good", tmp_path / "line"]
    for folder in bad:
        write_part(folder / "stuck.png", seed=1)
    config = ["--config", REPOSITORY / "configs" / "folder.yaml", "--set", f"data.root={bad[2]}"]
    model, line, out = ["--model", run], bad[2], ["--output", tmp_path / "out"]
    golden = tmp_path / "golden"
    write_part(golden / "stuck.png", seed=1)
    return {
        "infer": ("infer", [*model, "--input", line, *out]),
        "watch": ("infer", [*model, "--input", line, *out, "--watch"]),
        "train": ("train", train_arguments(product, tmp_path / "new")),
        "evaluate": ("evaluate", [*model, "--data-root", product.parent, *out]),
        "check": ("check", config),
        "features": (
            "features",
            ["--backbone", "tiny", "--weights", "random", "--input", line, *out],
        ),
        "explain": ("explain", [*model, "--input", line / "stuck.png", *out]),
        "selfcheck": ("selfcheck", [*model, "--golden", golden, "--record"]),
        "calibrate": ("calibrate", [*model, "--good", line]),
    }


@pytest.mark.clock
@needs_proc
@pytest.mark.parametrize(
    "name",
    [
        "infer",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("watch", "train", "evaluate", "check", "features"),
                *("explain", "selfcheck", "calibrate"),
            )
        ),
    ],
)
def test_sigterm_ends_a_command_whose_parser_is_stuck(
    name: str, tmp_path: Path, run_folder: Path
) -> None:
    command, arguments = _commands(tmp_path, run_folder)[name]
    process = _run(command, arguments)
    try:
        _until(lambda: list(tmp_path.rglob("stuck.tried")) or process.poll() is not None)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 10
        assert "Traceback" not in err
        # With --watch it is the end of a shift, in which no image was refused.
        assert process.returncode == (0 if name == "watch" else 143)
        _until(lambda: not _serving(process.pid), 5)
    finally:
        process.kill()


@needs_proc
def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path, run_folder: Path) -> None:
    command, arguments = _commands(tmp_path, run_folder)["infer"]
    process = _run(command, arguments)
    _until(lambda: list(tmp_path.rglob("stuck.tried")) or process.poll() is not None)
    assert _serving(process.pid)
    process.kill()
    process.wait()
    _until(lambda: not _serving(process.pid), 5)


def test_a_second_signal_says_how_to_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    resume = pytest.raises(stopping.Interrupted, match="continue with --resume")
    with resume as raised, stopping.Stopping() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        time.sleep(0.2)
        signal.raise_signal(signal.SIGINT)
    assert raised.value.exit_code == 143
    assert "a second signal ends it at once" in capfd.readouterr().err
    with pytest.raises(stopping.Interrupted), stopping.Stopping(politely=False):
        signal.raise_signal(signal.SIGINT)


def test_a_command_that_never_returns_ends_all_the_same() -> None:
    code = (
        "import ctypes, os, signal, threading, sys\n"
        "from anomaly.cli import stopping\n"
        "stopping.PATIENCE_SECONDS = 0.5\n"
        "with stopping.Stopping():\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    ctypes.CDLL(None).sleep(60); ctypes.CDLL(None).sleep(60)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, "continue with --resume" in done.stderr) == (143, True)
    assert time.monotonic() - began < 30
