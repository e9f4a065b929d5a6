"""Periods in this machine's time zone, and a record's parts in one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from importlib.resources import files
from pathlib import Path

from anomaly.errors import AnomalyError, DataError
from anomaly.files.writing import like
from anomaly.line.record import in_utc, open_to_read
from anomaly.scoring.rules import decider

_HOURLY = timedelta(days=2)  # longest period that is counted by the hour


@dataclass(frozen=True)
class Period:
    """A period in local time.

    Attributes:
        begin: its first moment.
        end: the first moment after it.
    """

    begin: datetime
    end: datetime

    @classmethod
    def of(cls, begin: str, end: str | None) -> Period:
        """The period between two dates or times in ISO 8601; the last date belongs to it.

        Raises:
            AnomalyError: one of them is no time, or nothing lies between them.
        """
        start = _moment(begin, "--from")
        last = datetime.now() if end is None else _moment(end, "--to", timedelta(days=1))
        if start >= last:
            raise AnomalyError(
                f"--from {begin} isn't before --to {end or 'now'}; give a later --to"
            )
        return cls(start, last)

    @property
    def before(self) -> Period:
        """The previous period of the same length; for whole months, as many months."""
        begin, end = self.begin, self.end
        if any((at.day, at.time()) != (1, time()) for at in (begin, end)):
            return Period(begin - (end - begin), begin)
        months = 12 * (end.year - begin.year) + end.month - begin.month
        year, month = divmod(12 * begin.year + begin.month - 1 - months, 12)
        return Period(datetime(year, month + 1, 1), begin)

    @property
    def zone(self) -> str:
        """The local time zone: `CET (UTC+01:00)`."""
        moments = self.begin.astimezone(), self.end.astimezone()
        names = [f"{at.tzname()} (UTC{at.isoformat()[-6:]})" for at in moments]
        return " to ".join(dict.fromkeys(names))

    def __str__(self) -> str:
        begin, end = self.begin, self.end
        if begin.time() == end.time() == time():
            last = end - timedelta(days=1)
            return f"{begin:%Y-%m-%d}" + (f" to {last:%Y-%m-%d}" if last > begin else "")
        last_day = "" if begin.date() == end.date() else f"{end:%Y-%m-%d} "
        return f"{begin:%Y-%m-%d %H:%M} to {last_day}{end:%H:%M}"


def _moment(text: str, option: str, through: timedelta = timedelta()) -> datetime:
    """A local time; for a date, its midnight plus `through`."""
    try:
        moment = datetime.fromisoformat(text)
        if not 2000 <= moment.year < 3000:
            raise ValueError(text)
        with suppress(ValueError):
            return datetime.combine(date.fromisoformat(text), time()) + through
        return (moment.astimezone() if moment.tzinfo else moment).replace(tzinfo=None)
    except ValueError:
        raise AnomalyError(
            f"{option} {text} is no date or time; write 2026-11-27, or '2026-11-27 06:00'"
        ) from None


@contextmanager
def parts_of(record: Path, period: Period) -> Iterator[sqlite3.Connection]:
    """A connection to a record that has the tables and views of assets/report.sql.

    The last judgement of an image counts, even one after the period.

    Args:
        record: of `serve`, which may be in use.
        period: the period; the previous one is included, too.

    Raises:
        DataError: there is no such file, it isn't a record, or holds no part of the period.
    """
    if not record.is_file():
        raise DataError(f"there is no record {record}{like(record)}")
    limits = (("earliest", period.before.begin), ("begin", period.begin), ("end", period.end))
    values = {name: in_utc(at.astimezone().isoformat()) for name, at in limits}
    values["bucket"] = "%Y-%m-%d %H:00" if period.end - period.begin <= _HOURLY else "%Y-%m-%d"
    script = files("anomaly.line").joinpath("assets", "report.sql").read_text("utf-8")
    with open_to_read(record) as db:
        db.create_function("decider", 1, decider)
        db.executescript(script.format_map(values))
        if not db.execute("SELECT EXISTS (SELECT 1 FROM outcomes WHERE age = 0)").fetchone()[0]:
            first, last = db.execute("SELECT MIN (time), MAX (time) FROM parts").fetchone()
            content = (
                f"its parts are from {first[:16]} to {last[:16]} UTC"
                if first
                else "the record is empty"
            )
            raise DataError(f"{record} holds no part of {period}, {period.zone}; {content}")
        yield db
