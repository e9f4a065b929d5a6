"""What was said of each part, and what people say of it: an SQLite file that survives being killed.

    parts      one row for each answer, in the order of answers; never changed
    pictures   the file and a small heatmap of some of them, the oldest of which go when they
               take too much room
    feedback   what people say; a trigger refuses changes
    triggers   one row for each part of a station, which several pictures may show
    outboxes   the last part that each receiver has confirmed
    acknowledgements   who has seen which alarm, when, and when it was over

Write-ahead log, each batch of answers in one transaction: what `add` has returned for is there
after the process was killed. A file that is removed or replaced meanwhile is noticed: SQLite would
go on writing to one that has no name any more. Imports no torch.
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
from importlib.resources import files
from pathlib import Path
from typing import Any

from anomaly.errors import DataError, OutputError, visible
from anomaly.inference.rows import Row

log = logging.getLogger(__name__)

_SQLITE = b"SQLite format 3\x00"  # the first bytes of each of its files
_LOGS = ("-wal", "-shm")  # what their names end in beside the file
_FORMAT = 1
_MOST_AT_ONCE = 64  # answers in one transaction
_LOOK_SECONDS = 0.2  # that a look at the record waits for whoever is writing
# Takes a part's number, or what was in the way.
_Then = Callable[[int | OutputError], object]
_STATE = "SELECT user_version, EXISTS (SELECT 1 FROM sqlite_schema) FROM pragma_user_version"
_HELD = "SELECT COALESCE (SUM (bytes), 0) FROM pictures"
_RECEIVER = """
INSERT OR IGNORE INTO outboxes SELECT ?, MAX (COALESCE (MAX (id), 0), ?), 0 FROM {}
"""
# Of each part what was said last. Rows are ordered by the newest part first.
_PARTS = """
SELECT parts.id, parts.model, parts.line, pictures.part IS NOT NULL,
       feedback.verdict, feedback.defect_type, feedback.note, feedback.who
FROM parts LEFT JOIN pictures ON pictures.part = parts.id
LEFT JOIN feedback ON feedback.id = (SELECT MAX (id) FROM feedback WHERE part = parts.id)
"""


@dataclass(frozen=True)
class Answer:
    """What was said of one part.

    Attributes:
        model: the model's name in the service.
        row: what was answered.
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
        megabytes: of all pictures together; then the oldest go, good parts' first.
    """

    goods: float = 0.02
    megabytes: int = 2000


class Record:
    """The file. Threads may share it.

    One that is removed while it is in use is begun anew in the same place, and one that is put in
    its place is gone on with; the numbers of parts go on from the last one.

    Args:
        file: made if need be.
        keeping: which pictures are kept.

    Attributes:
        last: number of the newest part.
        changes: how often the file was another one than before.
        changed: what was last seen of that, for people; empty while there was none.

    Raises:
        OutputError: it can't be written, or is something else.
    """

    def __init__(self, file: Path, keeping: Keeping | None = None) -> None:
        self.file = file
        self.changes, self.changed = 0, ""
        self._keeping = keeping or Keeping()
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._places: tuple[object, ...] = ()
        self._head = -1  # a descriptor of the file
        self._gone = False
        self._receivers: dict[str, str] = {}  # the table of rows that each takes
        self.last = 0
        self._held: int | None = None  # bytes of pictures; None until they are counted
        self._needed = 0  # bytes that were to be written last
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
                        f"{self.file} was written over by something else; move it away, and the "
                        "record is begun anew"
                    )
                Path(os.path.realpath(self.file)).unlink()  # cut off: nothing is left in it
                self._gone = True
            # What it has written goes into the file that it was, wherever that is. A log that
            # stayed would be taken for the next file's.
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
            what = "removed; it is begun anew in the same place"
            what = "replaced; it goes on in the file that is there" if there else what
            self.changes += 1
            self.changed = visible(f"{self.file} was {what} ({time_now()})")
            log.error("%s", self.changed)
            self._gone = False
        return db

    def _open(self) -> sqlite3.Connection:
        file = self.file
        file.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        try:
            db.execute("PRAGMA busy_timeout = 5000")
            version, tables = db.execute(_STATE).fetchone()
            if version not in (0, _FORMAT):
                raise OutputError(
                    f"{file} was written by another version of this program; give another --record"
                )
            if tables and not version:
                raise OutputError(f"{file} is a database of another program; give another --record")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            schema = files("anomaly.line").joinpath("assets", "record.sql")
            made = f"{schema.read_text('utf-8')}; PRAGMA user_version = {_FORMAT}"
            db.executescript(f"BEGIN IMMEDIATE; {made}; COMMIT")
            newest = db.execute("SELECT COALESCE (MAX (id), 0) FROM parts").fetchone()[0]
            if newest < self.last:  # a number is given once
                db.execute("DELETE FROM sqlite_sequence WHERE name = 'parts'")
                db.execute("INSERT INTO sqlite_sequence VALUES ('parts', ?)", (self.last,))
            self.last, self._held = max(self.last, newest), None
            for receiver, table in self._receivers.items():
                db.execute(_RECEIVER.format(table), (receiver, self.last * (table == "parts")))
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Once nothing more is written; the log is folded into the file."""
        with self._lock:
            if self._db is not None:
                self._db.close()
            if self._head >= 0:
                os.close(self._head)
                self._head = -1

    def trouble(self) -> str:
        """Why nothing can be written down; empty while it can be. After trouble it is tried."""
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
        there = next(one for one in self.file.absolute().parents if one.is_dir())
        return shutil.disk_usage(there).free

    def send_to(self, receiver: str, table: str = "parts") -> None:
        """Remember which rows a receiver has: none of those that are there when it is new."""
        with self.changing() as db:
            db.execute(_RECEIVER.format(table), (receiver, self.last * (table == "parts")))
            self._receivers[receiver] = table

    def add(self, answers: Sequence[Answer]) -> list[int]:
        """Write answers down; they are kept when this returns.

        Returns:
            The number of each part.

        Raises:
            OutputError: no room; none of them is written.
        """
        with self._lock:
            self._needed = sum(len(answer.file) + len(answer.heatmap) for answer in answers)
            with self.changing() as db:
                held = db.execute(_HELD).fetchone()[0] if self._held is None else self._held
                self._held = None  # until it is known whether all of it was written
                numbers = []
                for answer in answers:
                    number, size = self._add(db, answer)
                    numbers.append(number)
                    held += size
                held = self._make_room(db, held)
            self._held, self.last = held, numbers[-1]
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
        """Delete pictures until those that are left fit; returns what they take."""
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
        """Write down what a person says of a part.

        Args:
            verdict: `good` or `defect`.
            who: says so.
            part: its number; None takes the newest one of this image, if there is any.
            sha256: of the image; taken from the part where there is one.
            defect_type: what is wrong with it.
            note: anything.

        Returns:
            The part's number; None for an image that was never scored here.

        Raises:
            DataError: there is no such part, or it couldn't be read: nobody can have seen it.
            OutputError: no room.
        """
        with self.changing() as db:
            if part is not None:
                sha256 = self.check_part(part)
            else:
                newest = "SELECT MAX (id) FROM parts WHERE sha256 = ?"
                part = db.execute(newest, (sha256,)).fetchone()[0]
            db.execute(
                "INSERT INTO feedback (part, sha256, who, verdict, defect_type, note, time)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (part, sha256, who, verdict, defect_type, note, time_now()),
            )
        return part

    def check_part(self, number: int) -> str:
        """The sha256 of a part's image; a DataError where nobody can have seen it."""
        parts = self.read("SELECT sha256, status FROM parts WHERE id = ?", (number,))
        if not parts or parts[0][1] != "ok":
            what = "has no image that could be read" if parts else "doesn't exist"
            raise DataError(f"part {number} {what}; nothing is noted")
        return str(parts[0][0])

    def parts(
        self, before: int | None = None, verdict: str = "", limit: int = 60, model: str = ""
    ) -> list[dict[str, Any]]:
        """The newest parts, the newest first.

        Args:
            before: only those with a lower number.
            verdict: only those with this verdict; empty for all.
            limit: so many at most.
            model: only those of this model; empty for all.

        Returns:
            Rows as of results.jsonl, with `id`, `model`, whether its picture is kept (`picture`),
            and what a person said last (`feedback`).
        """
        wanted = {"parts.id < ?": before, "parts.verdict = ?": verdict, "parts.model = ?": model}
        conditions = {condition: value for condition, value in wanted.items() if value}
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        rows = self.read(
            f"{_PARTS} {where}ORDER BY parts.id DESC LIMIT ?", (*conditions.values(), limit)
        )
        return [_part(*row) for row in rows]

    def part(self, number: int) -> dict[str, Any] | None:
        """One part, as `parts` gives it; None where there is none of this number."""
        rows = self.read(f"{_PARTS} WHERE parts.id = ?", (number,))
        return _part(*rows[0]) if rows else None

    def heatmap(self, number: int) -> bytes | None:
        """A part's small heatmap; None where it wasn't kept."""
        rows = self.read("SELECT heatmap FROM pictures WHERE part = ?", (number,))
        return (rows[0][0] or None) if rows else None

    def picture_file(self, number: int) -> bytes | None:
        """A part's image file; None where it wasn't kept."""
        rows = self.read("SELECT file FROM pictures WHERE part = ?", (number,))
        return rows[0][0] if rows else None

    def counts(self, since: str, model: str = "") -> dict[str, int]:
        """How many parts there were since a time (ISO 8601, UTC), by verdict; else by status.

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

    def feedback(self) -> Iterator[dict[str, Any]]:
        """All that people have said, in order."""
        names = ("part", "sha256", "who", "verdict", "defect_type", "note", "time")
        for row in self.read(f"SELECT {', '.join(names)} FROM feedback ORDER BY id", ()):
            yield dict(zip(names, row, strict=True))

    def read(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows that a query finds."""
        with self._lock, self._explained():
            return self._at_hand().execute(query, values).fetchall()

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
        """What is in the way, as an error for people, remembered until something is written."""
        try:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                raise OutputError(f"{self.file} can't be used as a record: {_why(error)}") from None
        except OutputError as error:
            reason = visible(str(error))
            if self._places and not self._trouble:  # at the start the caller says so
                log.error("%s", reason)
            self._trouble = reason
            raise OutputError(reason) from None


class Recorder:
    """Writes answers down in a thread of its own, all that wait in one transaction.

    Used in a `with` statement, which writes what is left.

    Args:
        record: where to.
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
        """Have an answer written down.

        Args:
            answer: what was said.
            then: called with the part's number, or with what was in the way; an exception that it
                raises is logged.
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
            if not isinstance(error, OutputError):  # a mistake of ours mustn't end this thread
                log.exception("writing answers down failed")
                reason = f"writing it down failed: {type(error).__name__}"
            failed = OutputError(
                f"the part isn't on record, so no verdict is given ({reason}); send it again"
            )
            numbers = [failed] * len(items)
        for (answer, then), number in zip(items, numbers, strict=True):
            if isinstance(number, int):
                _call(self._written, number, answer)
            _call(then, number)


def _call(callback: Callable[..., object], *arguments: object) -> None:
    """Call back; a mistake there mustn't keep the next parts from being written down."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("handing an answer on failed")


@contextmanager
def open_to_read(file: Path) -> Iterator[sqlite3.Connection]:
    """A record that somebody else may be writing to.

    Raises:
        DataError: it can't be read, or is something else.
    """
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as db:
            yield db
    except sqlite3.Error:
        raise DataError(f"{file} can't be read as a record of serve") from None


def _places(file: Path, head: int) -> tuple[object, ...]:
    """Where the record's three files are on the disk, None for one that isn't there.

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
    """Whether a file begins as those of SQLite do."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it can't be reached"
    known: Mapping[str, str] = {
        "SQLITE_FULL": "there is no room left on the disk",
        "SQLITE_BUSY": "another process is writing to it",
        "SQLITE_READONLY": "it may not be written to",
        "SQLITE_CANTOPEN": "it can't be opened or made there",
        "SQLITE_NOTADB": "it is no SQLite file",
        "SQLITE_CORRUPT": "it is damaged",
    }
    code = str(getattr(error, "sqlite_errorname", ""))
    return next((text for name, text in known.items() if code.startswith(name)), "SQLite fails")


def _part(
    number: int, model: str, line: str, picture: int, verdict: str | None, *more: str
) -> dict[str, Any]:
    feedback = None
    if verdict is not None:
        feedback = dict(
            zip(("verdict", "defect_type", "note", "who"), (verdict, *more), strict=True)
        )
    row = {**json.loads(line), "id": number, "model": model, "picture": bool(picture)}
    return {**row, "feedback": feedback}


def time_now() -> str:
    """The time now, as the record has it."""
    return _in_milliseconds(datetime.now(UTC))


def in_utc(given: str) -> str:
    """A time that somebody has given in ISO 8601; in UTC where it names no zone.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.fromisoformat(given)
    try:
        return _in_milliseconds(moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC))
    except OverflowError:
        raise ValueError(given) from None


def _in_milliseconds(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
