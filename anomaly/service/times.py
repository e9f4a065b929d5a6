"""Times as the record has them: ISO 8601 in UTC, to the millisecond, which sort as texts."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """The time now."""
    return _text(datetime.now(UTC))


def in_utc(given: str) -> str:
    """A time that somebody has given in ISO 8601; in UTC where it names no zone.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.fromisoformat(given)
    try:
        return _text(moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC))
    except OverflowError:
        raise ValueError(given) from None


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
