"""Scores of a stream of parts, in the order of their time, from whatever has them."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from anomaly.errors import DataError, why
from anomaly.files.csv_files import read_rows
from anomaly.inference.rows import Row

_NEEDED = ("status", "image_score", "model_id")
_SQLITE = b"SQLite format 3\x00"
# What a person has called a defect is none of the good parts' business, as often as it was scored.
_RECORDED = """
SELECT line FROM parts WHERE sha256 NOT IN (
    SELECT sha256 FROM feedback WHERE verdict = 'defect'
    AND id IN (SELECT MAX (id) FROM feedback GROUP BY sha256)) ORDER BY id
"""


@dataclass(frozen=True)
class Stream:
    """Scores of parts, the first one first.

    Attributes:
        scores: image scores.
        times: when each was scored; empty where that isn't known.
        notes: what was left out, for people.
    """

    scores: list[float]
    times: list[str]
    notes: list[str]


def read_scores(file: Path, model_ids: Collection[str]) -> Stream:
    """Read the scores that one model has given, with whatever thresholds.

    Parts that have no score, that a person has to look at whatever their score, or that a person
    has called defects are left out.

    Args:
        file: results.csv, results.jsonl, or the record of `serve`.
        model_ids: of the model, with its thresholds now and with earlier ones; rows of other models
            are left out.

    Raises:
        DataError: it can't be read, or holds no row of this model.
    """
    kept, other, unscored = [], 0, 0
    for row in _rows(file):
        if row.get("status") != "ok" or row.get("reason"):
            unscored += 1
        elif row.get("model_id") not in model_ids:
            other += 1
        else:
            kept.append((str(row.get("time") or ""), _number(file, row.get("image_score"))))
    if not kept:
        held = f", but {other} of other models" if other else ""
        raise DataError(f"{file} holds no scored part of this model{held}")
    notes = []
    if all(time for time, _ in kept):
        kept.sort(key=lambda part: part[0])
    else:
        notes.append("some rows don't say when; all are taken in the file's order")
    if other:
        notes.append(f"rows of other models, left out: {other}")
    if unscored:
        notes.append(f"rows without a score, or of what isn't our part, left out: {unscored}")
    return Stream([score for _, score in kept], [time for time, _ in kept], notes)


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with file.open("rb") as stream:
            head = stream.read(len(_SQLITE))
        if head == _SQLITE:
            yield from _recorded(file)
        elif file.suffix.lower() == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                yield from _lines(lines, file)
        else:
            columns = [field.name for field in fields(Row)]
            for _, row in read_rows(file.read_bytes(), str(file), columns, _NEEDED):
                yield row
    except (OSError, UnicodeError) as error:
        raise DataError(f"{file} can't be read: {why(error)}") from None


def _recorded(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as record:
            for (line,) in record.execute(_RECORDED):
                yield json.loads(line)
    except sqlite3.Error:
        raise DataError(f"{file} can't be read as a record of serve") from None


def _lines(lines: Iterable[str], file: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            yield dict(json.loads(line))
        except (ValueError, TypeError):
            raise DataError(f"{file} line {number} isn't a row of results.jsonl") from None


def _number(file: Path, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{file}: a score is {str(value)[:40]!r}, which is no number")
    return number
