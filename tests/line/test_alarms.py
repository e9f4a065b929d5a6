"""Alarms: which there are, and what they name."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from anomaly.line.record import Record
from anomaly.line.service import alarms_of
from anomaly.line.slot import ModelSlot


def test_each_alarm_names_what_is_wrong(tmp_path: Path) -> None:
    engine = cast(Any, SimpleNamespace())
    slots = [
        ModelSlot("cup", tmp_path, trouble="weights.safetensors isn't as it was written"),
        ModelSlot("disc", tmp_path, engine=engine, trouble="golden/3.png: reject, was good"),
        ModelSlot("ring", tmp_path),
    ]
    with closing(Record(tmp_path / "line.sqlite")) as record:
        listed = alarms_of(slots, record, False)
        assert [(alarm["kind"], alarm["model"], alarm["severity"]) for alarm in listed] == [
            ("failed", "cup", "error"),
            ("loading", "ring", "error"),
            ("refused", "disc", "warning"),
        ]
        assert "cup has failed" in listed[0]["text"]
        assert "weights.safetensors isn't as it was written" in listed[0]["text"]
        (tmp_path / "line.sqlite").unlink()
        assert record.trouble() == ""  # begun anew
        assert [alarm["kind"] for alarm in alarms_of([], record, True)] == ["stopping", "record"]
