"""The record: each part's result and people's judgements, in an SQLite file that survives crashes.

    parts      one row for each answer, in the order of answers; never changed
    pictures   image file and small heatmap of some parts; the oldest are deleted above a size limit
    promises   rates that the thresholds of each model promise
    feedback   people's judgements; an empty verdict withdraws one; a trigger refuses changes
    outboxes   the last part that each receiver has confirmed

It has a write-ahead log, and each batch is one transaction: after `add` returns, its rows survive
a crash. A file may come from elsewhere: `open_to_read` checks its tables, whose types check the
values. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from anomaly.datasets.samples import Sample
from anomaly.errors import DataError, OutputError, visible, why
from anomaly.files.writing import from_json, short_name, write
from anomaly.imaging.read import suffix_of
from anomaly.inference.results import Row

log = logging.getLogger(__name__)

_LOGS = ("-wal", "-shm")  # endings of the names of SQLite's logs beside a record
_FORMAT = 2  # of the tables; a record of another format is refused
_STATE = "SELECT user_version, EXISTS (SELECT 1 FROM sqlite_schema) FROM pragma_user_version"
_TABLES = """
SELECT type, name, sql FROM sqlite_schema WHERE type <> 'index'
AND lower (tbl_name) IN ('parts', 'pictures', 'promises', 'feedback', 'outboxes')
"""
# The lines of results.jsonl as parts, in the order of their times.
_TAKE = """
INSERT INTO parts (model, line)
SELECT json_extract (line, '$.model_name'), line FROM lines ORDER BY json_extract (line, '$.time')
"""
_HELD = "SELECT COALESCE (SUM (bytes), 0) FROM pictures"
_KEEP = "INSERT OR IGNORE INTO pictures VALUES (?, ?, ?, ?, ?)"
_OLDEST = "SELECT part FROM pictures ORDER BY asked, part LIMIT 1"
_PROMISE = "INSERT OR IGNORE INTO promises VALUES (?, ?)"
# True of rows of `feedback` that count: each person's last judgement of an image, unless withdrawn.
_COUNTS = """
verdict IN ('good', 'defect') AND NOT EXISTS (SELECT 1 FROM feedback AS later WHERE
    later.sha256 = feedback.sha256 AND later.who = feedback.who AND later.id > feedback.id)
"""
# For each image, the newest judgement that counts, whoever gave it.
JUDGED = f"""
(SELECT part, sha256, verdict, defect_type, MAX (id) AS id FROM feedback
 WHERE {_COUNTS} GROUP BY sha256)
"""
_PAST = 200  # newest unjudged pictures that `update` compares
# The judged images that given models have scored, each with the newest picture that is kept.
_CONFIRMED = f"""
SELECT judged.verdict, judged.defect_type, MAX (pictures.part) AS part, file
FROM {JUDGED} AS judged JOIN parts ON parts.sha256 = judged.sha256
LEFT JOIN pictures ON pictures.part = parts.id
WHERE parts.model_id IN ({{marks}}) GROUP BY judged.id ORDER BY judged.id
"""
# The newest pictures of parts that nobody has judged.
_UNJUDGED = f"""
SELECT MAX (parts.id), pictures.file FROM pictures JOIN parts ON pictures.part = parts.id
WHERE parts.model_id IN ({{marks}}) AND parts.sha256 NOT IN (SELECT sha256 FROM {JUDGED})
GROUP BY parts.sha256 ORDER BY MAX (parts.id) DESC LIMIT {_PAST}
"""
# Each part as JSON, with its image's newest judgement.
_PARTS = f"""
SELECT json_set (line, '$.id', parts.id, '$.model', parts.model,
    '$.picture', json (iif (pictures.part, 'true', 'false')),
    '$.feedback', json (CASE WHEN feedback.id THEN json_object (
        'verdict', feedback.verdict, 'defect_type', feedback.defect_type,
        'note', feedback.note, 'who', feedback.who) END))
FROM parts LEFT JOIN pictures ON pictures.part = parts.id
LEFT JOIN feedback ON feedback.id = (
    SELECT MAX (id) FROM feedback WHERE sha256 = parts.sha256 AND {_COUNTS})
"""


@dataclass(frozen=True)
class Answer:
    """The result for one part.

    Attributes:
        model: the model's name in the service.
        row: the result, as `infer` writes it.
        file: the image file.
        heatmap: the heatmap as a JPEG of reduced size; empty if the image wasn't scored.
    """

    model: str
    row: Row
    file: bytes
    heatmap: bytes = b""


class Record:
    """The record's file, open to be written. Threads may share it.

    Nothing can be recorded while the file is gone or was changed by another program.

    Args:
        file: created if missing.
        goods: share of good parts whose picture is kept, drawn by their numbers; pictures of
            judged and of flagged parts are kept in any case.
        megabytes: limit for all pictures, in 10^6 bytes; above it pictures are deleted: first
            those of drawn good parts, then others, the oldest first.

    Attributes:
        promises: promised rates by the model's id; recorded once the model has scored a part.

    Raises:
        OutputError: the file can't be written, or isn't a record.
    """

    def __init__(self, file: Path, goods: float = 0.02, megabytes: int = 2000) -> None:
        self.file = file
        self.promises: dict[str, str] = {}
        self._goods, self._most = goods, megabytes * 1_000_000
        self._lock = threading.RLock()
        self._writer = ThreadPoolExecutor(1, "record")
        self._needed = 0  # bytes that the last write needed
        self._trouble = ""
        self._places: dict[str, tuple[int, int]] = {}
        with self._explained():
            self._db = _opened(file)
            self._places = _places(file)

    def close(self) -> None:
        """Close the file after the last write; the log is folded into it."""
        self._writer.shutdown()
        with self._lock:
            self._db.close()

    def trouble(self) -> str:
        """Try to write; returns the reason that the record can't be written, or nothing."""
        with suppress(OutputError), self.changing():
            pass
        return self._trouble

    def add(self, answers: Sequence[Answer]) -> list[int]:
        """Record results; they are on disk when this returns.

        Returns:
            The number of each part.

        Raises:
            OutputError: the record can't be written, as on a full disk.
        """
        with self._lock:
            self._needed = sum(len(answer.file) + len(answer.heatmap) for answer in answers)
            with self.changing() as db:
                models = {answer.row.model_id for answer in answers} & self.promises.keys()
                db.executemany(_PROMISE, [(model, self.promises[model]) for model in models])
                return [self._add(db, answer) for answer in answers]

    def put(self, answer: Answer) -> Future[int]:
        """Record a result after those put before; gives the part's number once it is on disk."""
        return self._writer.submit(lambda: self.add([answer])[0])

    def _add(self, db: sqlite3.Connection, answer: Answer) -> int:
        """Record one result; returns the part's number."""
        row = answer.row
        line = json.dumps(asdict(row), allow_nan=False)
        added = db.execute("INSERT INTO parts (model, line) VALUES (?, ?)", (answer.model, line))
        number = added.lastrowid or 0
        is_flagged = row.verdict != "good"  # also without a verdict
        is_drawn = random.Random(number).random() < self._goods
        if row.status == "ok" and (is_flagged or is_drawn):
            self._keep(db, number, is_flagged, answer.file, answer.heatmap)
        return number

    def _keep(
        self, db: sqlite3.Connection, part: int, is_needed: bool, file: bytes, heatmap: bytes
    ) -> None:
        """Keep a picture, and delete the oldest until all fit, those that aren't needed first."""
        db.execute(_KEEP, (part, is_needed, len(file) + len(heatmap), file, heatmap))
        while db.execute(_HELD).fetchone()[0] > self._most:
            db.execute(f"DELETE FROM pictures WHERE part = ({_OLDEST})")

    def add_feedback(
        self,
        verdict: str,
        *,
        who: str,
        part: int,
        defect_type: str = "",
        note: str = "",
        picture: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Record the judgement that a person (`who`) has made of a part, by the part's number.

        `verdict` is `good` or `defect`; an empty one withdraws this person's last judgement.
        `picture` is the part's image file and heatmap, to be kept if the record has none.

        Raises:
            DataError: there is no such part, its image couldn't be read, or this person has no
                judgement to withdraw.
            OutputError: the record can't be written.
        """
        with self.changing() as db:
            row = db.execute("SELECT sha256, status FROM parts WHERE id = ?", (part,)).fetchone()
            sha256, status = row or ("", "missing")
            if status != "ok":
                trouble = "has no image that could be read" if row else "doesn't exist"
                raise DataError(f"part {part} {trouble}; nothing was recorded")
            own = f"SELECT 1 FROM feedback WHERE sha256 = ? AND who = ? AND {_COUNTS}"
            if not (verdict or db.execute(own, (sha256, who)).fetchone()):
                name = who or "someone without a name"
                raise DataError(f"no judgement by {name} to take back; nothing was recorded")
            judgement = (part, sha256, who, verdict, defect_type, note, in_utc(datetime.now(UTC)))
            db.execute("INSERT INTO feedback VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", judgement)
            if picture is not None:
                self._keep(db, part, True, *picture)

    def parts(
        self,
        before: int | None = None,
        verdict: str = "",
        limit: int = 60,
        model: str = "",
        number: int | None = None,
    ) -> list[dict[str, Any]]:
        """At most `limit` parts, the newest first: those that fit all other arguments given.

        `before` asks for lower numbers than itself, `number` for one part.

        Returns:
            Rows as of results.jsonl, with `id`, `model`, `picture` (whether there is one), and
            `feedback` (the image's newest judgement, or None).
        """
        wanted = {"parts.id < ?": before, "parts.verdict = ?": verdict, "parts.model = ?": model}
        wanted["parts.id = ?"] = number
        conditions = {condition: value for condition, value in wanted.items() if value}
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        query = f"{_PARTS} {where}ORDER BY parts.id DESC LIMIT ?"
        return [from_json(line) for (line,) in self.read(query, (*conditions.values(), limit))]

    def picture(self, number: int, kind: Literal["file", "heatmap"]) -> bytes | None:
        """A part's image file or heatmap; None if it isn't kept."""
        rows = self.read(f"SELECT {kind} FROM pictures WHERE part = ?", (number,))
        return (rows[0][0] or None) if rows else None

    def counts(self, since: str, model: str = "") -> dict[str, int]:
        """Numbers of parts by verdict (or `no verdict`), by status if they couldn't be scored.

        Args:
            since: a time (ISO 8601, UTC).
            model: only parts of this model; empty for all.
        """
        query = "SELECT IIF (status = 'ok', verdict, status) AS outcome, COUNT (*) FROM parts"
        query += " WHERE time >= ? AND ? IN (model, '') GROUP BY outcome"
        rows = self.read(query, (since, model))
        return {outcome or "no verdict": count for outcome, count in rows}

    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of a query, on a connection of its own, which never waits for writers."""
        with open_to_read(self.file) as db:
            return db.execute(query, values).fetchall()

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: its changes are written at its end; none if that fails (`OutputError`)."""
        with self._lock, self._explained():
            self._check_place()
            # A small change must not end the trouble of a part for which there is no room yet.
            if self._trouble and shutil.disk_usage(self.file.parent).free < self._needed:
                raise OutputError(self._trouble)
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:  # ends the transaction
                yield self._db
            self._check_place()  # what went to a file that was just replaced is lost
            if self._trouble:
                log.warning("%s can be written again", self.file)
            self._trouble = ""

    def _check_place(self) -> None:
        """Refuse to write to a file that was moved or replaced, which SQLite doesn't notice."""
        if _places(self.file) != self._places:
            raise OutputError(
                f"{self.file} was removed or changed by another program; put it back, or end serve "
                "and start it with a new record"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of a write into `OutputError`, and remember the reason as `trouble`."""
        try:
            yield
        except (sqlite3.Error, OSError, OutputError) as error:
            reason = str(error) if isinstance(error, sqlite3.Error) else why(error)
            if not isinstance(error, OutputError):
                reason = f"{self.file} can't be used: {reason}"
            reason = visible(reason)
            if self._places and not self._trouble:  # at the start the caller reports it
                log.error("%s", reason)
            self._trouble = reason
            raise OutputError(reason) from None


def _opened(file: Path) -> sqlite3.Connection:
    """A connection that writes to a record, which is made if missing; no other file is changed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # for owner and group; SQLite's logs get the same rights
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o640))
    db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA busy_timeout = 5000")
        if foreign := _foreign(db):
            raise OutputError(f"{file} {foreign}; give another --record")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(f"BEGIN IMMEDIATE; {_schema()}; COMMIT")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def open_to_read(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a record of `serve`, or to the rows in results.jsonl as a record in memory.

    A record needn't be writable, and others may be writing to it. Each value is of its column's
    type; `line` in `parts` is a `Row` as JSON.

    Raises:
        DataError: the file can't be read, isn't a record, was copied without its log, or holds
            what neither `serve` nor `infer` writes.
    """
    place, is_rows = file.resolve(), file.suffix == ".jsonl"
    logged = any(Path(f"{place}{end}").exists() for end in _LOGS)
    writable = os.access(place.parent, os.W_OK)
    # Without `immutable` SQLite makes logs beside a record, which a read-only folder refuses.
    address = f"{place.as_uri()}?mode=ro" + ("" if logged or writable else "&immutable=1")
    try:
        with closing(_rows(file) if is_rows else sqlite3.connect(address, uri=True)) as db:
            if foreign := _foreign(db):
                raise DataError(f"{file} {foreign}; give a record of serve")
            if not db.execute(_STATE).fetchone()[1]:
                raise DataError(
                    f"{file} holds no parts: while serve runs they may be in {file.name}-wal. Copy "
                    'a record with sqlite3 ORIGINAL ".backup COPY", or stop serve first'
                )
            yield db
    except sqlite3.Error as error:
        reason = f"{file} can't be read as a record of serve: {error}"
        if is_rows:
            reason = f"{file} holds lines that infer doesn't write"
        elif logged and not writable:
            reason += f"; copy it and {file.name}-wal into a folder that you can write to"
        raise DataError(reason) from None


def _rows(file: Path) -> sqlite3.Connection:
    """The rows in results.jsonl as a record in memory."""
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{file} can't be read: {why(error)}") from None
    db = sqlite3.connect(":memory:")
    db.executescript(f"{_schema()}; CREATE TEMP TABLE lines (line TEXT)")
    db.executemany("INSERT INTO lines VALUES (?)", ((line,) for line in lines if line))
    db.execute(_TAKE)
    return db


def _foreign(db: sqlite3.Connection) -> str:
    """The reason that a database is no record; empty for a record or an empty file."""
    version, tables = db.execute(_STATE).fetchone()
    if version not in (0, _FORMAT):
        return "was written by another version of this program"
    # No views, which may have no end, and no triggers.
    known = _own_tables().issuperset(db.execute(_TABLES))
    return "" if known and (version or not tables) else "is a database of another program"


@cache
def _own_tables() -> frozenset[tuple[str, ...]]:  # type, name and SQL
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_schema())
        return frozenset(db.execute(_TABLES))


def _schema() -> str:
    """SQL that makes the tables of a record, and marks it as one."""
    tables = files("anomaly.line").joinpath("assets", "record.sql").read_text("utf-8")
    return f"{tables}; PRAGMA user_version = {_FORMAT}"


def _places(file: Path) -> dict[str, tuple[int, int]]:
    """Device and inode of the record and its logs, by their endings."""
    places = {}
    for end in ("", *_LOGS):
        with suppress(OSError):
            entry = Path(f"{file}{end}").stat()
            places[end] = entry.st_dev, entry.st_ino
    return places


def in_utc(moment: datetime) -> str:
    """A time in ISO 8601, in UTC and to the millisecond; without a zone it is UTC already.

    Raises:
        OverflowError: it lies outside the years 1 to 9999.
    """
    aware = moment.replace(tzinfo=moment.tzinfo or UTC)
    return aware.astimezone(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Confirmed:
    """Pictures of a record, written to files: good parts and defects by people's judgement.

    Attributes:
        past: images of the newest parts that nobody has judged, 200 at most.
        lost: number of judged images whose picture isn't kept.
    """

    good: list[Sample]
    defects: list[Sample]
    past: list[Sample]
    lost: int


def confirmed_parts(record: Path, model_ids: Collection[str], folder: Path) -> Confirmed:
    """Write pictures of a record into a folder.

    The newest judgement of an image counts. `model_ids` are those of a model and of the models
    it was updated from; parts of others are left out. The folder, empty before, gets `past/` and,
    as a data set, `judged/good/` and `judged/defect/<type>/`.

    Raises:
        DataError: the record can't be read, or holds nothing of these models.
        OutputError: the disk is too full for the pictures.
    """
    marks = ", ".join("?" * len(model_ids))
    samples: dict[str, list[Sample]] = {"good": [], "defect": []}
    lost = 0
    with open_to_read(record) as db:
        for verdict, kind, part, file in db.execute(_CONFIRMED.format(marks=marks), (*model_ids,)):
            if file is None:
                lost += 1
                continue
            place = folder / "judged" / verdict / (safe_name(kind) if kind else "")
            path = place / f"part-{part}.{suffix_of(file)}"
            name = f"part {part}" + (f" ({kind})" if kind else "")
            samples[verdict].append(_sample(path, file, name))
        newest = db.execute(_UNJUDGED.format(marks=marks), (*model_ids,))
        past = [_sample(folder / "past" / f"{part}", file, f"part {part}") for part, file in newest]
    if not any((lost, past, *samples.values())):
        raise DataError(
            f"{record} holds no picture of a part scored by this model or an earlier version of "
            "it; give --model the run that has scored its parts"
        )
    return Confirmed(samples["good"], samples["defect"], past, lost)


def safe_name(text: str) -> str:
    """A kind of defect as the name of a visible folder."""
    return short_name(re.sub(r"[^\w .-]|^\.|\.$", "_", text.strip()) or "_")


def _sample(path: Path, file: bytes, name: str) -> Sample:
    write(path, file)
    return Sample(path, name)
