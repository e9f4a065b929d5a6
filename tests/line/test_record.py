"""The record: what is kept, what goes when room is short, and that feedback is only added to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command

from anomaly.errors import DataError, OutputError
from anomaly.inference.rows import Row
from anomaly.line.feedback import judgements
from anomaly.line.record import Answer, Keeping, Record, Recorder


def answer(verdict: str, number: int = 0, status: str = "ok", size: int = 1000) -> Answer:
    row = Row(
        path=f"{number}.png",
        image_sha256=f"{number:064x}",
        status=status,
        image_score=1.0 if status == "ok" else None,
        calibrated_score=None,
        review_threshold=1.0,
        threshold=2.0,
        verdict=verdict,
        heatmap="",
        model_id="0" * 16,
        software_version="0",
        threshold_label="calibrated",
        reason="",
        time=f"2026-01-01T00:00:{number % 60:02}.000+00:00",
    )
    return Answer("disc", row, bytes(size), b"small")


def kept(record: Record) -> list[int]:
    return [part["id"] for part in record.parts(limit=500) if part["picture"]]


def test_answers_are_there_once_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    first = Record(file)
    assert first.add([answer("good", 1), answer("reject", 2)]) == [1, 2]
    # Another connection sees them while the first one is open, as after a kill.
    second = Record(file)
    newest, oldest = second.parts()
    assert (newest["id"], newest["verdict"], newest["path"]) == (2, "reject", "2.png")
    assert (oldest["id"], oldest["model"], oldest["feedback"]) == (1, "disc", None)
    assert second.counts("2026-01-01") == {"good": 1, "reject": 1}
    assert second.counts("2026-01-01T00:00:02") == {"reject": 1}
    assert second.counts("2026-01-01", "disc") == {"good": 1, "reject": 1}
    assert second.counts("2026-01-01", "cup") == {}
    assert [part["id"] for part in second.parts(model="disc")] == [2, 1]
    assert second.parts(model="cup") == []
    assert second.parts(before=2)[0]["id"] == 1
    assert [part["id"] for part in second.parts(verdict="good")] == [1]
    first.close()
    second.close()


def test_pictures_of_rejects_and_a_share_of_goods_are_kept(tmp_path: Path) -> None:
    record = Record(tmp_path / "line.sqlite", Keeping(goods=0.1))
    record.add([answer("good", i) for i in range(300)])
    assert 15 <= len(kept(record)) <= 50
    numbers = record.add([answer("reject"), answer("review"), answer("", status="unreadable")])
    assert kept(record)[:2] == [numbers[1], numbers[0]]
    other = Record(tmp_path / "other.sqlite", Keeping(goods=0.1))
    other.add([answer("good", i) for i in range(300)])
    assert kept(other) == kept(record)[2:]  # a part's number decides


def test_the_oldest_goods_make_room_first(tmp_path: Path) -> None:
    record = Record(tmp_path / "line.sqlite", Keeping(goods=1.0, megabytes=1))
    record.add([answer("reject", 0, size=300_000), answer("good", 1, size=300_000)])
    record.add([answer("good", 2, size=300_000), answer("reject", 3, size=300_000)])
    assert kept(record) == [4, 3, 1]
    record.add([answer("reject", 4, size=300_000)])
    assert kept(record) == [5, 4, 1]
    record.close()
    again = Record(tmp_path / "line.sqlite", Keeping(goods=1.0, megabytes=1))
    again.add([answer("reject", 5, size=300_000)])
    assert kept(again) == [6, 5, 4]
    assert len(again.parts()) == 6  # rows stay


def test_feedback_is_only_added_to(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    record = Record(file)
    (number, unread) = record.add([answer("reject", 7), answer("", 8, "unreadable")])
    record.add_feedback("defect", who="Ada", part=number, defect_type="scratch")
    record.add_feedback("good", who="Bob", part=number, note="dust")
    said = judgements(file)
    assert [(one["verdict"], one["who"], one["sha256"]) for one in said] == [
        ("defect", "Ada", f"{7:064x}"),
        ("good", "Bob", f"{7:064x}"),
    ]
    assert record.parts()[1]["feedback"]["verdict"] == "good"
    for part in (unread, 99):
        with pytest.raises(DataError, match=f"part {part}"):
            record.add_feedback("good", who="", part=part)
    by_others = sqlite3.connect(file)
    for change in ("UPDATE feedback SET verdict = 'good'", "DELETE FROM feedback"):
        with pytest.raises(sqlite3.IntegrityError, match="only added to"):
            by_others.execute(change)
    assert len(judgements(file)) == 2


def test_feedback_from_the_command_line_is_noted_whole_or_not_at_all(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "line.sqlite"
    record = Record(file)
    (number,) = record.add([answer("reject", 7)])
    base = ["--record", file, "--verdict", "good", "--parts"]
    code, _, err = command("feedback", [*base, number, number + 1])
    assert (code, f"part {number + 1} doesn't exist; nothing was recorded" in err) == (2, True)
    assert not judgements(file)
    code, _, err = command("feedback", [*base, 2**63])
    assert (code, "can't be the number of a part" in err) == (2, True)
    assert command("feedback", [*base, number, "--note", "caf\udce9"])[0] == 0
    assert judgements(file)[0]["note"] == "caf\\udce9"


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    file.write_text(
        "these are words, and enough of them to be more than a header of SQLite's\n" * 9
    )
    with pytest.raises(OutputError, match="no SQLite file"):
        Record(file)
    newer = sqlite3.connect(tmp_path / "newer.sqlite")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(OutputError, match="another version"):
        Record(tmp_path / "newer.sqlite")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    record = Record(tmp_path / "line.sqlite")
    good = answer("good", 1)
    record.add([good])
    bad = replace(good, row=replace(good.row, image_score=float("nan")))
    with pytest.raises(ValueError, match="JSON"):
        record.add([good, bad])
    assert len(record.parts()) == 1
    assert json.loads(json.dumps(record.parts()[0]))["path"] == "1.png"


def test_the_command_notes_and_lists(tmp_path: Path, command: Command) -> None:
    file, image = tmp_path / "line.sqlite", tmp_path / "part.png"
    image.write_bytes(b"some image")
    record = Record(file)
    known = answer("reject", 1)
    sha256 = hashlib.sha256(b"some image").hexdigest()
    known = replace(known, row=replace(known.row, image_sha256=sha256))
    record.add([answer("good", 0), known])
    arguments = ["--record", file, "--who", "Ada"]
    more = ["--verdict", "defect", "--type", "dent", "--images", image]
    code, out, _ = command("feedback", [*arguments, *more])
    assert (code, "part 2): defect" in out) == (0, True)
    image.write_bytes(b"another")
    code, out, _ = command("feedback", [*arguments, "--verdict", "good", "--images", image])
    assert (code, "not scored here yet" in out) == (0, True)
    code, out, _ = command("feedback", [*arguments, "--verdict", "good", "--parts", 1])
    said = [json.loads(line) for line in command("feedback", arguments)[1].splitlines()]
    assert [(one["part"], one["verdict"], one["defect_type"]) for one in said] == [
        (2, "defect", "dent"),
        (None, "good", ""),
        (1, "good", ""),
    ]
    for wrong in (["--verdict", "good"], ["--parts", 1], ["--verdict", "good", "--parts", 9]):
        assert command("feedback", [*arguments, *wrong])[0] == 2
    code, _, err = command("feedback", ["--record", tmp_path / "lime.sqlite"])
    assert (code, "did you mean 'line.sqlite'" in err) == (2, True)
    assert not (tmp_path / "lime.sqlite").exists()


def test_a_database_of_another_program_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "foreign.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE customers (name TEXT)")
        database.commit()
    before = file.read_bytes()
    with pytest.raises(OutputError, match="is a database of another program"):
        Record(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("fails", ["COMMIT", "INSERT INTO pictures", "INSERT INTO parts", "BEGIN"])
def test_after_a_full_disk_pictures_within_the_budget_are_all_there(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tmp_path / "line.sqlite", Keeping(megabytes=1))
    record.add([answer("reject", i, size=300_000) for i in range(2)])
    real = record._db

    class Full:
        """A connection to a disk that takes no more."""

        def execute(self, query: str, *values: object) -> sqlite3.Cursor:
            assert real is not None
            if query.startswith(fails):
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            return real.execute(query, *values)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(record, "_db", Full())
    monkeypatch.setattr(record, "_free", lambda: 4096)
    for i in range(12):
        with pytest.raises(OutputError, match="the disk is full"):
            record.add([answer("reject", i, size=300_000)])
    assert "the disk is full" in record.trouble()
    monkeypatch.undo()
    record.add([answer("reject", 3, size=300_000)])
    assert (record.trouble(), kept(record)) == ("", [3, 2, 1])
    record.add([answer("reject", 4, size=300_000)])
    assert kept(record) == [4, 3, 2]


def test_trouble_ends_by_itself_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tmp_path / "line.sqlite")
    record._trouble, record._needed = "the disk is full", 300_000
    monkeypatch.setattr(record, "_free", lambda: 200_000)
    assert record.trouble()
    monkeypatch.setattr(record, "_free", lambda: 400_000)
    assert not record.trouble()


def _remove(file: Path) -> None:
    file.unlink()


def _remove_all(file: Path) -> None:
    shutil.rmtree(file.parent)


def _move(file: Path) -> None:
    file.rename(file.with_name("last-week.sqlite"))


def _cut(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("harm", [_remove, _remove_all, _move, _cut])
def test_a_record_that_is_gone_begins_anew_and_says_so(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "record" / "line.sqlite"
    record = Record(file, Keeping(megabytes=1))
    record.send_to("somebody")
    record.add([answer("reject", i, size=300_000) for i in range(3)])
    harm(file)
    assert (record.trouble(), record.changes) == ("", 1)
    assert f"{file} was removed; a new record was created in its place" in record.changed
    # Numbers go on, so that nothing that knows them takes one part for another.
    assert record.add([answer("reject", 4, size=300_000)]) == [4]
    with closing(Record(file)) as other:
        assert [part["id"] for part in other.parts()] == [4]
        assert other.read("SELECT sink, sent FROM outboxes", ()) == [("somebody", 3)]
    assert kept(record) == [4]
    record.close()
    if harm is _move:  # what was written last is in it, too
        with closing(Record(file.with_name("last-week.sqlite"))) as moved:
            assert len(moved.parts()) == 3


def test_a_log_that_is_removed_takes_nothing_with_it(tmp_path: Path) -> None:
    file = tmp_path / "line.sqlite"
    record = Record(file)
    record.add([answer("reject", 1)])
    file.with_name("line.sqlite-wal").unlink()
    record.add([answer("reject", 2)])
    assert (record.changes, record.trouble()) == (0, "")
    with closing(Record(file)) as other:
        assert [part["id"] for part in other.parts()] == [2, 1]


def test_another_record_in_its_place_is_gone_on_with(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "other.sqlite")) as other:
        other.add([answer("good", 9)])
    record = Record(tmp_path / "line.sqlite")
    record.add([answer("reject", i) for i in range(5)])
    (tmp_path / "other.sqlite").rename(record.file)
    assert record.add([answer("reject", 7)]) == [6]
    assert [part["id"] for part in record.parts()] == [6, 1]
    assert "was replaced; recording continues in the new file" in record.changed


def _words(file: Path) -> None:
    file.write_bytes(b"these are words, and enough of them for a header\n" * 9)


def _other_words(file: Path) -> None:
    file.unlink()
    _words(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def test_another_program_that_reads_a_record_takes_nothing_away(tmp_path: Path) -> None:
    record = Record(tmp_path / "line.sqlite")
    reads = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
        "print(db.execute('SELECT COUNT (*) FROM parts').fetchone()[0]); db.close()"
    )
    for number in (1, 2, 3):
        assert record.add([answer("good", number)]) == [number]
        command = [sys.executable, "-c", reads, str(record.file)]
        assert subprocess.run(command, capture_output=True, text=True).stdout == f"{number}\n"
        assert Path(f"{record.file}-wal").exists()
    assert (record.changes, record.trouble()) == (0, "")
    record.close()


@pytest.mark.parametrize("harm", [_words, _other_words, _folder])
def test_what_is_no_record_in_its_place_is_trouble_and_stays_as_it_is(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    record = Record(tmp_path / "line.sqlite")
    record.add([answer("reject", 1)])
    harm(record.file)
    for _ in range(2):
        assert record.trouble()
        with pytest.raises(OutputError, match=re.escape(str(record.file))):
            record.add([answer("reject", 2)])
    if record.file.is_file():
        assert record.file.read_bytes().startswith(b"these are words")
    record.file.rename(tmp_path / "away")
    assert record.trouble() == ""
    assert record.add([answer("reject", 2)]) == [2]


def test_readers_do_not_wait_for_what_is_written(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        record.add([answer("good", 1)])
        with record.changing(), ThreadPoolExecutor(1) as other:
            assert other.submit(record.counts, "2026").result(5) == {"good": 1}


def test_a_part_that_is_not_on_record_says_so_and_the_next_ones_are_taken(tmp_path: Path) -> None:
    record, told = Record(tmp_path / "line.sqlite"), []
    good = answer("good", 1)
    odd = replace(good, row=replace(good.row, image_score=float("nan")))  # a mistake of ours
    with Recorder(record, lambda number, _: None) as recorder:
        recorder.put(odd, told.append)
        until_told = threading.Event()
        recorder.put(good, lambda number: (told.append(number), until_told.set()))
        assert until_told.wait(10)
    assert "couldn't be recorded, so it has no verdict" in str(told[0])


def run_unprivileged(*commands: list[object]) -> list[tuple[int, str]]:
    """Exit code and output of commands, run by somebody who may not write everywhere."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    code = "import sys; from anomaly.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [[*drop, sys.executable, "-c", code, *map(str, command)] for command in commands]
    done = [subprocess.run(line, capture_output=True, text=True) for line in words]
    return [(one.returncode, one.stdout + one.stderr) for one in done]


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write all")
def test_a_record_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "line"
    file, out = folder / "line.sqlite", tmp_path / "report"
    with closing(Record(file)) as record:
        record.add([answer("reject", 7)])
        record.add_feedback("defect", who="Ada", part=1)
        shutil.copytree(folder, tmp_path / "served")  # with its rows in the logs
        shutil.copytree(folder, tmp_path / "halved")
        (tmp_path / "halved" / "line.sqlite-shm").unlink()
    listing: list[list[object]] = []
    for place in (folder, tmp_path / "served", tmp_path / "halved"):
        place.chmod(0o555)
        listing.append(["feedback", "--record", place / "line.sqlite"])
    report = ["report", "--record", file, "--from", "2026-01-01", "--output", out]
    *read, halved = run_unprivileged(report, *listing)
    assert [code for code, _ in read] == [0, 0, 0], read
    assert all("Ada" in text for _, text in read[1:])
    assert (halved[0], "copy it and line.sqlite-wal into a folder" in halved[1]) == (2, True)
    assert sorted(entry.name for entry in folder.iterdir()) == ["line.sqlite"]


def test_a_record_copied_without_its_log_is_told(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        record.add([answer("good")])
        shutil.copy(tmp_path / "line.sqlite", tmp_path / "copy.sqlite")
    with pytest.raises(DataError, match=r"copy.sqlite holds no parts: .* sqlite3 .*backup"):
        judgements(tmp_path / "copy.sqlite")
