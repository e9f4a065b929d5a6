"""The rows of a record, sent on to a receiver: each at least once, in order, whatever happens.

The record itself is the outbox: what is noted is the last part that the receiver has confirmed. A
receiver that can't be reached gets everything once it is back, after a restart, too; one that
confirms a part just before this process is killed gets that part again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque

from anomaly.errors import OutputError
from anomaly.service.record import Record
from anomaly.service.sinks import NotTakenError, Sink

log = logging.getLogger(__name__)

_UNSENT = """
SELECT id, model, line FROM parts
WHERE id > (SELECT sent FROM outboxes WHERE sink = ?) ORDER BY id LIMIT ?
"""
_AT_ONCE = 100  # rows that are looked up together
_TRIES = 5  # for a row that the receiver won't take
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 60.0  # between tries; each pause is twice the one before
_LOOK_SECONDS = 5.0  # after which rows are looked for that nobody has told of
_LAST_SECONDS = 1.0  # for what is left when the service ends


class Outbox:
    """Sends rows on, in a thread of its own. Used in a `with` statement.

    Args:
        record: where the rows are; those from now on are sent, or from where the last process of
            this record has stopped.
        sink: the receiver.
    """

    def __init__(self, record: Record, sink: Sink) -> None:
        self._record, self._sink = record, sink
        self._due: deque[tuple[int, str, str]] = deque()
        self._failed = 0  # tries since the receiver has last taken a row
        self._refused = 0  # of them those at which it has refused the row itself
        self._news, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"send {sink.shown}", daemon=True)

    @property
    def name(self) -> str:
        """What messages call the receiver."""
        return self._sink.shown

    def __enter__(self) -> Outbox:
        newest = "SELECT ?, COALESCE (MAX (id), 0), 0 FROM parts"
        with self._record.changing() as db:
            db.execute(f"INSERT OR IGNORE INTO outboxes {newest}", (self._sink.name,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._news.set()
        self._thread.join(_LAST_SECONDS)

    def wake(self) -> None:
        """There are new rows."""
        self._news.set()

    def state(self) -> tuple[int, int]:
        """Rows that wait to be sent, and those that the receiver has refused for good."""
        waiting = "(SELECT COALESCE (MAX (id), 0) FROM parts) - sent"
        query = f"SELECT {waiting}, refused FROM outboxes WHERE sink = ?"
        ((unsent, refused),) = self._record.read(query, (self._sink.name,))
        return unsent, refused

    def _work(self) -> None:
        while True:
            try:
                pause = self._send_next()
            except OutputError as error:  # the record is in trouble, or closed
                if not self._closing.is_set():
                    log.error("nothing is sent to %s: %s", self._sink.shown, error)
                pause = _LOOK_SECONDS
            except Exception as error:  # a mistake of ours; its text may hold what is secret
                log.error("sending to %s failed: %s", self._sink.shown, type(error).__name__)
                pause = _LOOK_SECONDS
            if pause and self._closing.is_set():
                self._sink.close()
                return
            if not self._due:
                self._news.wait(pause)
            elif pause:
                self._closing.wait(pause)
            self._news.clear()

    def _send_next(self) -> float:
        """Send one row.

        Returns:
            Seconds to wait before the next one.
        """
        if not self._due:
            self._due.extend(self._record.read(_UNSENT, (self._sink.name, _AT_ONCE)))
        if not self._due:
            return _LOOK_SECONDS
        number, model, line = self._due[0]
        row = json.loads(line)
        message = json.dumps({**row, "id": number, "model": model})
        try:
            self._sink.send(message.encode(), f"{number}@{row['time']}")
        except NotTakenError as error:
            self._failed += 1
            self._refused += error.for_good
            if self._refused < _TRIES:
                if self._failed == 1:
                    log.warning("%s takes no part: %s; trying again", self._sink.shown, error)
                return min(_FIRST_SECONDS * 2.0 ** min(self._failed - 1, 20), _LONGEST_SECONDS)
            log.error("%s won't take part %d: %s; it is left out", self._sink.shown, number, error)
            self._done(number, refused=True)
        else:
            if self._failed:
                log.warning("%s takes parts again", self._sink.shown)
            self._done(number)
        self._failed = self._refused = 0
        self._due.popleft()
        return 0.0

    def _done(self, number: int, *, refused: bool = False) -> None:
        change = "UPDATE outboxes SET sent = ?, refused = refused + ? WHERE sink = ?"
        with self._record.changing() as db:
            db.execute(change, (number, refused, self._sink.name))
