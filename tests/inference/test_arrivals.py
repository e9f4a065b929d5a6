"""What arrives is given once, and only when nobody writes to it any more."""

import os
import pickle
from pathlib import Path

import pytest

from anomaly.errors import DataError
from anomaly.inference.pipeline import Arrivals, stamp_of


def poll(arrivals: Arrivals, folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in arrivals.poll()]


def write(file: Path, time: int, data: bytes = b"1") -> None:
    """A file that was written at a time, in seconds."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    os.utime(file, (time, time))


def test_once_and_when_fully_written(tmp_path: Path) -> None:
    write(tmp_path / "done before.png", 1)
    stamp = stamp_of(tmp_path / "done before.png")
    assert stamp is not None
    arrivals = Arrivals([tmp_path], {tmp_path / "done before.png": stamp})
    for time, data in ((1, b"1"), (1, b"12"), (2, b"12")):  # by its size, and by its time
        write(tmp_path / "a.png", time, data)
        assert poll(arrivals, tmp_path) == []
    assert poll(arrivals, tmp_path) == ["a.png"]
    assert poll(arrivals, tmp_path) == []
    write(tmp_path / "a.png", 3, b"123")  # another one under the same name
    assert [poll(arrivals, tmp_path) for _ in range(3)] == [[], ["a.png"], []]


def test_the_wait_is_a_setting(tmp_path: Path) -> None:
    arrivals = Arrivals([tmp_path], {}, settle=5.0)
    write(tmp_path / "a.png", 1, bytes(100))  # room for what is still to be written
    assert [len(arrivals.poll(float(now))) for now in range(5)] == [0] * 5
    write(tmp_path / "a.png", 1, b"1" * 101)
    assert [len(arrivals.poll(float(now))) for now in range(5, 12)] == [0] * 5 + [1, 0]


def test_the_oldest_first_and_from_every_folder(tmp_path: Path) -> None:
    for name, time in (("one/b.png", 30), ("two/sub/a.jpg", 20), ("one/c.bmp", 10)):
        write(tmp_path / name, time)
    for name in ("notes.txt", ".hidden.png"):
        write(tmp_path / "one" / name, 1)
    arrivals = Arrivals([tmp_path / "one", tmp_path / "two", tmp_path / "one"], {})
    assert poll(arrivals, tmp_path) == []
    assert poll(arrivals, tmp_path) == ["one/c.bmp", "two/sub/a.jpg", "one/b.png"]


def test_a_drive_that_was_gone_for_a_while_brings_nothing_new(tmp_path: Path) -> None:
    """Its folder is gone, or there and empty."""
    line, away = tmp_path / "line", tmp_path / "away"
    for name in "abc":
        write(line / f"{name}.png", 1)
    arrivals = Arrivals([line], {})
    arrivals.poll()
    assert len(arrivals.poll()) == 3
    line.rename(away)
    with pytest.raises(DataError, match="line"):
        arrivals.poll()
    line.mkdir()
    arrivals.poll()
    line.rmdir()
    away.rename(line)
    write(line / "d.png", 1)
    arrivals.poll()
    assert list(arrivals.poll()) == [line / "d.png"]
    (line / "a.png").unlink()
    arrivals.poll()
    write(line / "a.png", 1)  # a part of the same name
    arrivals.poll()
    assert list(arrivals.poll()) == [line / "a.png"]


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
