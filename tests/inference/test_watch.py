"""`infer --watch`: every file that arrives has one row, for as long as the shift lasts."""

import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from conftest import REPOSITORY, Command, write_part

import anomaly
from anomaly.cli import infer_watch
from anomaly.inference import watch as watching
from anomaly.storage.folder import model_id


class _Shift:
    """Stands in for time and for Ctrl-C: at each pause something happens, and then it is over."""

    exit_code = 130

    def __init__(self, happenings: Iterable[Callable[[], object]]) -> None:
        nothing = [lambda: None] * 2
        self._happenings = itertools.chain(happenings, nothing)
        self.signal: int | None = None
        self._now = 0.0

    def __enter__(self) -> "_Shift":
        return self

    def __exit__(self, *_: object) -> None:
        pass

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
) -> Callable[..., tuple[int, str, str]]:
    def run(
        happenings: Iterable[Callable[[], object]],
        *flags: object,
        output: str = "out",
        followed: str = "line",
    ) -> tuple[int, str, str]:
        stand_in = _Shift(happenings)
        monkeypatch.setattr(watching, "time", stand_in)
        monkeypatch.setattr(infer_watch, "Stopping", lambda: stand_in)
        base = ["--model", run_folder, "--input", tmp_path / followed]
        base += ["--output", tmp_path / output, "--watch"]
        return command("infer", [*base, *flags])

    (tmp_path / "line").mkdir()
    return run


def _rows(output: Path) -> list[dict[str, str]]:
    with (output / "results.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def _names(output: Path) -> list[str]:
    return [Path(row["path"]).name for row in _rows(output)]


def _arrive(folder: Path, name: str, **part: object) -> Callable[[], object]:
    return lambda: write_part(folder / name, **{"seed": 900, **part})  # type: ignore[arg-type]


def test_a_folder_under_two_names_is_followed_once(
    shift: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "again").symlink_to(tmp_path / "line")
    write_part(tmp_path / "line" / "sub" / "a.png", seed=1)
    write_part(tmp_path / "line" / "b.png", seed=2)
    write_part(tmp_path / "line" / ".hidden" / "c.png", seed=3)
    line = tmp_path / "line"
    twice = ["--input", tmp_path / "again", line / "sub", line / ".hidden", "--no-page"]
    assert shift([lambda: None, lambda: None], *twice)[0] == 0
    assert sorted(_names(tmp_path / "out")) == ["a.png", "b.png", "c.png"]


def test_a_shift(shift: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    write_part(line / "there before.png", seed=1)
    half = line / "half.png"
    write_part(tmp_path / "whole.png", seed=3)
    whole = (tmp_path / "whole.png").read_bytes()

    def is_running() -> None:
        assert _names(output) == ["there before.png"]
        half.write_bytes(whole[:2000])

    happenings = [
        lambda: None,
        is_running,
        lambda: half.write_bytes(whole[:3000]),
        lambda: half.write_bytes(whole),
        lambda: (line / "broken.png").write_bytes(b"broken"),
        _arrive(line, "sub/spot.png", mark=(30, 50)),
        lambda: line.rename(tmp_path / "away"),
        lambda: None,
        lambda: (tmp_path / "away").rename(line),
    ]
    code, out, err = shift(happenings, "--regions", "--masks")
    assert code == 3
    assert _names(output) == ["there before.png", "half.png", "broken.png", "spot.png"]
    rows = _rows(output)
    assert [row["verdict"] for row in rows] == ["good", "good", "", "reject"]
    assert "3 of 4 images scored: 2 good, 0 to review, 1 rejected, 1 unsupported" in out
    lines = out.splitlines()[1:-1]
    assert [line.split()[2] for line in lines] == ["good", "good", "unsupported", "reject"]
    assert re.match(
        r"\d\d:\d\d:\d\d UTC  reject +[\d.]+ = \d+\.\d\d x reject  .*spot.png$", lines[3]
    )
    assert "line: can't list this folder" in err
    assert "can be listed again" in err
    lines = [json.loads(text) for text in (output / "results.jsonl").read_text().splitlines()]
    assert [one["path"] for one in lines] == [row["path"] for row in rows]
    assert (output / rows[3]["heatmap"]).exists()
    assert (output / "masks" / "sub" / "spot.png").exists()
    regions = (output / "regions.csv").read_text().splitlines()
    assert regions[0].startswith("path,region,x,y,")
    assert all(f"{os.sep}spot.png," in text for text in regions[1:])
    assert len(regions) > 1
    page = (output / "results.html").read_text("utf-8")
    assert "3 of 4 images scored" in page
    assert all(row["path"] in page for row in rows)


def test_a_model_that_is_changed_meanwhile(
    shift: Callable[..., tuple[int, str, str]],
    run_folder: Path,
    tmp_path: Path,
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    line = tmp_path / "line"
    write_part(line / "one.png", seed=1)

    def recalibrate() -> None:
        changed = anomaly.load(run, device="cpu").calibrate(threshold=7, force=True)
        changed.save(run / "model", overwrite=True)

    code, _, err = shift(
        [lambda: None, recalibrate, _arrive(line, "two.png"), lambda: None], "--model", run
    )
    assert code == 0
    assert err.count("the model in") == 1
    first, second = _rows(tmp_path / "out")
    assert first["model_id"] == second["model_id"] == model_id(run_folder / "model")
    assert f"has changed to {model_id(run / 'model')}" in err


def test_a_name_that_is_used_again(
    shift: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    nothing = [lambda: None] * 2
    happenings = [
        _arrive(line, "part.png", seed=1),
        *nothing,
        _arrive(line, "part.png", mark=(30, 50)),
        *nothing,
        (line / "part.png").unlink,
        *nothing,
        _arrive(line, "part.png", seed=2),
    ]
    assert shift(happenings)[0] == 0
    rows = _rows(output)
    assert [row["verdict"] for row in rows] == ["good", "reject", "good"]
    pictures = [row["heatmap"] for row in rows]
    assert pictures == ["heatmaps/part.png", "heatmaps/part~2.png", "heatmaps/part~3.png"]
    assert all((output / picture).exists() for picture in pictures)


def test_names_as_long_as_a_file_system_takes(
    shift: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    long = ["x" * 251 + ".png", "検査画像" * 20 + "不良品.bmp"]  # 255 and 253 bytes
    nothing = [lambda: None] * 2
    happenings = [
        *(_arrive(line, name) for name in long),
        *nothing,
        *(_arrive(line, name, seed=901) for name in long),
        *nothing,
    ]
    code, _, err = shift(happenings, "--masks", "--maps", "float32")
    assert (code, err) == (0, "")
    pictures = [row["heatmap"] for row in _rows(output)]
    assert sorted(_names(output)) == sorted(2 * long)
    assert len(set(pictures)) == 4
    assert all((output / picture).exists() for picture in pictures)
    assert len(list((output / "maps").iterdir())) == 4


def test_results_in_the_folder_that_is_followed(
    shift: Callable[..., tuple[int, str, str]], tmp_path: Path, command: Command, run_folder: Path
) -> None:
    write_part(tmp_path / "line" / "a.png", seed=1)
    nothing = [lambda: None] * 4
    code, _, err = shift(nothing, "--masks", "--maps", "uint16", output="line")
    assert (code, err) == (0, "")
    assert _names(tmp_path / "line") == ["a.png"]
    (tmp_path / "line" / "readme").touch()
    (tmp_path / "line" / ".other.png.part").touch()
    base = ["--model", run_folder, "--input", tmp_path / "line", "--output", tmp_path / "line"]
    for _ in range(2):
        code, _, err = command("infer", [*base, "--overwrite"])
        own, other = err.splitlines()
        assert (code, "this program's own outputs" in own, "1 file" in other) == (0, True, True)
        assert _names(tmp_path / "line") == ["a.png"]
    assert "1 file is skipped" in shift([], "--overwrite", output="line")[2]
    assert (tmp_path / "line" / ".other.png.part").exists()


@pytest.mark.skipif(os.name != "posix", reason="makes links")
def test_results_in_the_folder_that_is_followed_by_another_name(
    shift: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    write_part(tmp_path / "line" / "a.png", seed=1)
    (tmp_path / "link").symlink_to(tmp_path / "line")
    nothing = [lambda: None] * 4
    for turn, output in enumerate(("link/out", "line/../line/out2", "link/../link")):
        code, _, _ = shift(nothing, "--masks", output=output)
        assert (code, _names(tmp_path / output)) == (0, ["a.png"]), turn
    # Followed through the link, and written to directly.
    code, _, _ = shift(nothing, "--overwrite", output="line/out", followed="link")
    assert (code, _names(tmp_path / "line" / "out")) == (0, ["a.png"])


def test_resumed_after_a_kill(shift: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    for i in range(3):
        write_part(line / f"{i}.png", seed=i)
        os.utime(line / f"{i}.png", (i, i))
    assert shift([_arrive(line, "3.png")], "--regions")[0] == 0
    rows, lines = ((output / n).read_bytes() for n in ("results.csv", "results.jsonl"))
    # As if killed while the last row was written.
    watched = output / "results.watched.jsonl"
    text = watched.read_bytes()
    watched.write_bytes(text[: text.rindex(b'{"files"') + 9])
    (output / "results.jsonl").write_bytes(lines[:-20])
    (line / "0.png").unlink()
    write_part(line / "1.png", seed=77, mark=(30, 50))
    code, _, err = shift([], "--regions")
    assert (code, "add --resume" in err) == (2, True)
    code, _, err = shift([], "--resume")
    assert (code, "another set of outputs" in err) == (2, True)
    assert shift([_arrive(line, "new.png")], "--resume", "--regions")[0] == 0
    assert _names(output) == ["0.png", "1.png", "2.png", "3.png", "1.png", "new.png"]
    # The tables are as if nothing had happened, up to the row that was scored again.
    for name, before in (("results.csv", rows), ("results.jsonl", lines)):
        after = (output / name).read_bytes()
        assert after.startswith(b"".join(before.splitlines(keepends=True)[:-1]))
        assert after.endswith(b"\n")
    assert len((output / "results.jsonl").read_text().splitlines()) == 6
    code, _, err = shift([], "--resume", "--overwrite")
    assert code == 2
    assert shift([], "--overwrite")[0] == 0
    assert not (output / "regions.csv").exists()


@pytest.mark.parametrize("gone", [False, True])
def test_a_table_that_somebody_has_cut_is_not_grown(
    gone: bool, shift: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    write_part(tmp_path / "line" / "0.png", seed=0)
    assert shift([])[0] == 0
    table = tmp_path / "out" / "results.jsonl"
    text = table.read_bytes()[:-30]
    table.unlink() if gone else table.write_bytes(text)
    code, _, err = shift([_arrive(tmp_path / "line", "1.png")], "--resume")
    assert (code, "results.jsonl " in err, "give --overwrite" in err) == (2, True, True)
    assert gone or table.read_bytes() == text


def test_what_cant_be_watched(
    shift: Callable[..., tuple[int, str, str]],
    command: Command,
    run_folder: Path,
    tmp_path: Path,
) -> None:
    base = ["--model", run_folder, "--output", tmp_path / "out", "--watch"]
    for flags, says in (
        ([], "give them with --input"),
        (["--input", tmp_path, "--list", "x"], "leave out --list"),
        (["--input", __file__], "isn't a folder"),
    ):
        code, _, err = command("infer", [*base, *flags])
        assert (code, says in err) == (2, True)
    assert shift([])[0] == 0  # nothing came
    code, _, err = command(
        "infer", [*base[:-1], "--input", tmp_path / "line", REPOSITORY, "--resume"]
    )
    assert (code, "resume it with --watch" in err) == (2, True)


def _tree(pid: int) -> list[int]:
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    return [pid, *(p for child in children for p in _tree(child))]


def _held(pid: int) -> tuple[int, int]:
    """Resident bytes and open files of a process and its children."""
    resident = files = 0
    for one in _tree(pid):
        resident += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
        files += len(os.listdir(f"/proc/{one}/fd"))
    return resident, files


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_five_thousand_files_in_flat_memory(run_folder: Path, tmp_path: Path) -> None:
    line, output = tmp_path / "line", tmp_path / "out"
    line.mkdir()
    kinds = []
    for i in range(10):
        write_part(tmp_path / "kind.png", seed=i, mark=(30, 50) if i == 0 else None)
        kinds.append((tmp_path / "kind.png").read_bytes())
    kinds.append(b"broken")
    arguments = ["--model", run_folder, "--input", line, "--output", output, "--watch"]
    process = subprocess.Popen([sys.executable, REPOSITORY / "scripts" / "infer.py", *arguments])
    readings = []
    done = 0
    for i in range(5000):
        data = kinds[i % len(kinds)]
        file = line / f"{i % 40}" / f"{i:04}.png"
        file.parent.mkdir(exist_ok=True)
        with file.open("wb") as stream:  # in two pieces
            stream.write(data[: len(data) // 2])
            stream.flush()
            stream.write(data[len(data) // 2 :])
        if i % 250 == 249:
            # The line takes away what is done, but for a few hundred.
            while done < i - 400:
                assert process.poll() is None
                time.sleep(0.1)
                results = output / "results.jsonl"
                done = results.read_bytes().count(b"\n") if results.exists() else 0
            if i > 900:
                for old in range(i - 900, i - 650):
                    (line / f"{old % 40}" / f"{old:04}.png").unlink(missing_ok=True)
                readings.append(_held(process.pid))
    deadline = time.monotonic() + 900
    while (output / "results.jsonl").read_bytes().count(b"\n") < 5000:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 3
    names = _names(output)
    assert len(names) == len(set(names)) == 5000
    assert sum(row["status"] == "ok" for row in _rows(output)) == 5000 - 5000 // 11
    print([f"{resident / 1e6:.0f} MB, {files} files" for resident, files in readings])
    early, late = readings[:4], readings[-4:]
    assert max(r for r, _ in late) < max(r for r, _ in early) * 1.05
    assert max(f for _, f in late) <= max(f for _, f in early) + 2


def test_a_folder_of_which_more_is_flagged_than_promised_is_warned_of_once(
    shift: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for i in range(30):
        write_part(tmp_path / "line" / f"{i:02}.png", seed=900 + i, mark=(30, 30 + i))
    code, _, err = shift([lambda: None, lambda: None], "--no-page")
    assert code == 0
    assert err.count("20 of 20 images flagged (100 %); 7.7 % expected, at most 22 %") == 1
    assert err.count("images flagged") == 1
