"""Alarms: which there are, who has seen them, and when that no longer counts."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anomaly.errors import DataError
from anomaly.line.alarms import Alarm, Alarms, alarms_of
from anomaly.line.record import Record
from anomaly.line.slot import ModelSlot


def test_each_alarm_names_what_is_wrong(tmp_path: Path) -> None:
    engine = cast(Any, SimpleNamespace())
    slots = [
        ModelSlot("cup", tmp_path, trouble="weights.safetensors isn't as it was written"),
        ModelSlot("disc", tmp_path, engine=engine, trouble="golden/3.png: reject, was good"),
        ModelSlot("ring", tmp_path),
    ]
    with closing(Record(tmp_path / "line.sqlite")) as record:
        listed = Alarms(record, lambda: alarms_of(slots, record, False)).now()
        assert [(alarm["key"], alarm["severity"]) for alarm in listed] == [
            ("failed:cup", "error"),
            ("loading:ring", "error"),
            ("refused:disc", "warning"),
        ]
        assert "cup has failed" in listed[0]["text"]
        assert "weights.safetensors isn't as it was written" in listed[0]["text"]
        (tmp_path / "line.sqlite").unlink()
        assert record.trouble() == ""  # begun anew
        keys = [alarm.key for alarm in alarms_of([], record, True)]
        assert keys == ["stopping", "record"]


def test_an_acknowledged_alarm_is_loud_again_when_it_comes_back_or_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, current = (
        tmp_path / "line.sqlite",
        [Alarm("refused", "disc", "golden/9.png: reject")],
    )
    with closing(Record(file)) as record:
        alarms = Alarms(record, lambda: current)

        def seen() -> list[str | None]:
            return [alarm["seen"] and alarm["seen"]["who"] for alarm in alarms.now()]

        assert seen() == [None]
        for key, who in (("drift:disc", "Ada"), ("refused:disc", "")):
            with pytest.raises(DataError):
                alarms.acknowledge(key, who)
        alarms.acknowledge("refused:disc", "Ada")
        assert seen() == ["Ada"]
        current[0] = Alarm("refused", "disc", "golden/12.png: reject")
        current.append(Alarm("drift", "disc"))
        assert seen() == ["Ada", None]
        alarms = Alarms(record, lambda: current)  # a restart
        assert seen() == ["Ada", None]
        current[0] = Alarm("refused", "disc", "golden/12.png: review")
        assert seen() == [None, None]
        alarms.acknowledge("refused:disc", "Bob")
        monkeypatch.setattr("anomaly.line.alarms._SECONDS", 0.01)
        kept, current[:] = current[:], []
        with alarms:  # over, though nobody asks
            open_ones = "SELECT 1 FROM acknowledgements WHERE ended = ''"
            while record.read(open_ones, ()):
                time.sleep(0.01)
        current[:] = kept
        assert seen() == [None, None]
    with closing(sqlite3.connect(file)) as db:
        rows = db.execute("SELECT alarm, who, time <> '', ended <> '' FROM acknowledgements")
        assert rows.fetchall() == [("refused:disc", "Ada", 1, 1), ("refused:disc", "Bob", 1, 1)]
