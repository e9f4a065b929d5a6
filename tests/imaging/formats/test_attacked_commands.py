"""Attacks by files go through every command: a reason for each, in time, and the others scored."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from attack_files import attacks
from conftest import REPOSITORY, train_arguments, write_part, write_product
from picture_files import encoded, picture, png

from anomaly.imaging.geometry import THINNEST

_MOST_SECONDS, _MOST_BYTES = 10, 2 * 10**9
_HOLES = (3 * 2**30, 19 * 2**30 // 10)  # more than any picture may have, and less
_GOOD = [f"good {i}.png" for i in range(4)]

pytestmark = [
    pytest.mark.clock,
    pytest.mark.skipif(
        not Path("/proc/self/stat").exists(), reason="nothing says here what a process uses"
    ),
]

# A command that notes for each request to a decoding process what it computed, and on the clock.
_COMMAND = """
import json, os, sys, time
from pathlib import Path
from anomaly.imaging import decoder_pool
from anomaly.cli import main
asked = decoder_pool._DecoderProcess.ask
def used(process):
    try:
        fields = Path(f"/proc/{{process._child.pid}}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, AttributeError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
def ask(self, *request, **options):
    child, before, begun = self._child, used(self), time.monotonic()
    try:
        return asked(self, *request, **options)
    finally:
        computed = used(self) - (before if self._child is child else 0)
        with open({noted!r}, "a") as stream:
            line = [repr(request)[:300], computed, time.monotonic() - begun]
            print(json.dumps(line), file=stream)
decoder_pool._DecoderProcess.ask = ask
sys.exit(main(sys.argv[1:]))
"""


def _write_attacks(folder: Path) -> dict[str, bool | None]:
    """Write every attack; says of each name whether it may be scored, None where either will do."""
    folder.mkdir(parents=True, exist_ok=True)
    fates: dict[str, bool | None] = {}
    for number, (what, data, expected) in enumerate(attacks()):
        suffix = re.split("[ ,]", what)[0].lower()
        name = f"attack {number:02}.{suffix}"
        (folder / name).write_bytes(data)
        if expected is None:
            fates[name] = False
        else:
            height, width = expected.shape[:2]
            fates[name] = max(height, width) <= THINNEST * min(height, width)
    for width, height in ((1, 100_000), (1, 10_000), (100_000, 1)):
        fates[name := f"thin {width}×{height}.png"] = False
        zeros = zlib.compress(bytes((width + 1) * height))
        (folder / name).write_bytes(png(width, height, 8, 0, [zeros]))
    for size in _HOLES:
        for kind in ("PNG", "JPEG", "TIFF", "BMP", "WEBP"):
            fates[name := f"hole of {size}.{kind.lower()}"] = None
            (folder / name).write_bytes(encoded(picture(), kind))
            os.truncate(folder / name, size)
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_bytes(b"no picture")
    return fates | {"empty.png": False, "text.jpg": False}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bool | None]]:
    """A folder with attacks, and what may become of each."""
    folder = tmp_path_factory.mktemp("attacks")
    return folder, _write_attacks(folder)


def _among_good(attacked: tuple[Path, dict[str, bool | None]], folder: Path) -> Path:
    """The attacks and a few good images in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in attacked[0].iterdir():
        os.link(file, folder / file.name)
    for i, name in enumerate(_GOOD):
        write_part(folder / name, seed=700 + i)
    return folder


class _Run:
    """A command in a process of its own, whose decoding processes are measured meanwhile."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[object]) -> None:
        self._noted = folder / f"{name}.asked"
        self.most = self.most_of_all = 0
        code = _COMMAND.format(noted=str(self._noted))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, name, *map(str, arguments)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._measure, daemon=True).start()

    def finish(self) -> tuple[int, str]:
        """Exit code and what it has said, once it is over and each request was cheap."""
        out, err = self.process.communicate(timeout=1500)
        assert "Traceback" not in out + err
        asked = [json.loads(line) for line in self._noted.read_text().splitlines()]
        assert [(what, seconds) for what, seconds, _ in asked if seconds > _MOST_SECONDS] == []
        assert 0 < self.most < _MOST_BYTES
        slowest = max(asked, key=lambda one: float(one[1]))
        print(f"{len(asked)} requests, slowest {slowest}; {self.most / 1e9:.2f} GB in a process")
        print(f"{self.most_of_all / 1e9:.2f} GB in all")
        return self.process.returncode, out + err

    def _measure(self) -> None:
        while self.process.poll() is None:
            held = [_held(pid) for pid in _children(self.process.pid)]
            own = _held(self.process.pid)
            self.most = max([self.most, *(peak for peak, _ in held)])
            self.most_of_all = max(self.most_of_all, own[1] + sum(now for _, now in held))
            time.sleep(0.05)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, tasks.read_text().split())
        except OSError:
            continue
    return found


def _held(pid: int) -> tuple[int, int]:
    """Bytes that a process has held at most, and holds."""
    try:
        said = Path(f"/proc/{pid}/status").read_text()
        peak, now = re.search(r"VmHWM:\s+(\d+)", said), re.search(r"VmRSS:\s+(\d+)", said)
        return (int(peak[1]) * 1024, int(now[1]) * 1024) if peak and now else (0, 0)
    except OSError:
        return 0, 0


def _until(happened: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


def _check(fates: dict[str, bool | None], reasons: dict[str, str]) -> None:
    """Each attack has its fate, and a reason that names it where it isn't scored."""
    assert sorted(reasons) == sorted([*fates, *_GOOD])
    assert [reasons[name] for name in _GOOD] == [""] * len(_GOOD)
    assert [name for name, fate in fates.items() if fate is False and not reasons[name]] == []
    assert [reasons[name] for name, fate in fates.items() if fate and reasons[name]] == []
    for name, reason in reasons.items():
        assert not reason or name in reason
        assert "\n" not in reason
    for name in fates:
        if fates[name] is None or reasons[name]:
            print(f"{name}: {reasons[name]}")


def _reasons(table: Path, score: str = "image_score") -> dict[str, str]:
    """Why each image wasn't scored, by name; empty for one that was."""
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len({row["path"] for row in rows}) == len(rows)
    assert all(row[score] or row["reason"] for row in rows)
    return {Path(row["path"]).name: "" if row[score] else row["reason"] for row in rows}


def test_infer(attacked, tmp_path, run_folder):
    line, output = _among_good(attacked, tmp_path / "line"), tmp_path / "out"
    base = ["--model", run_folder, "--input", line, "--output", output]
    code, said = _Run(tmp_path, "infer", base).finish()
    assert code == 3, said
    _check(attacked[1], _reasons(output / "results.csv"))


def test_watch(attacked, tmp_path, run_folder):
    line, output = _among_good(attacked, tmp_path / "line"), tmp_path / "out"
    base = ["--model", run_folder, "--input", line, "--output", output, "--watch"]
    run = _Run(tmp_path, "infer", base)
    rows = output / "results.jsonl"
    wanted = len(attacked[1]) + len(_GOOD)

    def done() -> bool:
        return run.process.poll() is not None or (
            rows.exists() and rows.read_bytes().count(b"\n") >= wanted
        )

    _until(done, 1200)
    run.process.send_signal(signal.SIGTERM)
    code, said = run.finish()
    assert code == 3, said
    _check(attacked[1], _reasons(output / "results.csv"))


@pytest.fixture(scope="module")
def attacked_product(attacked, tmp_path_factory) -> Iterator[Path]:
    """A product with the attacks among its training and its test images."""
    product = write_product(tmp_path_factory.mktemp("attacked") / "disc", n_train=8)
    for folder in (product / "train" / "good", product / "test" / "good"):
        _among_good(attacked, folder)
    return product


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_train(attacked, attacked_product, tmp_path, kind):
    arguments = train_arguments(attacked_product, tmp_path / "run", f"model.kind={kind}")
    code, said = _Run(tmp_path, "train", arguments).finish()
    assert code == 3, said
    summary = json.loads((tmp_path / "run" / "train.json").read_text())
    refused = {Path(name).name: reason for name, reason in summary["refused"].items()}
    fates = {
        name: fate if fate is False or kind == "patchcore" else None
        for name, fate in attacked[1].items()
    }
    _check(fates, {name: refused.get(name, "") for name in [*fates, *_GOOD]})
    assert summary["images"]["learned"] == 8 + len(_GOOD) + len(fates) - len(refused)


def test_evaluate(attacked, attacked_product, tmp_path, run_folder):
    base = [
        "--model",
        run_folder,
        "--data-root",
        attacked_product.parent,
        "--output",
        tmp_path / "out",
    ]
    code, said = _Run(tmp_path, "evaluate", base).finish()
    assert code == 3, said
    reasons = _reasons(tmp_path / "out" / "scores.csv")
    assert sum(not reason for reason in reasons.values()) >= 6 + len(_GOOD)
    _check(attacked[1], {name: reasons[name] for name in [*attacked[1], *_GOOD]})


def test_check(attacked, tmp_path):
    line = _among_good(attacked, tmp_path / "line")
    config = ["--config", REPOSITORY / "configs" / "folder.yaml"]
    arguments = [*config, "--set", f"data.root={line}", "--json"]
    code, said = _Run(tmp_path, "check", arguments).finish()
    assert code == 3, said
    faults = json.JSONDecoder().raw_decode(said)[0]["faults"]  # progress comes behind it
    reasons = {f["name"]: f["detail"] for f in faults if f["severity"] == "unusable"}
    _check(attacked[1], {name: reasons.get(name, "") for name in [*attacked[1], *_GOOD]})
