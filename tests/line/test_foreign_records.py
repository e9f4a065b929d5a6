"""Records from elsewhere: any value in any column is refused in a sentence or shown as text."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from running import answer
from test_record import PNG

from anomaly.errors import AnomalyError, OutputError
from anomaly.line.record import Record, confirmed_parts, safe_name
from anomaly.line.report import PAGE, Period, report

MARK = "<img src=x>"
_LEVEL = {"name": "median", "value": 1.0, "promised": 0.0, "limit": 3.0}
_PROMISE = {"rates": {}, "levels": [_LEVEL], "same_scores": ["0" * 16], "caught": None}
_SET = "UPDATE parts SET line = json_set (line, '$.{}', {})"
_JUDGE = "INSERT INTO feedback (part, sha256, who, verdict, defect_type, note, time) "
VALUES = {
    "a row that is none": "UPDATE parts SET line = '[1]'",
    "a number without end": "UPDATE parts SET line = '{\"image_score\": 1e999}'",
    "a path that is a number": _SET.format("path", 5),
    "a threshold in words": _SET.format("threshold", "'high'"),
    "a model that leads away": "UPDATE parts SET model = '../../away'",
    "bytes as a model": "UPDATE parts SET model = X'ff00'",
    "no text": "UPDATE parts SET model = CAST (X'ff' AS TEXT)",
    "a time with a tag": _SET.format("time", f"'2026-01-01{MARK}'"),
    "a score in words": _SET.format("image_score", "'high'"),
    "an infinite score": _SET.format("image_score", "9e999"),
    "another status": _SET.format("status", f"'{MARK}'"),
    "another verdict": _SET.format("verdict", f"'{MARK}'"),
    "a picture in words": "UPDATE pictures SET file = 'words'",
    "a judgement that leads away": f"{_JUDGE} SELECT id, sha256, '', '../../away', '', '', time"
    " FROM parts",
    "a kind that leads away": f"{_JUDGE} SELECT id, sha256, '', 'defect', '../../{MARK}', '', time"
    " FROM parts",
    "a part in words": f"{_JUDGE} VALUES ('../away', '{2:064x}', '', 'good', '', '', '')",
    "a promise of nothing": "INSERT INTO promises VALUES ('0000000000000000', '{}')",
    "a promise that is no share": "INSERT INTO promises VALUES ('0000000000000000',"
    f" '{json.dumps(_PROMISE)}')",
    "a view without an end": "ALTER TABLE parts RENAME TO old; CREATE VIEW parts AS WITH RECURSIVE"
    " n (id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, '' AS model FROM n",
    "a trigger": "CREATE TRIGGER more AFTER INSERT ON feedback BEGIN DELETE FROM parts; END",
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_odd_values_do_nothing(value: str, tmp_path: Path) -> None:
    file, inside = tmp_path / "from" / "elsewhere.sqlite", tmp_path / "deep" / "down"
    inside.mkdir(parents=True)
    with closing(Record(file, goods=1)) as record:
        record.add([answer("good", 1), answer("reject", 2)])
        with record.changing() as db:
            db.execute("UPDATE pictures SET file = ?", (PNG,))
        record.add_feedback("good", who="Ada", part=2)
    with closing(sqlite3.connect(file)) as db, suppress(sqlite3.Error):
        db.executescript(VALUES[value])  # the tables refuse most of it
    period = Period.of("2025-12-31", "2026-01-02")
    with suppress(AnomalyError):
        assert "<img src=x" not in report(file, period, {})[0][PAGE]
    with suppress(AnomalyError):
        confirmed_parts(file, ["0" * 16], inside)
    with suppress(OutputError), closing(Record(file)) as record:
        for ask in (record.parts, lambda: record.parts(number=1), lambda: record.counts("2025")):
            with suppress(AnomalyError):
                json.dumps(ask(), allow_nan=False)
    made = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != file.parent]
    assert all(path.name in ("part-1.png", "part-2.png", "1", "2") for path in made)
    assert all(inside in path.parents for path in made)


def test_names_lead_nowhere() -> None:
    assert safe_name("crack 2.1") == "crack 2.1"
    for text in ("..", "", " ", "../x", "a\\b", ".hidden", "x\0y", "\x1b[2J", "y" * 900):
        name = safe_name(text)
        assert name not in ("", ".", "..")
        assert not {"/", "\\", "\0", "\x1b"} & set(name)


def test_a_new_record_is_for_its_owner_and_group(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "line.sqlite")) as record:
        for end in ("", "-wal", "-shm"):
            assert Path(f"{record.file}{end}").stat().st_mode & 0o7 == 0
