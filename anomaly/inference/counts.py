"""How many images have each status and each verdict, and how that is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from anomaly.inference.rows import Row

_UNUSABLE = ("unreadable", "unsupported", "failed")
_VERDICTS = {"good": "good", "review": "to review", "reject": "rejected"}


def counts_of(rows: Iterable[Row]) -> Counter[str]:
    """How many rows have each status, and each verdict."""
    return Counter(word for row in rows for word in (row.status, row.verdict))


def total_of(counts: Counter[str]) -> int:
    """How many images there are."""
    return sum(counts[status] for status in ("ok", *_UNUSABLE))


def say_counts(counts: Counter[str], total: int | None = None) -> str:
    """How many images were scored, and with what result.

    Args:
        counts: see `counts_of`.
        total: how many images there are, where not all have a row.
    """
    said = f"{counts['ok']} of {total_of(counts) if total is None else total} images scored"
    without = "no verdicts, for the model has no thresholds" if counts["ok"] else ""
    unusable = [f"{counts[status]} {status}" for status in _UNUSABLE if counts[status]]
    found = ", ".join([word for word in (say_verdicts(counts) or without, *unusable) if word])
    return f"{said}: {found}" if found else said


def say_verdicts(counts: Counter[str]) -> str:
    """How many images have each verdict; empty where none has any."""
    if not any(counts[verdict] for verdict in _VERDICTS):
        return ""
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in _VERDICTS.items())
