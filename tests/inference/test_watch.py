"""`infer --watch`: every file that arrives has one row, once nobody writes to it any more."""

import itertools
import json
import os
import pickle
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import Command, write_part
from kit import table

import anomaly
from anomaly.cli import infer
from anomaly.errors import OutputError
from anomaly.inference import pipeline
from anomaly.inference.pipeline import Arrivals
from anomaly.inference.results import Outputs
from anomaly.storage.folder import model_id

Happening = Callable[[], object]
Shift = Callable[..., tuple[str, str]]


def nothing() -> None:
    """Let time pass."""


class StandIn:
    """Stands in for time and for Ctrl-C: at each pause something happens, and then it is over."""

    exit_code, perf_counter = 130, staticmethod(time.perf_counter)

    def __init__(self, happenings: Iterable[Happening]) -> None:
        self._happenings = itertools.chain(happenings, [nothing] * 2)
        self.signal: int | None = None
        self._now = 0.0

    def has_come(self) -> bool:
        return self.signal is not None

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.5
        self._now += seconds
        happening = next(self._happenings, None)
        if happening is None:
            self.signal = signal.SIGTERM
        else:
            happening()


@pytest.fixture
def shift(
    command: Command, monkeypatch: pytest.MonkeyPatch, run_folder: Path, tmp_path: Path
) -> Shift:
    def run(
        code: int, happenings: Iterable[Happening], *flags: object, output: str = "out"
    ) -> tuple[str, str]:
        stand_in = StandIn(happenings)
        monkeypatch.setattr(pipeline, "time", stand_in)
        monkeypatch.setattr(infer, "Stopping", lambda: nullcontext(stand_in))
        base = ["--model", run_folder, "--input", tmp_path / "line", "--watch"]
        ended, out, err = command("infer", [*base, "--output", tmp_path / output, *flags])
        assert ended == code, out + err
        return out, err

    (tmp_path / "line").mkdir()
    return run


def names(output: Path) -> list[str]:
    return [Path(row["path"]).name for row in table(output)]


def arrive(folder: Path, name: str, **part: object) -> Happening:
    return lambda: write_part(folder / name, **{"seed": 900, **part})  # type: ignore[arg-type]


def test_a_shift(shift: Shift, tmp_path: Path) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    write_part(line / "there before.png", seed=1)
    half = line / "half.png"
    write_part(tmp_path / "whole.png", seed=3)
    whole = (tmp_path / "whole.png").read_bytes()

    def is_running() -> None:
        assert names(output) == ["there before.png"]
        half.write_bytes(whole[:2000])

    happenings = [
        nothing,
        is_running,
        lambda: half.write_bytes(whole[:3000]),
        lambda: half.write_bytes(whole),
        lambda: (line / "broken.png").write_bytes(b"broken"),
        arrive(line, "sub/spot.png", mark=(30, 50)),
        lambda: line.rename(tmp_path / "away"),
        nothing,
        line.mkdir,  # as a drive that isn't mounted
        line.rmdir,
        lambda: (tmp_path / "away").rename(line),
    ]
    out, err = shift(3, happenings, "--write", "heatmaps", "page", "regions", "masks")
    assert names(output) == ["there before.png", "half.png", "broken.png", "spot.png"]
    rows = table(output)
    assert [row["verdict"] for row in rows] == ["good", "good", "", "reject"]
    assert "3 of 4 images scored: 2 good, 0 to review, 1 rejected, 1 unsupported" in out
    lines = out.splitlines()[1:-1]
    assert [line.split()[2] for line in lines] == ["good", "good", "unsupported", "reject"]
    assert re.match(r"[\d:]{8} UTC  reject +[\d.]+ = \d+\.\d\d x reject  .*spot.png$", lines[3])
    assert "line can't be listed" in err
    assert "can be listed again" in err
    lines = [json.loads(text) for text in (output / "results.jsonl").read_text().splitlines()]
    assert [one["path"] for one in lines] == [row["path"] for row in rows]
    assert (output / rows[3]["heatmap"]).exists()
    assert (output / "masks" / "sub" / "spot.png").exists()
    regions = table(output, "regions.csv")
    assert regions
    assert {Path(region["path"]).name for region in regions} == {"spot.png"}
    page = (output / "results.html").read_text("utf-8")
    assert "3 of 4 images scored" in page
    assert all(row["path"] in page for row in rows)


def test_warnings_come_once(shift: Shift, run_folder: Path, tmp_path: Path) -> None:
    """Of a model that is changed meanwhile, and of more flagged parts than promised."""
    run, output = shutil.copytree(run_folder, tmp_path / "run"), tmp_path / "out"
    for i in range(30):
        write_part(tmp_path / "line" / f"{i:02}.png", seed=900 + i, mark=(30, 30 + i))

    def recalibrate() -> None:
        changed = anomaly.load(run, device="cpu").calibrate(threshold=7, force=True)
        changed.save(run / "model", overwrite=True)

    late = arrive(tmp_path / "line", "late.png", mark=(30, 30))
    flags = ["--model", run, "--write", "heatmaps"]
    _, err = shift(0, [nothing, recalibrate, late, nothing], *flags)
    assert err.count("the model in") == 1
    assert f"has changed to {model_id(run / 'model')}" in err
    rows = table(output)
    assert len(rows) == 31
    assert {row["model_id"] for row in rows} == {model_id(run_folder / "model")}
    assert err.count("20 of 20 images flagged (100 %); 7.7 % expected, at most 22 %") == 1
    assert err.count("images flagged") == 1


def test_names_that_are_used_again_and_are_as_long_as_a_file_system_takes(
    shift: Shift, tmp_path: Path
) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    used = ["part.png", "x" * 251 + ".png", "検査画像" * 20 + "不良品.bmp"]  # up to 255 bytes
    happenings = [
        *(arrive(line, name) for name in used),
        nothing,
        *(arrive(line, name, mark=(30, 50)) for name in used),
        nothing,
        nothing,
        (line / "part.png").unlink,
        nothing,
        arrive(line, "part.png"),
    ]
    assert shift(0, happenings, "--write", "heatmaps", "masks", "maps")[1] == ""
    rows = [row for row in table(output) if row["path"].endswith("/part.png")]
    assert [row["verdict"] for row in rows] == ["good", "reject", "good"]
    parts = ["heatmaps/part.png", "heatmaps/part~2.png", "heatmaps/part~3.png"]
    assert [row["heatmap"] for row in rows] == parts
    assert sorted(names(output)) == sorted([*used, *used, "part.png"])
    pictures = {row["heatmap"] for row in table(output)}
    assert len(pictures) == len(list((output / "maps").iterdir())) == 7
    assert all((output / picture).exists() for picture in pictures)


def test_results_in_the_folder_that_is_followed(
    shift: Shift, tmp_path: Path, command: Command, run_folder: Path
) -> None:
    """By whatever names they are called; a folder under two names isn't followed twice."""
    line, link = tmp_path / "line", tmp_path / "link"
    link.symlink_to(line)
    write_part(line / "a.png", seed=1)
    (line / ".hidden").mkdir()
    for other in (link, line / ".hidden"):
        _, err = shift(2, [], "--input", other, output="line")
        assert "which --watch follows; leave it out" in err
    assert shift(0, [nothing] * 4, "--write", "masks", "maps", output="line")[1] == ""
    assert names(line) == ["a.png"]
    (line / "readme").touch()
    (line / ".other.png.part").touch()
    for output in ("link/out", "line/../line/out2"):
        shift(0, [nothing] * 2, "--write", "heatmaps", output=output)
        assert names(tmp_path / output) == ["a.png"], output
    arguments = ["--model", run_folder, "--input", line, "--output", line, "--overwrite"]
    code, _, err = command("infer", arguments)
    own, other = err.splitlines()
    assert (code, "this program's own outputs" in own, "1 file" in other) == (0, True, True)
    assert names(line) == ["a.png"]
    assert "1 file is skipped" in shift(0, [], "--overwrite", output="line")[1]
    assert (line / ".other.png.part").exists()


def test_resumed_after_a_kill(shift: Shift, tmp_path: Path) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    for i in range(3):
        write_part(line / f"{i}.png", seed=i)
        os.utime(line / f"{i}.png", (i, i))
    shift(0, [arrive(line, "3.png")], "--write", "regions")
    table_file = output / "results.jsonl"
    rows, lines = (output / "results.csv").read_bytes(), table_file.read_bytes()
    # A table that somebody has cut isn't grown.
    watched = output / "results.watched.jsonl"
    for cut in (lines[:-30], None):
        table_file.unlink() if cut is None else table_file.write_bytes(cut)
        _, err = shift(2, [], "--resume", "--write", "regions")
        assert ("results.jsonl " in err, "give --overwrite" in err) == (True, True)
        assert cut is None or table_file.read_bytes() == cut
    # As if killed while the last row was written.
    text = watched.read_bytes()
    watched.write_bytes(text[: text.rindex(b'{"files"') + 9])
    table_file.write_bytes(lines[:-20])
    (line / "0.png").unlink()
    write_part(line / "1.png", seed=77, mark=(30, 50))
    for flags, says in (
        (["--write", "regions"], "add --resume"),
        (["--resume"], "another set of outputs"),
        (["--resume", "--overwrite"], "--overwrite"),
    ):
        assert says in shift(2, [], *flags)[1]
    with pytest.raises(OutputError, match="resume it with --watch"):
        Outputs(output).begin(watch=False, resume=True, overwrite=False)
    shift(0, [arrive(line, "new.png")], "--resume", "--write", "regions")
    assert names(output) == ["0.png", "1.png", "2.png", "3.png", "1.png", "new.png"]
    # The tables are as if nothing had happened, up to the row that was scored again.
    for name, before in (("results.csv", rows), ("results.jsonl", lines)):
        after = (output / name).read_bytes()
        assert after.startswith(b"".join(before.splitlines(keepends=True)[:-1]))
        assert after.endswith(b"\n")
    assert len(table_file.read_text().splitlines()) == 6
    shift(0, [], "--overwrite", "--write", "none")
    assert not (output / "regions.csv").exists()


def test_what_cant_be_watched(shift: Shift, tmp_path: Path) -> None:
    assert "isn't a folder" in shift(2, [], "--input", __file__)[1]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.partial.jsonl").touch()
    assert "holds an interrupted run without --watch" in shift(2, [])[1]


def write(file: Path, time: int, data: bytes = b"1") -> None:
    """A file that was written at a time, in seconds."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    os.utime(file, (time, time))


def test_the_wait_is_a_setting(tmp_path: Path) -> None:
    arrivals = Arrivals([tmp_path], {}, settle=5.0)
    write(tmp_path / "a.png", 1, bytes(100))  # room for what is still to be written
    assert [len(arrivals.poll(float(now))) for now in range(5)] == [0] * 5
    write(tmp_path / "a.png", 2, b"1" * 100)
    assert [len(arrivals.poll(float(now))) for now in range(5, 12)] == [0] * 5 + [1, 0]


def test_what_has_left_is_forgotten(tmp_path: Path) -> None:
    arrivals, remembered = Arrivals([tmp_path], {}), []
    for i in range(100, 200):
        file = tmp_path / f"{i}.png"
        write(file, 1)
        arrivals.poll()
        assert len(arrivals.poll()) == 1
        file.unlink()
        arrivals.poll()
        remembered.append(len(pickle.dumps(arrivals)))
    assert max(remembered) == remembered[0]
