"""Scores of a stream of parts, read in the order of their time, and a page of charts of drift."""

from __future__ import annotations

import html
import json
import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from anomaly.calibration.rates import percent
from anomaly.errors import DataError, why
from anomaly.files.tables import read_rows
from anomaly.inference.rows import Row
from anomaly.line.drift import Drift, Watched
from anomaly.report.page import page, utc_now

_WIDTH, _HEIGHT = 1000, 200
_LEFT, _BELOW = 70, 32  # beside and below a chart, for its numbers
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
_POINTS = 500  # of a line on the chart
_STEPS = 60  # stretches of parts that shares are counted over


def drift_html(drift: Drift, scores: Sequence[float], said: Sequence[str], facts: str) -> str:
    """The page.

    Args:
        drift: has taken all parts and kept the sums.
        scores: the parts' scores, in the same order.
        said: what to say of it, a line each.
        facts: which model and which parts, in words.
    """
    alarm = drift.alarm
    verdict = (
        "No drift is seen."
        if alarm is None
        else f"The parts have drifted: alarm at part {(alarm.alarm or 0) + 1}."
    )
    state = "" if alarm is None else " alarm"
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in said)
    charts = "".join(_chart(one, np.asarray(scores)) for one in drift.watched)
    body = (
        f'<main class="drift"><h1>Drift</h1><p class="verdict{state}">{html.escape(verdict)}</p>'
        f'<p class="soft">{html.escape(facts)} · {utc_now()}</p><ul>{listed}</ul>{charts}</main>'
    )
    return page("Drift", body, styles=("base.css", "drift.css"))


def _chart(one: Watched, scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    level, count, kept = one.level, max(len(scores), 2), one.sums or []
    at = np.unique(np.linspace(0, max(len(scores) - 1, 0), _POINTS).astype(int)).tolist()
    highest = max(level.limit * 1.25, max(kept, default=0.0))
    sums = _line([(i / (count - 1), kept[i] / highest) for i in at if kept], "sum")
    shares = _shares(scores > level.value)
    marks = _horizontal(level.limit / highest, "limit", "alarm")
    marks += "".join(
        f'<line class="at" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}"/>'
        for x in ([] if one.alarm is None else [round(_WIDTH * one.alarm / (count - 1), 1)])
    )
    most = max(level.promised * 1.25, *(share for _, share in shares), 0.01)
    counted = _line([(x, share / most) for x, share in shares], "share")
    promised = _horizontal(level.promised / most, "promised", percent(level.promised))
    parts = len(scores)
    shares_axes, sums_axes = _axes(percent(most), parts), _axes(f"{highest:.3g}", parts)
    title = html.escape(f"{level.name}: parts that score above {level.value:.4g}")
    return (
        f'<section class="card"><h2>{title}</h2>'
        f"<h3>Share of parts above it, over time</h3>{_svg(shares_axes + promised + counted)}"
        f"<h3>Cumulative sum</h3>{_svg(sums_axes + marks + sums)}</section>"
    )


def _shares(above: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[float, float]]:
    """The middle of each stretch of parts, from 0 to 1, and the share above in it."""
    pieces = np.array_split(above, min(_STEPS, max(1, len(above) // 10)))
    ends = np.cumsum([len(piece) for piece in pieces])
    total = max(int(ends[-1]), 1)
    return [
        ((end - len(piece) / 2) / total, float(piece.mean()))
        for piece, end in zip(pieces, ends.tolist(), strict=True)
        if len(piece)
    ]


def _line(points: Sequence[tuple[float, float]], name: str) -> str:
    drawn = " ".join(f"{_WIDTH * x:.1f},{_HEIGHT * (1 - y):.1f}" for x, y in points)
    return f'<polyline class="{name}" points="{drawn}"/>'


def _horizontal(y: float, name: str, label: str) -> str:
    height = round(_HEIGHT * (1 - y), 1)
    return (
        f'<line class="{name}" x1="0" x2="{_WIDTH}" y1="{height}" y2="{height}"/>'
        f'<text x="{_WIDTH - 4}" y="{height - 4}">{html.escape(label)}</text>'
    )


def _axes(top: str, parts: int) -> str:
    """A chart's frame: from 0 up to a value, and the numbers of the parts, counted from 1."""
    found = (
        f'<path class="axis" d="M0 0V{_HEIGHT}H{_WIDTH}"/><text x="-8" y="6">{html.escape(top)}'
        f'</text><text x="-8" y="{_HEIGHT}">0</text>'
    )
    numbers = {1 + round(share * (max(parts, 1) - 1)): share for share in _TICKS}
    for number, share in numbers.items():
        x, label = round(_WIDTH * share, 1), f"part {number}" if number == 1 else f"{number:,}"
        found += (
            f'<path class="axis" d="M{x} {_HEIGHT}v6"/>'
            f'<text class="below" x="{x}" y="{_HEIGHT + 24}">{label}</text>'
        )
    return found


def _svg(content: str) -> str:
    size = f"{-_LEFT} -12 {_LEFT + _WIDTH + 24} {_HEIGHT + 12 + _BELOW}"
    return f'<svg viewBox="{size}" role="img">{content}</svg>'


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
                yield from _json_lines(lines, file)
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


def _json_lines(lines: Iterable[str], file: Path) -> Iterator[Mapping[str, Any]]:
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
