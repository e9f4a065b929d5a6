"""The record: each part's result and people's judgements, in an SQLite file that survives crashes.

    parts      one row for each answer, in the order of answers; never changed
    pictures   image file and small heatmap of some parts; the oldest are deleted above a size limit
    promises   rates that the thresholds of each model promise
    feedback   people's judgements; an empty verdict withdraws one; a trigger refuses changes
    outboxes   the last part that each receiver has confirmed

It has a write-ahead log, and each batch is one transaction: after `add` returns, its rows survive
a crash. It notices when the file is removed or replaced; SQLite alone would go on writing to the
deleted file. A file may come from elsewhere: `open_to_read` checks its tables and values. Imports
no torch.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_type_hints

from anomaly.errors import DataError, OutputError, visible
from anomaly.files.writing import from_json
from anomaly.inference.rows import Row

log = logging.getLogger(__name__)

_SQLITE = b"SQLite format 3\x00"  # the first bytes of each of its files
_LOGS = ("-wal", "-shm")  # endings of their names
_FORMAT = 1
_MOST_AT_ONCE = 64  # results in one transaction
_LOOK_SECONDS = 0.2  # longest wait of a reader for a writer
# Called with a part's number or the error.
_Then = Callable[[int | OutputError], object]
_STATE = "SELECT user_version, EXISTS (SELECT 1 FROM sqlite_schema) FROM pragma_user_version"
_TABLES = """
SELECT type, name, sql FROM sqlite_schema WHERE type <> 'index'
AND lower (tbl_name) IN ('parts', 'pictures', 'promises', 'feedback', 'outboxes')
"""
# Types of columns by name; other ones hold texts and numbers, never bytes.
_KINDS: dict[str, type] = {"file": bytes, "heatmap": bytes, "score": float, "part": int}
# Types of a row's values, and what stands for another one.
_FIELDS: dict[str, tuple[Any, str | None]] = {
    name: (str, "") if kind is str else ((int, float), None)
    for name, kind in get_type_hints(Row).items()
}
_HELD = "SELECT COALESCE (SUM (bytes), 0) FROM pictures"
_RECEIVER = """
INSERT OR IGNORE INTO outboxes SELECT ?, MAX (COALESCE (MAX (id), 0), ?), 0 FROM parts
"""
_PROMISE = "INSERT OR IGNORE INTO promises VALUES (?, ?)"
# Each person's last judgement of an image counts, unless that person has withdrawn it.
_COUNTS = """
verdict IN ('good', 'defect') AND NOT EXISTS (SELECT 1 FROM feedback AS later WHERE
    later.sha256 = feedback.sha256 AND later.who = feedback.who AND later.id > feedback.id)
"""
# The last one of each image that counts.
JUDGED = f"""
(SELECT part, sha256, verdict, defect_type, MAX (id) AS id FROM feedback
 WHERE {_COUNTS} GROUP BY sha256)
"""
# Each part with its image's last judgement, the newest part first.
_PARTS = f"""
SELECT parts.id, parts.model, parts.line, pictures.part IS NOT NULL,
       feedback.verdict, feedback.defect_type, feedback.note, feedback.who
FROM parts LEFT JOIN pictures ON pictures.part = parts.id
LEFT JOIN feedback ON feedback.id = (
    SELECT MAX (id) FROM feedback WHERE sha256 = parts.sha256 AND {_COUNTS})
"""


@dataclass(frozen=True)
class Answer:
    """The result for one part.

    Attributes:
        model: the model's name in the service.
        row: the result.
        file: the image file's bytes.
        heatmap: a small JPEG; empty where there is none.
    """

    model: str
    row: Row
    file: bytes
    heatmap: bytes = b""


@dataclass(frozen=True)
class Keeping:
    """Which pictures are kept: all of parts not called good, and a share of the good ones.

    Attributes:
        goods: share of good parts, drawn by their numbers.
        megabytes: limit for all pictures; above it the oldest are deleted, good parts first.
    """

    goods: float = 0.02
    megabytes: int = 2000


class Record:
    """The record's file. Threads may share it.

    If the file is removed during use, a new one is created in its place; if it is replaced, the
    new file is used. Numbers of parts continue.

    Args:
        file: created if missing.
        keeping: which pictures are kept.

    Attributes:
        last: number of the newest part.
        promises: promised rates by the model's id; recorded once the model has scored a part.
        changes: how often the file was removed or replaced.
        changed: the last such change, for people; empty if there was none.

    Raises:
        OutputError: the file can't be written, or isn't a record.
    """

    def __init__(self, file: Path, keeping: Keeping | None = None) -> None:
        self.file = file
        self.changes, self.changed = 0, ""
        self.promises: dict[str, str] = {}
        self._keeping = keeping or Keeping()
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._places: tuple[object, ...] = ()
        self._head = -1  # a descriptor of the file
        self._gone = False
        self._receivers: set[str] = set()
        self.last = 0
        self._held: int | None = None  # bytes of pictures; None until they are counted
        self._needed = 0  # bytes that the last write needed
        self._trouble = ""
        with self._explained():
            self._at_hand()

    def _at_hand(self) -> sqlite3.Connection:
        """The connection to the file that has the record's name."""
        places = _places(self.file, self._head)
        if self._db is not None:
            if places == self._places:
                return self._db
            self._gone = places[0] != self._places[0]
            if not self._gone and not is_sqlite(self.file):
                if self.file.stat().st_size:
                    raise OutputError(
                        f"{self.file} was overwritten by another program; move it away, and a "
                        "new record is created"
                    )
                Path(os.path.realpath(self.file)).unlink()  # truncated: it holds nothing
                self._gone = True
            # Fold the log into the old file, wherever that is: SQLite would take it for the
            # new file's log.
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint (TRUNCATE)")
            self.close()
            self._db = None
            for end, was, now in zip(_LOGS, self._places[1:], places[1:], strict=False):
                if self._gone and was == now:
                    Path(f"{self.file}{end}").unlink(missing_ok=True)
        there = is_sqlite(self.file)
        self._db = db = self._open()
        self._head = os.open(self.file, os.O_RDONLY)
        self._places = _places(self.file, self._head)
        if self._gone:
            what = "removed; a new record was created in its place"
            what = "replaced; recording continues in the new file" if there else what
            self.changes += 1
            self.changed = visible(f"{self.file} was {what} ({time_now()})")
            log.error("%s", self.changed)
            self._gone = False
        return db

    def _open(self) -> sqlite3.Connection:
        file = self.file
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
            made = f"{_schema()}; PRAGMA user_version = {_FORMAT}"
            db.executescript(f"BEGIN IMMEDIATE; {made}; COMMIT")
            newest = db.execute("SELECT COALESCE (MAX (id), 0) FROM parts").fetchone()[0]
            if newest < self.last:  # numbers are never reused
                db.execute("DELETE FROM sqlite_sequence WHERE name = 'parts'")
                db.execute("INSERT INTO sqlite_sequence VALUES ('parts', ?)", (self.last,))
            self.last, self._held = max(self.last, newest), None
            for receiver in self._receivers:
                db.execute(_RECEIVER, (receiver, self.last))
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Close the file after the last write; the log is folded into it."""
        with self._lock:
            if self._db is not None:
                self._db.close()
            if self._head >= 0:
                os.close(self._head)
                self._head = -1

    def trouble(self) -> str:
        """Why the record can't be written; empty if it can. After an error it tries again."""
        if self._lock.acquire(timeout=_LOOK_SECONDS):
            try:
                with suppress(OutputError), self._explained():
                    if not self._trouble and os.access(self.file, os.W_OK):
                        self._at_hand()
                    elif self._free() >= self._needed:
                        with self.changing() as db:
                            db.execute(f"PRAGMA user_version = {_FORMAT}")
            finally:
                self._lock.release()
        return self._trouble

    def _free(self) -> int:
        existing = next(folder for folder in self.file.absolute().parents if folder.is_dir())
        return shutil.disk_usage(existing).free

    def send_to(self, receiver: str) -> None:
        """Register a receiver; a new one gets only rows from now on."""
        with self.changing() as db:
            db.execute(_RECEIVER, (receiver, self.last))
            self._receivers.add(receiver)

    def add(self, answers: Sequence[Answer]) -> list[int]:
        """Record results; they are on disk when this returns.

        Returns:
            The number of each part.

        Raises:
            OutputError: the disk is full; nothing was written.
        """
        with self._lock:
            self._needed = sum(len(answer.file) + len(answer.heatmap) for answer in answers)
            with self.changing() as db:
                picture_bytes = self._held
                if picture_bytes is None:
                    picture_bytes = db.execute(_HELD).fetchone()[0]
                self._held = None  # until it is known whether all of it was written
                numbers = []
                for answer in answers:
                    number, size = self._add(db, answer)
                    numbers.append(number)
                    picture_bytes += size
                models = {answer.row.model_id for answer in answers} & self.promises.keys()
                db.executemany(_PROMISE, [(model, self.promises[model]) for model in models])
                picture_bytes = self._make_room(db, picture_bytes)
            self._held, self.last = picture_bytes, numbers[-1]
        return numbers

    def _add(self, db: sqlite3.Connection, answer: Answer) -> tuple[int, int]:
        """Returns the part's number, and the bytes of its picture."""
        row = answer.row
        line = json.dumps(asdict(row), allow_nan=False)
        values = (answer.model, row.model_id, row.time, row.image_sha256, row.status, row.verdict)
        cursor = db.execute(
            "INSERT INTO parts (model, model_id, time, sha256, status, verdict, score, line)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, row.image_score, line),
        )
        number = int(cursor.lastrowid or 0)
        asked = row.verdict != "good"
        drawn = random.Random(number).random()
        if row.status != "ok" or not (asked or drawn < self._keeping.goods):
            return number, 0
        size = len(answer.file) + len(answer.heatmap)
        db.execute(
            "INSERT INTO pictures (part, asked, bytes, file, heatmap) VALUES (?, ?, ?, ?, ?)",
            (number, asked, size, answer.file, answer.heatmap),
        )
        return number, size

    def _make_room(self, db: sqlite3.Connection, held: int) -> int:
        """Delete the oldest pictures until the others fit; returns the bytes of these."""
        while held > self._keeping.megabytes * 1_000_000:
            oldest = "SELECT part, bytes FROM pictures ORDER BY asked, part LIMIT 1"
            part, size = db.execute(oldest).fetchone()
            db.execute("DELETE FROM pictures WHERE part = ?", (part,))
            held -= size
        return held

    def add_feedback(
        self,
        verdict: str,
        *,
        who: str,
        part: int | None = None,
        sha256: str = "",
        defect_type: str = "",
        note: str = "",
    ) -> int | None:
        """Record a person's judgement of a part.

        Args:
            verdict: `good` or `defect`; empty to withdraw this person's last judgement.
            who: name of the person.
            part: its number; None takes the newest one of this image, if there is any.
            sha256: of the image; taken from the part where there is one.
            defect_type: kind of defect.
            note: free text.

        Returns:
            The part's number; None for an image that was never scored here.

        Raises:
            DataError: there is no such part, its image couldn't be read, or this person has no
                judgement to withdraw.
            OutputError: the disk is full.
        """
        with self.changing() as db:
            if part is not None:
                sha256 = self.check_part(part)
            else:
                newest = "SELECT MAX (id) FROM parts WHERE sha256 = ?"
                part = db.execute(newest, (sha256,)).fetchone()[0]
            own = f"SELECT 1 FROM feedback WHERE sha256 = ? AND who = ? AND {_COUNTS}"
            if not (verdict or db.execute(own, (sha256, who)).fetchone()):
                name = who or "someone without a name"
                raise DataError(f"no judgement by {name} to take back; nothing was recorded")
            db.execute(
                "INSERT INTO feedback (part, sha256, who, verdict, defect_type, note, time)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (part, sha256, who, verdict, defect_type, note, time_now()),
            )
        return part

    def check_part(self, number: int) -> str:
        """The sha256 of a part's image. Raises DataError without a readable image."""
        parts = self.read("SELECT sha256, status FROM parts WHERE id = ?", (number,))
        if not parts or parts[0][1] != "ok":
            what = "has no image that could be read" if parts else "doesn't exist"
            raise DataError(f"part {number} {what}; nothing was recorded")
        return str(parts[0][0])

    def parts(
        self, before: int | None = None, verdict: str = "", limit: int = 60, model: str = ""
    ) -> list[dict[str, Any]]:
        """The newest parts, the newest first.

        Args:
            before: only those with a lower number.
            verdict: only those with this verdict; empty for all.
            limit: largest number of parts.
            model: only those of this model; empty for all.

        Returns:
            Rows as of results.jsonl, with `id`, `model`, whether its picture is kept (`picture`),
            and the image's last judgement (`feedback`).
        """
        wanted = {"parts.id < ?": before, "parts.verdict = ?": verdict, "parts.model = ?": model}
        conditions = {condition: value for condition, value in wanted.items() if value}
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        rows = self.read(
            f"{_PARTS} {where}ORDER BY parts.id DESC LIMIT ?", (*conditions.values(), limit)
        )
        return [_part(*row) for row in rows]

    def part(self, number: int) -> dict[str, Any] | None:
        """One part, as in `parts`; None if there is none of this number."""
        rows = self.read(f"{_PARTS} WHERE parts.id = ?", (number,))
        return _part(*rows[0]) if rows else None

    def picture(self, number: int, kind: Literal["file", "heatmap"]) -> bytes | None:
        """A part's image file or small heatmap; None if it isn't kept."""
        rows = self.read(f"SELECT {kind} FROM pictures WHERE part = ?", (number,))
        return (rows[0][0] or None) if rows else None

    def counts(self, since: str, model: str = "") -> dict[str, int]:
        """Number of parts since a time (ISO 8601, UTC), by verdict, or by status without one.

        Args:
            since: the time.
            model: only its parts; empty for all.
        """
        rows = self.read(
            "SELECT CASE WHEN status = 'ok' THEN verdict ELSE status END AS outcome, COUNT (*)"
            " FROM parts WHERE time >= ? AND ? IN (model, '') GROUP BY outcome",
            (since, model),
        )
        return {outcome or "no verdict": count for outcome, count in rows}

    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of a query, read beside what is being written; see `open_to_read`."""
        with open_to_read(self.file) as db:
            return db.execute(query, values).fetchall()

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is written at its end, or nothing on an error."""
        with self._lock, self._explained():
            db = self._at_hand()
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            if _places(self.file, self._head) != self._places:
                raise OutputError(f"{self.file} was removed or replaced while it was written to")
            if self._trouble:
                log.warning("%s can be written again", self.file)
            self._trouble = ""

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """The error of a failed write, remembered until a write succeeds."""
        try:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                raise OutputError(f"{self.file} can't be used as a record: {_why(error)}") from None
        except OutputError as error:
            reason = visible(str(error))
            if self._places and not self._trouble:  # at the start the caller reports it
                log.error("%s", reason)
            self._trouble = reason
            raise OutputError(reason) from None


class Recorder:
    """Records results in a thread, all waiting ones in one transaction.

    Use it in a `with` statement, which writes the waiting ones at its end.

    Args:
        record: the record.
        written: called with each part that was written, in order; an exception that it raises is
            logged.
    """

    def __init__(self, record: Record, written: Callable[[int, Answer], object]) -> None:
        self.record = record
        self._written = written
        self._waiting: queue.SimpleQueue[tuple[Answer, _Then] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="record", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def put(self, answer: Answer, then: _Then) -> None:
        """Queue a result for the record.

        Args:
            answer: the result.
            then: called with the part's number or the error; an exception that it raises is logged.
        """
        self._waiting.put((answer, then))

    def _work(self) -> None:
        going = True
        while going:
            items = [self._waiting.get()]
            while items[-1] is not None and len(items) < _MOST_AT_ONCE:
                try:
                    items.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            going = items[-1] is not None
            self._write([item for item in items if item is not None])

    def _write(self, items: Sequence[tuple[Answer, _Then]]) -> None:
        if not items:
            return
        numbers: Sequence[int | OutputError]
        try:
            numbers = self.record.add([answer for answer, _ in items])
        except Exception as error:
            reason = str(error)
            if not isinstance(
                error, OutputError
            ):  # an error in this program mustn't end this thread
                log.exception("recording results failed")
                reason = f"recording failed: {type(error).__name__}"
            failed = OutputError(
                f"the part couldn't be recorded, so it has no verdict ({reason}); send it again"
            )
            numbers = [failed] * len(items)
        for (answer, then), number in zip(items, numbers, strict=True):
            if isinstance(number, int):
                _call(self._written, number, answer)
            _call(then, number)


def _call(callback: Callable[..., object], *arguments: object) -> None:
    """Call a callback; its errors are logged, so that the next parts are still recorded."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("passing a result on failed")


@contextmanager
def open_to_read(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a record to read. It needn't be writable; others may be writing to it.

    Each value is of its column's type. `line` in `parts` is a `Row` as a dictionary.

    Raises:
        DataError: the file can't be read, isn't a record, was copied without its log, or holds
            what `serve` doesn't write.
    """
    place = file.resolve()
    logged = any(Path(f"{place}{end}").exists() for end in _LOGS)
    writable = os.access(place.parent, os.W_OK)
    # Without `immutable` SQLite makes logs beside a record, which a read-only folder refuses.
    how = "mode=ro" if logged or writable else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{place.as_uri()}?{how}", uri=True)) as db:
            if foreign := _foreign(db):
                raise DataError(f"{file} {foreign}; give a record of serve")
            if not db.execute(_STATE).fetchone()[1]:
                raise DataError(
                    f"{file} holds no parts: while serve runs they may be in {file.name}-wal. Copy "
                    'a record with sqlite3 ORIGINAL ".backup COPY", or stop serve first'
                )
            db.row_factory = partial(_checked, file)
            yield db
    except sqlite3.Error as error:
        fault = f"{file} can't be read as a record of serve: {_why(error)}"
        if logged and not writable:
            fault += f"; copy it and {file.name}-wal into a folder that you can write to"
        raise DataError(fault) from None


def _foreign(db: sqlite3.Connection) -> str:
    """Who else has written a database, for a message; empty for a record or an empty file."""
    version, tables = db.execute(_STATE).fetchone()
    if version not in (0, _FORMAT):
        return "was written by another version of this program"
    # No views, which may have no end, and no triggers.
    known = _own_tables().issuperset(db.execute(_TABLES))
    return "" if known and (version or not tables) else "is a database of another program"


@cache
def _own_tables() -> frozenset[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_schema())
        return frozenset(db.execute(_TABLES))


def _schema() -> str:
    return files("anomaly.line").joinpath("assets", "record.sql").read_text("utf-8")


def _checked(file: Path, cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row of a query; SQLite keeps values of any type in any column."""
    values = list(row)
    for i, (name, *_) in enumerate(cursor.description):
        kind = _KINDS.get(name, (str, int, float))
        if not isinstance(values[i], kind) and values[i] is not None:
            raise strange(file, name)
        if name == "line":
            values[i] = _row(file, values[i])
    return tuple(values)


def _row(file: Path, line: str) -> dict[str, Any]:
    """The values of a `Row` as JSON; blank in place of values of other types."""
    try:
        row = dict(from_json(line))
    except (TypeError, ValueError):
        raise strange(file, "line") from None
    return {
        name: row[name] if isinstance(row.get(name), kind) else blank
        for name, (kind, blank) in _FIELDS.items()
    }


def strange(file: Path, what: str) -> DataError:
    """The error to raise for a value that `serve` doesn't write."""
    return DataError(f"{file} holds a {what} that serve doesn't write; give another record")


def _places(file: Path, head: int) -> tuple[object, ...]:
    """Places of the record's three files on the disk; None for a missing one.

    The file's first bytes are read through a descriptor that stays open: to close one would drop
    SQLite's own locks of this process, and another that reads would take the logs away.
    """
    places: list[object] = []
    for end in ("", *_LOGS):
        try:
            found = Path(f"{file}{end}").stat()
            places.append((found.st_dev, found.st_ino))
        except OSError:
            places.append(None)
    return (*places, head < 0 or os.pread(head, len(_SQLITE), 0) == _SQLITE)


def is_sqlite(file: Path) -> bool:
    """Whether a file is an SQLite file."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it can't be reached"
    known: Mapping[str, str] = {
        "SQLITE_FULL": "the disk is full",
        "SQLITE_BUSY": "another process is writing to it",
        "SQLITE_READONLY": "it may not be written to",
        "SQLITE_CANTOPEN": "it can't be opened",
        "SQLITE_NOTADB": "it is no SQLite file",
        "SQLITE_CORRUPT": "it is damaged",
    }
    code = str(getattr(error, "sqlite_errorname", ""))
    return next(
        (text for name, text in known.items() if code.startswith(name)), "SQLite reports an error"
    )


def _part(
    number: int, model: str, row: dict[str, Any], picture: int, verdict: str | None, *more: str
) -> dict[str, Any]:
    feedback = None
    if verdict:
        feedback = dict(
            zip(("verdict", "defect_type", "note", "who"), (verdict, *more), strict=True)
        )
    more_values = {"id": number, "model": model, "picture": bool(picture), "feedback": feedback}
    return row | more_values


def time_now() -> str:
    """The current time, in the record's format."""
    return _in_milliseconds(datetime.now(UTC))


def in_utc(given: str) -> str:
    """Convert a time in ISO 8601 to UTC; without a zone it is UTC already.

    Raises:
        ValueError: it isn't a time.
    """
    moment = datetime.fromisoformat(given)
    try:
        return _in_milliseconds(moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC))
    except OverflowError:
        raise ValueError(given) from None


def _in_milliseconds(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
