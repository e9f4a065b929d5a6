"""The record: what is kept, what goes when room is short, and that feedback is only added to."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from kit import unprivileged
from running import answer

from anomaly.errors import DataError, OutputError
from anomaly.line.record import Answer, Record, confirmed_parts
from anomaly.line.report import Period, report_views

PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
WORDS = b"these are words, and enough of them to be more than a header of SQLite's\n" * 9


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        yield record


def rejects(*numbers: int) -> list[Answer]:
    """Parts with large pictures."""
    return [answer("reject", number, size=300_000) for number in numbers]


def kept(record: Record) -> list[int]:
    return [part["id"] for part in record.parts(limit=500) if part["picture"]]


def numbers(record: Record) -> list[int]:
    return [part["id"] for part in record.parts()]


def said(record: Record) -> list[tuple[str, str, str]]:
    """All judgements, the oldest first."""
    return record.read("SELECT verdict, who, sha256 FROM feedback ORDER BY id", ())


def test_answers_are_there_once_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    with closing(Record(file)) as first:
        assert first.add([answer("good", 1), answer("reject", 2)]) == [1, 2]
        # Another connection sees them while the first one is open, as after a kill.
        with closing(Record(file)) as second:
            newest, oldest = second.parts()
            assert (newest["id"], newest["verdict"], newest["path"]) == (2, "reject", "2.png")
            assert (oldest["id"], oldest["model"], oldest["feedback"]) == (1, "disc", None)
            assert second.counts("2026-01-01") == {"good": 1, "reject": 1}
            assert second.counts("2026-01-01T00:00:02") == {"reject": 1}
            assert second.counts("2026-01-01", "disc") == {"good": 1, "reject": 1}
            assert second.counts("2026-01-01", "cup") == {}
            for asked, ids in (
                ({"model": "disc"}, [2, 1]),
                ({"model": "cup"}, []),
                ({"before": 2}, [1]),
                ({"verdict": "good"}, [1]),
            ):
                assert [part["id"] for part in second.parts(**asked)] == ids


def test_pictures_of_rejects_and_a_share_of_goods_are_kept(tmp_path: Path) -> None:
    record, other = (Record(tmp_path / name, goods=0.1) for name in ("a", "b"))
    for one in (record, other):
        one.add([answer("good", i) for i in range(300)])
    assert 15 <= len(kept(record)) <= 50
    assert kept(other) == kept(record)  # a part's number decides
    added = record.add([answer("reject"), answer("review"), answer("", status="unreadable")])
    assert kept(record)[:2] == [added[1], added[0]]


def test_the_oldest_goods_make_room_first(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "line.sqlite", 1.0, 1)) as record:
        good = [answer("good", number, size=300_000) for number in (1, 2)]
        record.add([*rejects(0), *good, *rejects(3)])
        assert kept(record) == [4, 3, 1]
        record.add(rejects(4))
        assert kept(record) == [5, 4, 1]
    with closing(Record(tmp_path / "line.sqlite", 1.0, 1)) as again:
        again.add(rejects(5))
        assert kept(again) == [6, 5, 4]
        assert len(again.parts()) == 6  # rows stay


def test_feedback_is_only_added_to(record: Record) -> None:
    (number, unread) = record.add([answer("reject", 7), answer("", 8, "unreadable")])
    record.add_feedback("defect", who="Ada", part=number, defect_type="scratch")
    record.add_feedback("good", who="Bob", part=number, note="dust")
    assert said(record) == [("defect", "Ada", f"{7:064x}"), ("good", "Bob", f"{7:064x}")]
    assert record.parts()[1]["feedback"]["verdict"] == "good"
    for part in (unread, 99):
        with pytest.raises(DataError, match=f"part {part}"):
            record.add_feedback("good", who="", part=part)
    by_others = sqlite3.connect(record.file)
    for change in ("UPDATE feedback SET verdict = 'good'", "DELETE FROM feedback"):
        with pytest.raises(sqlite3.IntegrityError, match="only added to"):
            by_others.execute(change)
    assert len(said(record)) == 2


def test_a_withdrawn_judgement_counts_for_nobody(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    with closing(Record(file)) as record:
        record.add([replace(one, file=PNG) for one in rejects(1, 2)])
        record.add_feedback("defect", who="a", part=1, defect_type="scratch")
        record.add_feedback("good", who="a", part=2)
        record.add_feedback("", who="a", part=1)
        assert record.parts(number=1)[0]["feedback"] is None
        assert len(said(record)) == 3  # what was said stays
        confirmed = confirmed_parts(file, ["0" * 16], tmp_path / "kept")
        assert [sample.name for sample in confirmed.past] == ["part 1"]
        assert (len(confirmed.good), len(confirmed.defects)) == (1, 0)
        with report_views(file, Period.of("2026-01-01", "2026-01-02")) as db:
            rows = db.execute("SELECT judged, kind FROM seen").fetchall()
        assert rows == [("", None), ("good", "")]


def test_people_take_back_what_is_theirs(record: Record) -> None:
    record.add([answer("reject", 1)])
    for who, verdict, stands in (
        ("Ann", "good", "good"),
        ("Ben", "defect", "defect"),
        ("Ann", "", "defect"),
        ("Ann", "good", "good"),
        ("Ann", "", "defect"),  # Ben's stands again
        ("Ben", "", None),
    ):
        record.add_feedback(verdict, who=who, part=1)
        assert (record.parts(number=1)[0]["feedback"] or {}).get("verdict") == stands
    with pytest.raises(DataError, match="no judgement by Ann to take back"):
        record.add_feedback("", who="Ann", part=1)


def test_what_is_no_record_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "words").write_bytes(WORDS)
    for name, change in (
        ("newer", "PRAGMA user_version = 99"),
        ("foreign", "CREATE TABLE customers (name TEXT)"),
    ):
        with closing(sqlite3.connect(tmp_path / name)) as database:
            database.execute(change)
    for name, says in (
        ("words", "file is not a database"),
        ("newer", "another version"),
        ("foreign", "is a database of another program"),
    ):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(OutputError, match=says):
            Record(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_what_cannot_be_written_leaves_nothing_behind(record: Record) -> None:
    good = answer("good", 1)
    bad = replace(good, row=replace(good.row, image_score=float("nan")))
    with pytest.raises(ValueError, match="JSON"):
        record.add([good, bad])
    assert numbers(record) == []
    # Of parts that come one by one the next ones are taken.
    failed, written = record.put(bad), record.put(good)
    assert isinstance(failed.exception(10), ValueError)
    assert [written.result(10)] == numbers(record)


def test_after_a_full_disk_pictures_within_the_budget_are_all_there(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with closing(Record(small_disk / "line.sqlite", megabytes=1)) as record:
        record.add(rejects(0, 1))
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 400_000))
        for i in range(12):
            with suppress(OutputError):
                record.add(rejects(i))
        added = len(record.parts())
        for _ in range(3):
            with pytest.raises(OutputError, match="disk is full"):
                record.add(rejects(2, 3))
            assert "disk is full" in record.trouble()
        assert len(record.parts()) == added
        os.truncate(ballast, ballast.stat().st_size - 200_000)  # too little room
        assert "disk is full" in record.trouble()
        ballast.unlink()
        assert record.trouble() == ""
        record.add(rejects(3))
        assert kept(record) == [added + 1, *range(added, max(0, added - 2), -1)]
        record.add(rejects(4))
        assert kept(record) == [added + 2, added + 1, added]


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.rename(file.with_name("away")),
        lambda file: file.parent.rename(file.parent.with_name("away")),
        lambda file: file.with_name("line.sqlite-wal").rename(file.with_name("away")),
        lambda file: (file.rename(file.with_name("away")), file.write_bytes(WORDS)),
        lambda file: (file.rename(file.with_name("away")), Record(file).close()),
        lambda file: (file.rename(file.with_name("away")), file.mkdir()),
    ],
    ids=["moved", "its folder", "its log", "words", "another record", "a folder"],
)
def test_nothing_is_recorded_while_the_file_is_gone(
    harm: Callable[[Path], object], tmp_path: Path
) -> None:
    file = tmp_path / "record" / "line.sqlite"
    with closing(Record(file)) as record:
        record.add(rejects(0, 1, 2))
        harm(file)
        for _ in range(2):
            assert f"{file} was removed or changed by another program" in record.trouble()
            with pytest.raises(OutputError, match="put it back, or end serve"):
                record.add(rejects(4))


def test_readers_do_not_wait_for_what_is_written(record: Record) -> None:
    record.add([answer("good", 1)])
    with record.changing(), ThreadPoolExecutor(1) as other:
        assert other.submit(record.counts, "2026").result(5) == {"good": 1}


def test_a_record_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "line"
    with closing(Record(folder / "line.sqlite")) as record:
        record.add([answer("reject", 7)])
        record.add_feedback("defect", who="Ada", part=1)
        shutil.copytree(folder, tmp_path / "served")  # with its rows in the logs
        shutil.copytree(folder, tmp_path / "halved")
        (tmp_path / "halved" / "line.sqlite-shm").unlink()
        shutil.copy(folder / "line.sqlite", tmp_path / "copy.sqlite")
    reports = []
    for place in (folder, tmp_path / "served", tmp_path / "halved"):
        place.chmod(0o555)
        report = ["report", "--record", place / "line.sqlite", "--from", "2026-01-01"]
        reports.append([*report, "--output", tmp_path / "reports" / place.name])
    *read, halved = unprivileged(*reports)
    assert [code for code, _ in read] == [0, 0], read
    for name in ("line", "served"):
        assert "Ada" in (tmp_path / "reports" / name / "feedback.csv").read_text()
    assert (halved[0], "copy it and line.sqlite-wal into a folder" in halved[1]) == (2, True)
    assert sorted(entry.name for entry in folder.iterdir()) == ["line.sqlite"]
    with pytest.raises(DataError, match=r"copy.sqlite holds no parts: .* sqlite3 .*backup"):
        confirmed_parts(tmp_path / "copy.sqlite", ["0" * 16], tmp_path)  # without its log
