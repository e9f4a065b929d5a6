"""What arrives is given once, and only when nobody writes to it any more."""

import os
from pathlib import Path

import pytest

from anomaly.errors import DataError
from anomaly.inference.watch import Arrivals, stamp_of


def _poll(arrivals: Arrivals, folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in arrivals.poll()]


def _set_time(file: Path, seconds: int) -> None:
    os.utime(file, (seconds, seconds))


def test_once_and_when_fully_written(tmp_path: Path) -> None:
    arrivals = Arrivals([tmp_path], {})
    file = tmp_path / "a.png"
    file.write_bytes(b"1")
    assert _poll(arrivals, tmp_path) == []
    file.write_bytes(b"12")
    assert _poll(arrivals, tmp_path) == []
    _set_time(file, 1000)  # of equal size, but written to
    assert _poll(arrivals, tmp_path) == []
    assert _poll(arrivals, tmp_path) == ["a.png"]
    assert _poll(arrivals, tmp_path) == []
    file.write_bytes(b"123")  # another one under the same name
    assert _poll(arrivals, tmp_path) == []
    assert _poll(arrivals, tmp_path) == ["a.png"]
    assert _poll(arrivals, tmp_path) == []


def test_the_wait_is_a_setting(tmp_path: Path) -> None:
    arrivals = Arrivals([tmp_path], {}, settle=5.0)
    file = tmp_path / "a.png"
    file.write_bytes(bytes(100))  # room for what is still to be written
    assert [len(arrivals.poll(float(now))) for now in range(5)] == [0] * 5
    file.write_bytes(b"1" * 101)
    assert [len(arrivals.poll(float(now))) for now in range(5, 12)] == [0] * 5 + [1, 0]


def test_the_oldest_first_and_from_every_folder(tmp_path: Path) -> None:
    for folder, name, time in (
        ("one", "b.png", 30),
        ("two/sub", "a.jpg", 20),
        ("one", "c.bmp", 10),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_bytes(b"1")
        _set_time(tmp_path / folder / name, time)
    (tmp_path / "one" / "notes.txt").write_bytes(b"1")
    (tmp_path / "one" / ".hidden.png").write_bytes(b"1")
    arrivals = Arrivals([tmp_path / "one", tmp_path / "two", tmp_path / "one"], {})
    assert _poll(arrivals, tmp_path) == []
    assert _poll(arrivals, tmp_path) == ["one/c.bmp", "two/sub/a.jpg", "one/b.png"]


def test_a_drive_that_was_gone_for_a_moment_brings_nothing_new(tmp_path: Path) -> None:
    """Its folder is there and empty meanwhile."""
    line = tmp_path / "line"
    line.mkdir()
    for name in "abc":
        (line / f"{name}.png").write_bytes(b"1")
    arrivals = Arrivals([line], {})
    arrivals.poll()
    assert len(arrivals.poll()) == 3
    line.rename(tmp_path / "away")
    line.mkdir()
    arrivals.poll()
    line.rmdir()
    (tmp_path / "away").rename(line)
    (line / "d.png").write_bytes(b"1")
    arrivals.poll()
    assert list(arrivals.poll()) == [line / "d.png"]
    (line / "a.png").unlink()
    arrivals.poll()
    assert set(arrivals._returned) == {line / f"{name}.png" for name in "bcd"}


def test_what_has_left_is_forgotten(tmp_path: Path) -> None:
    arrivals = Arrivals([tmp_path], {})
    for i in range(300):
        file = tmp_path / f"{i}.png"
        file.write_bytes(b"1")
        arrivals.poll()
        assert len(arrivals.poll()) == 1
        file.unlink()
    arrivals.poll()
    assert len(arrivals._returned) + len(arrivals._written) <= 1  # the last one may come back
    file = tmp_path / "0.png"  # the name is used again
    file.write_bytes(b"1")
    arrivals.poll()
    assert len(arrivals.poll()) == 1


def test_what_was_done_before_isnt_given(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"1")
    stamp = stamp_of(tmp_path / "a.png")
    assert stamp is not None
    arrivals = Arrivals([tmp_path], {tmp_path / "a.png": stamp})
    arrivals.poll()
    assert _poll(arrivals, tmp_path) == ["b.png"]


def test_a_folder_that_is_gone_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "share"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"1")
    arrivals = Arrivals([folder], {})
    arrivals.poll()
    assert len(arrivals.poll()) == 1
    folder.rename(tmp_path / "away")
    with pytest.raises(DataError, match="share"):
        arrivals.poll()
    (tmp_path / "away").rename(folder)
    assert arrivals.poll() == {}  # and isn't given again
    assert arrivals.poll() == {}
    assert stamp_of(tmp_path / "none") is None
