"""Alarms of the line, and who has acknowledged them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

from anomaly.errors import DataError, OutputError
from anomaly.line.record import Record, time_now
from anomaly.line.slot import ModelSlot

_SECONDS = 5.0  # between checks whether an alarm has ended
_ERRORS = ("stopping", "unwritable", "failed", "loading")  # with one, the service isn't ready
_OPEN = "SELECT id, alarm, cause, who, time FROM acknowledgements WHERE ended = ''"


@dataclass(frozen=True)
class Alarm:
    """An alarm: what is wrong, and with which model.

    Attributes:
        kind: its key in words.json, which holds the text in every language.
        model: the model concerned; empty if it concerns all.
        reason: details that the kind's text doesn't give.
    """

    kind: str
    model: str = ""
    reason: str = ""

    @property
    def key(self) -> str:
        """The alarm's name, unchanged while it lasts."""
        return f"{self.kind}:{self.model}".rstrip(":")

    @property
    def cause(self) -> str:
        """The reason without numbers, which change with every part."""
        return re.sub(r"[\d.,]+", "", self.reason)


def alarms_of(models: Iterable[ModelSlot], record: Record, stopping: bool) -> Iterator[Alarm]:
    """The current alarms."""
    if stopping:
        yield Alarm("stopping")
    if trouble := record.trouble():
        yield Alarm("unwritable", reason=trouble)
    if record.changed:
        yield Alarm("record", reason=record.changed)
    for slot in models:
        if slot.state in ("failed", "loading"):
            yield Alarm(slot.state, slot.name, slot.trouble)
        if slot.refused:
            yield Alarm("refused", slot.name, slot.trouble)
        drift = slot.drifted()
        if drift["alarm"]:
            yield Alarm("drift", slot.name)
        if drift["flagged"]:
            yield Alarm("more" if drift["compared"] == "more" else "fewer", slot.name)


class Alarms:
    """Alarms and who has acknowledged them. Use it in a `with` statement, which notes their end.

    An acknowledgement counts until its alarm ends or has another cause; the record keeps it.

    Args:
        record: holds who acknowledged which alarm, when, and when it ended.
        current: returns the current alarms.
    """

    def __init__(self, record: Record, current: Callable[[], Iterable[Alarm]]) -> None:
        self._record, self._current = record, current
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="alarms", daemon=True)

    def __enter__(self) -> Alarms:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(_SECONDS):
            self.now()

    @cached_property
    def _words(self) -> dict[str, dict[str, str]]:
        words = files("anomaly.line").joinpath("assets", "words.json").read_text("utf-8")
        return dict(json.loads(words))

    def now(self) -> list[dict[str, Any]]:
        """The current alarms, errors first.

        Returns:
            `key`, `kind`, `model`, `reason`, `severity` (`error` or `warning`), `text` in English,
            and `seen`: `who` has acknowledged it and at what `time`, or None.
        """
        alarms = sorted(self._current(), key=lambda alarm: alarm.kind not in _ERRORS)
        seen: dict[tuple[str, str], dict[str, str]] = {}
        with suppress(OutputError):  # an alarm of its own
            rows = self._record.read(_OPEN, ())
            seen = {row[1:3]: {"who": row[3], "time": row[4]} for row in rows}
            going = {(alarm.key, alarm.cause) for alarm in alarms}
            if over := [(time_now(), row[0]) for row in rows if row[1:3] not in going]:
                with self._record.changing() as db:
                    db.executemany("UPDATE acknowledgements SET ended = ? WHERE id = ?", over)
        return [
            {
                "key": alarm.key,
                "severity": "error" if alarm.kind in _ERRORS else "warning",
                "text": self._words[alarm.kind]["en"].format(**asdict(alarm)),
                "seen": seen.get((alarm.key, alarm.cause)),
                **asdict(alarm),
            }
            for alarm in alarms
        ]

    def acknowledge(self, key: str, who: str) -> None:
        """Record that a person has acknowledged an alarm.

        Raises:
            DataError: there is no such alarm now, or the person's name is empty.
            OutputError: the disk is full.
        """
        alarm = next((alarm for alarm in self._current() if alarm.key == key), None)
        if alarm is None or not who:
            raise DataError(
                f"there is no alarm {key}"
                if who
                else "give the name of the person who acknowledges the alarm"
            )
        with self._record.changing() as db:
            db.execute(
                "INSERT INTO acknowledgements (alarm, cause, who, time) VALUES (?, ?, ?, ?)",
                (alarm.key, alarm.cause, who, time_now()),
            )
