"""`anomaly report`: a shift, a day or a month of a line, as a page and CSV files."""

from __future__ import annotations

import argparse
import base64
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from anomaly.calibration.rates import Rate, percent, rate_of
from anomaly.desk.advice import DEFECT_SHARE, LEAST_PARTS, compare_flagged
from anomaly.errors import AnomalyError, DataError, visible
from anomaly.files.tables import csv_text
from anomaly.files.writing import claim, from_json, like, locked, write
from anomaly.line.drift import Drift, Promise, scores_of
from anomaly.line.record import JUDGED, in_utc, open_to_read
from anomaly.report.page import figure_html, row_html, table_html, table_page, utc_now
from anomaly.storage.folder import checked, find_model, model_id
from anomaly.storage.models import read_folder
from anomaly.storage.thresholds import (
    models_scoring_alike,
    read_thresholds,
    thresholds_by_id,
)

PAGE = "report.html"
_PRICES = {"false-reject": "false rejects", "escape": "escapes", "review": "review"}
_CAPTIONS = ("", "Called good, but a defect", "Rejected, but good", "Nearest to a threshold")
_PROMISE_TITLES = ("model", "promised share", "of parts", "about", "at most", "seen", "compared")
_SHARES = {"review": "parts flagged", "reject": "good parts rejected"}
_PROMISE_NOTE = (
    "At most: promised with 95 % confidence for good parts like the calibration images. Good "
    "parts rejected are those that people have called good; there may be more."
)
_UNKNOWN = {
    "false rejects": "unknown: no rejected part was judged",
    "escapes": "unknown: no part called good was judged",
}
_VERSION_NOTE = "False rejects, escapes and agreement are those of judged parts (95 % confidence)."
_DRIFTED = "The scores have drifted: check lamp, lens and product."
_Cell: TypeAlias = str | int | float | Rate | None
_Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[_Cell]]]  # titles and rows
_HOURLY = timedelta(days=2)  # longest period that is counted by the hour
_Promises: TypeAlias = Mapping[str, Promise]  # by the version's id


@dataclass(frozen=True)
class Period:
    """A period in local time.

    Attributes:
        begin: the first moment; local time if it has no zone.
        end: the first moment after the period.
    """

    begin: datetime
    end: datetime

    def __post_init__(self) -> None:
        for name in ("begin", "end"):  # each gets its own offset: clocks may change in between
            object.__setattr__(self, name, getattr(self, name).astimezone())

    @classmethod
    def of(cls, begin: str, end: str | None) -> Period:
        """From one date or time in ISO 8601 to another, by default now; a last date belongs to it.

        Raises:
            AnomalyError: a text is no time, or the first isn't before the second.
        """
        last = datetime.now() if end is None else _moment(end, "--to", timedelta(days=1))
        period = cls(_moment(begin, "--from"), last)
        if period.begin >= period.end:
            raise AnomalyError(f"--from {begin} isn't before --to {end or 'now'}; change one")
        return period

    @property
    def before(self) -> Period:
        """The previous period: as many days if both ends have one time of day, else as long."""
        begin, end = (at.replace(tzinfo=None) for at in (self.begin, self.end))
        if begin.time() != end.time() or begin == end:
            return Period(self.begin - (self.end - self.begin), self.begin)
        return Period(begin - (end - begin), begin)

    @property
    def zone(self) -> str:
        """The local time zone, `CET (UTC+01:00)`; two where clocks change in between."""
        names = [f"{at.tzname()} (UTC{at.isoformat()[-6:]})" for at in (self.begin, self.end)]
        return " to ".join(dict.fromkeys(names))

    def __str__(self) -> str:
        begin, end = self.begin, self.end
        if begin.time() == end.time() == time():
            last = (end - timedelta(days=1)).date()
            return f"{begin:%Y-%m-%d}" + (f" to {last}" if last > begin.date() else "")
        last_day = "" if begin.date() == end.date() else f"{end:%Y-%m-%d} "
        return f"{begin:%Y-%m-%d %H:%M} to {last_day}{end:%H:%M}"


def _moment(text: str, option: str, through: timedelta = timedelta()) -> datetime:
    """The time that an option gives (years 2000 to 2999); for a date, midnight plus `through`."""
    try:
        moment = datetime.fromisoformat(text)
        if not 2000 <= moment.year < 3000:
            raise ValueError(text)
        is_date = len(text) <= len("2026-11-27")  # no time is so short
        return moment + through if is_date else moment
    except ValueError:
        raise AnomalyError(
            f"{option} {text} is no date or time; write 2026-11-27, or '2026-11-27 06:00'"
        ) from None


@contextmanager
def report_views(record: Path, period: Period) -> Iterator[sqlite3.Connection]:
    """A connection to a record, with the tables and views of assets/report.sql.

    They hold the period and the one before. The newest judgement of an image counts, even one
    after the period. `record` is that of `serve`, which may be in use, or results.jsonl.

    Raises:
        DataError: the file doesn't exist, or isn't a record.
    """
    if not record.is_file():
        raise DataError(f"there is no record {record}{like(record)}")
    limits = (("earliest", period.before.begin), ("begin", period.begin), ("end", period.end))
    values = {name: in_utc(at) for name, at in limits}
    values["hourly"] = str(hourly := int(period.end - period.begin <= _HOURLY))
    values["bucket"] = "%Y-%m-%d %H:00" if hourly else "%Y-%m-%d"
    values["judged"] = JUDGED
    script = files("anomaly.line").joinpath("assets", "report.sql").read_text("utf-8")
    with open_to_read(record) as db:
        db.executescript(script.format_map(values))
        yield db


def report(
    record: Path, period: Period, prices: Mapping[str, str], more: _Promises | None = None
) -> tuple[dict[str, str], bool]:
    """A report of a period.

    `prices` are numbers by the names in `_PRICES`, and the `currency`; `more` are promises that
    the record doesn't hold.

    Returns:
        Texts of the report's files by name; whether a model's scores have drifted.

    Raises:
        DataError: the record can't be read.
    """
    with report_views(record, period) as db:
        lines = db.execute("SELECT model_id, line FROM promises")
        known = {version: checked(from_json(line), Promise, record) for version, line in lines}
        promises = known | dict(more or {})
        tables = _tables(db, promises)
        drifts = dict(_drifts(db, promises, period))
        pictures = [_picture(*row) for row in db.execute("SELECT * FROM notable")]
        (odd,) = db.execute("SELECT COUNT (*) FROM seen WHERE age = 0 AND NOT by_score").fetchone()
    about = f"{escape(visible(str(record)))} · local time: {escape(period.zone)} · made {utc_now()}"
    drifted = any(drift.alarm for drift in drifts.values())
    levels = [f"{version}: {line}" for version, drift in drifts.items() for line in drift.lines()]
    content = {
        "Yield": _html(*tables["yield"]),
        "Judgements": _html(*tables["judgements"]),
        "What the models promised": _html(*tables["promises"], note=_PROMISE_NOTE),
        "Drift of the scores": "".join(f"<ul><li>{escape(line)}</li></ul>" for line in levels),
        "Versions of the models": _html(*tables["versions"], note=_VERSION_NOTE),
        "Kinds of defect": _html(*tables["kinds"]),
        "Times": _html(*tables["times"]),
        "Parts to look at": f'<div class="trio">{"".join(pictures)}</div>' if pictures else "",
    }
    sections = (f"<section><h2>{k}</h2>{html}</section>" for k, html in content.items() if html)
    answer = _answer(tables, period, prices, drifted=drifted, odd=odd)
    title = f"Report of {period}"
    page = table_page(title, title, about, answer + "".join(sections))
    csv = {f"{name}.csv": _csv(*table) for name, table in tables.items()}
    return {PAGE: page} | csv, drifted


def _tables(db: sqlite3.Connection, promises: _Promises) -> dict[str, _Table]:
    """The report's tables by name; None is an empty cell."""
    titles, outcomes = _select(db, "yields")
    yields = [[name, _UNKNOWN.get(name) if n is None else n, *rest] for name, n, *rest in outcomes]
    scored = db.execute("SELECT * FROM promised")
    promised = [row for parts in scored for row in _promised(promises, *parts)]
    columns, rows = _select(db, "versions")
    # The last two columns, verdicts that people agree with and all judged ones, become a rate.
    versions = [[*row, rate_of(right, n, right / n) if n else None] for *row, right, n in rows]
    return {
        "yield": (titles, yields),
        "judgements": _select(db, "judgements"),
        "promises": (_PROMISE_TITLES, promised),
        "versions": ([*columns[:-2], "agreement"], versions),
        "kinds": _select(db, "kinds"),
        "times": _select(db, "times"),
        "feedback": _select(db, "said"),
    }


def _select(db: sqlite3.Connection, view: str) -> tuple[list[str], list[Any]]:
    """Titles and rows of a view."""
    rows = db.execute(f"SELECT * FROM {view}")
    return [column[0] for column in rows.description], rows.fetchall()


def _promised(
    promises: _Promises, model: str, version: str, parts: int, *counts: Any
) -> Iterator[list[_Cell]]:
    """Rows about a version's promise: parts flagged, good parts rejected, defects missed.

    The arguments from `model` on are a row of the view `promised`.
    """
    flagged, false_rejects, defects, escapes = counts
    name = f"{model} {version}"
    if (promise := promises.get(version)) is None:
        yield [name, "unknown: name its run with --model", parts, None, None, None, None]
        return
    for threshold, rate in promise.rates.items():
        count = flagged if threshold == "review" else false_rejects
        cells: list[_Cell] = [name, _SHARES[threshold], parts, rate.expected, rate.at_most]
        if count is None:
            yield [*cells, _UNKNOWN["false rejects"], None]
        else:
            yield [*cells, count / parts, _compared(threshold, count, parts, rate)]
    if defects:
        missed = None if promise.caught is None else 1 - promise.caught
        yield [name, "defects called good", defects, missed, None, escapes / defects, None]


def _compared(threshold: str, count: int, parts: int, rate: Rate) -> str:
    """The share of parts above a threshold against its promise, in words."""
    if parts < LEAST_PARTS:
        return f"unknown: fewer than {LEAST_PARTS} parts"
    compared = compare_flagged(count, parts, rate)
    # Only judged false rejects are known, so fewer of them say nothing.
    return "as promised" if (threshold, compared) == ("reject", "fewer") else compared


def _cost(counts: Mapping[str, Sequence[Any]], prices: Mapping[str, str]) -> str:
    """The cost of the counts that are known, for people; empty without prices.

    `counts` are the rows of the table `yield` by outcome.
    """
    asked = {name: counts[outcome][0] for name, outcome in _PRICES.items() if name in prices}
    known = [float(prices[name]) * count for name, count in asked.items() if isinstance(count, int)]
    if not known:
        return "unknown" if asked else ""
    least = "at least " if len(known) < len(asked) else ""
    return f"{least}{sum(known):,.2f} {prices.get('currency', '')}".strip()


def _drifts(
    db: sqlite3.Connection, promises: _Promises, period: Period
) -> Iterator[tuple[str, Drift]]:
    """The id of each model's latest version, and the drift of its scores in the period."""
    replaced = {i for own, promise in promises.items() for i in promise.same_scores if i != own}
    times = f"time >= '{in_utc(period.begin)}' AND time < '{in_utc(period.end)}'"
    in_period = f"id IN (SELECT id FROM parts WHERE {times})"  # by the index of times
    for version, promise in promises.items():
        drift = Drift(promise.levels, scores_of(db, promise.same_scores, in_period))
        if version not in replaced and drift.parts:
            yield version, drift


def _answer(
    tables: Mapping[str, _Table],
    period: Period,
    prices: Mapping[str, str],
    *,
    drifted: bool,
    odd: int,
) -> str:
    """The first section as HTML: the main figures in words, in a colour for good or bad news.

    `odd` is the number of parts that weren't judged by their score.
    """
    figures: dict[Any, Any] = {outcome: values for outcome, *values in tables["yield"][1]}
    parts, escapes = figures["all parts"][0], figures["escapes"][0]
    rates = [row[-1] for row in tables["versions"][1] if isinstance(row[-1], Rate)]
    right, judged = sum(rate.count for rate in rates), sum(rate.images for rate in rates)
    promised: Sequence[Any] = tables["promises"][1]
    more = [f"more {row[1]} than promised: {row[0]}" for row in promised if row[-1] == "more"]
    doubts = [f"fewer {row[1]} than promised: {row[0]}" for row in promised if row[-1] == "fewer"]
    if odd > DEFECT_SHARE * parts:
        doubts.append(f"{odd:,} parts not judged by their score: check lamp, lens and product.")
    counts = {k: v for k, (v, *_) in figures.items() if v and k not in ("all parts", "good")}
    lines = [
        " · ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in counts.items()),
        f"before ({period.before}): {_called_good(figures, 2)}",
        f"People agree with {right} of {judged} judged verdicts." if judged else "",
        *more,
        *doubts,
        _DRIFTED if drifted else "",
        f"Known cost: {cost}" if (cost := _cost(figures, prices)) else "",
    ]
    flagged = [row for row in promised if row[1] == _SHARES["review"]]
    as_promised = sum(row[2] for row in flagged if row[-1] == "as promised")
    if more or drifted or (isinstance(escapes, int) and escapes):
        tone = "reject"
    elif doubts:
        tone = "review"
    else:  # no news is good news only of parts that were promised something
        tone = "good" if 2 * as_promised > parts else ""
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    heading = _called_good(figures, 0)
    return f'<section class="answer {tone}"><h2>{heading}</h2>{paragraphs}</section>'


def _called_good(figures: Mapping[str, Sequence[Any]], column: int) -> str:
    """The share of parts called good, in words: of the period (column 0) or the one before (2)."""
    parts = figures["all parts"][column]
    if not parts:
        return "no part on record"
    if not any(figures[verdict][column] for verdict in ("good", "review", "reject")):
        return f"{parts:,} parts without a verdict"
    share = 100 * figures["good"][column] / parts
    return f"{share:.2f} % of {parts:,} parts are called good"


def _html(titles: Sequence[str], rows: Sequence[Sequence[_Cell]], note: str = "") -> str:
    """An HTML table with a note below; empty without rows."""
    if not rows:
        return ""
    lines = [row_html(_shown(row[0]), map(_shown, row[1:])) for row in rows]
    return table_html(map(escape, titles), lines) + f'<p class="soft">{note}</p>'


def _csv(titles: Sequence[str], rows: Sequence[Sequence[_Cell]]) -> str:
    """A table as CSV; a rate is its estimate."""
    plain = ([c.expected if isinstance(c, Rate) else c for c in row] for row in rows)
    return csv_text([titles, *plain])


def _shown(cell: _Cell) -> str:
    """A cell as HTML: floats are shares, in percent; – stands for None."""
    match cell:
        case Rate():
            return f"{percent(cell.expected)}<small>{cell.interval}</small>"
        case float():
            return f"{100 * cell:.2f} %"
        case int():
            return f"{cell:,}"
    return f"<bdi>{escape(cell)}</bdi>" if cell else "–"


def _picture(
    kind: int, part: int, judged: str, model: str, time: str, path: str, verdict: str, *more: Any
) -> str:
    """A row of the view `notable` as HTML: the heatmap with its caption."""
    *levels, heatmap = more  # score, review and reject threshold
    judgement = f"; judged {judged}" if judged else ""
    score, review, reject = (f"{value or 0.0:.4g}" for value in levels)
    caption = (
        f"<b>{_CAPTIONS[kind]}</b><br>{escape(model)}, part {part}, {escape(visible(path))}"
        f"<br>{time}: {escape(verdict)}{judgement}<br>score {score}, "
        f"review threshold {review}, reject threshold {reject}"
    )
    data = base64.b64encode(heatmap or b"").decode()
    picture = f'<img class="picture" alt="no picture" src="data:image/jpeg;base64,{data}">'
    return f'<div class="card changed">{figure_html(picture, caption)}</div>'


def run_report(options: argparse.Namespace) -> int:
    """Write a report.

    Returns:
        0, or 1 if the scores have drifted.
    """
    period, prices = Period.of(options.begin, options.end), _prices(options.prices)
    # A folder is the output of infer.
    record = options.record / "results.jsonl" if options.record.is_dir() else options.record
    more = {} if options.model is None else _promises_of(options.model)
    with locked(options.output):
        files, drifted = report(record, period, prices, more)
        claim(options.output, files, overwrite=options.overwrite)
        for name, text in files.items():
            write(options.output / name, text)
    if files["times.csv"].count("\n") == 1:  # the titles alone
        print(f"{options.record} holds no part of {period}, {period.zone}")
    if drifted:
        print(_DRIFTED)
    print(f"Look at {options.output / PAGE}")
    return int(drifted)


def _promises_of(model: Path) -> _Promises:
    """Promises of a run's thresholds and of its earlier ones, by the version's id."""
    folder = find_model(model)
    read_folder(folder)
    thresholds, own = read_thresholds(folder), model_id(folder)
    if thresholds is None:
        raise DataError(f"{model} has no thresholds; set them with anomaly calibrate")
    earlier = {i: Promise.given(limits, {i}) for i, limits in thresholds_by_id(folder).items()}
    # The scores are watched by the present thresholds alone, whichever version has given them.
    return earlier | {own: Promise.given(thresholds, {own, *models_scoring_alike(folder)})}


def _prices(words: Sequence[str]) -> dict[str, str]:
    """Prices and currency by name, from the words of `--prices`."""
    prices = dict(word.partition("=")[::2] for word in words)
    for name, price in prices.items():
        with suppress(ValueError):
            if name == "currency" or (name in _PRICES and 0 <= float(price) < math.inf):
                continue
        raise AnomalyError(
            f"--prices {name}={price} isn't valid; write, for example, false-reject=4 escape=250 "
            "currency=EUR"
        )
    return prices
