"""What is wrong with the line, and who has seen it."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from anomaly.errors import DataError, OutputError
from anomaly.line.record import Record, time_now
from anomaly.line.slot import ModelSlot

log = logging.getLogger(__name__)

_SECONDS = 5.0  # between two looks while nobody asks: whether an alarm is over
# How bad each is, by the word for it: while there is an error, the service isn't ready.
_SEVERITIES = {
    "alarm_stopping": "error",
    "alarm_unwritable": "error",
    "alarm_failed": "error",
    "alarm_loading": "error",
    "alarm_scene": "warning",
    "alarm_refused": "warning",
    "alarm_record": "warning",
    "alarm_drift": "warning",
    "alarm_flagged": "warning",
}
_OPEN = "SELECT id, alarm, cause, who, time FROM acknowledgements WHERE ended = ''"


@dataclass(frozen=True)
class Alarm:
    """One thing that is wrong.

    Attributes:
        word: of the table of words, which says it in every language.
        model: that it is about; empty for all.
        reason: what has happened, where that isn't always the same.
    """

    word: str
    model: str = ""
    reason: str = ""

    @property
    def key(self) -> str:
        """Its name, the same as long as it lasts."""
        return f"{self.word.removeprefix('alarm_')}:{self.model}".rstrip(":")

    @property
    def cause(self) -> str:
        """The reason without its figures, which change with every part."""
        return re.sub(r"[\d.,]+", "", self.reason)

    def to_json(self) -> dict[str, Any]:
        """As a client gets it; `text` is in English."""
        values = {"model": self.model, "reason": self.reason}
        text = _words()[self.word]["en"].format(**values)
        severity = _SEVERITIES[self.word]
        return {"key": self.key, "severity": severity, "text": text, "word": self.word, **values}


@lru_cache(maxsize=1)
def _words() -> dict[str, dict[str, str]]:
    table = files("anomaly.line").joinpath("assets", "words.json").read_text("utf-8")
    return dict(json.loads(table))


def alarms_of(models: Iterable[ModelSlot], record: Record, stopping: bool) -> Iterator[Alarm]:
    """The alarms now, errors of the whole service first."""
    if stopping:
        yield Alarm("alarm_stopping")
    if trouble := record.trouble():
        yield Alarm("alarm_unwritable", reason=trouble)
    if record.changed:
        yield Alarm("alarm_record", reason=record.changed)
    for slot in models:
        yield from _alarms_of_model(slot)


def _alarms_of_model(slot: ModelSlot) -> Iterator[Alarm]:
    if slot.state in ("failed", "loading"):
        word = "alarm_failed" if slot.state == "failed" else "alarm_loading"
        yield Alarm(word, slot.name, slot.trouble)
    if slot.refused:
        yield Alarm("alarm_refused", slot.name, slot.trouble)
    if scene := slot.scene:
        yield Alarm("alarm_scene", slot.name, scene)
    drift = slot.drifted()
    if drift["alarm"]:
        yield Alarm("alarm_drift", slot.name)
    if flagged := drift["flagged"]:
        yield Alarm("alarm_flagged", slot.name, flagged)


class Alarms:
    """Alarms with who has seen them. Used in a `with` statement, which notices when they end.

    An acknowledgement counts until its alarm ends or has another cause; the record keeps it.

    Args:
        record: where it is written down who has seen an alarm, and when it was over.
        current: the alarms now.
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
            try:
                self.now()
            except Exception:
                log.exception("looking for alarms failed")

    def now(self) -> list[dict[str, Any]]:
        """The alarms now, each with `seen`: who has acknowledged it and when, or None."""
        alarms = sorted(self._current(), key=lambda alarm: _SEVERITIES[alarm.word])
        seen: dict[tuple[str, str], dict[str, str]] = {}
        with suppress(OutputError):  # an alarm of its own
            rows = self._record.read(_OPEN, ())
            seen = {(key, cause): {"who": who, "time": time} for _, key, cause, who, time in rows}
            going = {(alarm.key, alarm.cause) for alarm in alarms}
            if over := [(time_now(), row[0]) for row in rows if row[1:3] not in going]:
                with self._record.changing() as db:
                    db.executemany("UPDATE acknowledgements SET ended = ? WHERE id = ?", over)
        return [{**one.to_json(), "seen": seen.get((one.key, one.cause))} for one in alarms]

    def acknowledge(self, key: str, who: str) -> None:
        """Write down that somebody has seen an alarm.

        Raises:
            DataError: there is no such alarm now, or nobody says who.
            OutputError: no room.
        """
        alarm = next((alarm for alarm in self._current() if alarm.key == key), None)
        if alarm is None or not who:
            raise DataError(f"there is no alarm {key}" if who else "say who has seen the alarm")
        with self._record.changing() as db:
            db.execute(
                "INSERT INTO acknowledgements (alarm, cause, who, time) VALUES (?, ?, ?, ?)",
                (alarm.key, alarm.cause, who, time_now()),
            )
