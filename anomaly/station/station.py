"""Parts on their way: triggered → taken → judged → sent, or late, or lost."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from anomaly.errors import OutputError
from anomaly.inference.rows import Row, judge_parts
from anomaly.line.engine import BusyError, PictureRequest, Scored
from anomaly.line.record import Record
from anomaly.line.sinks import Outbox
from anomaly.line.slot import ModelSlot
from anomaly.station.cameras import CameraError, CameraThread, Picture, open_camera
from anomaly.station.plc import CODES, Plc
from anomaly.station.settings import StationSettings

log = logging.getLogger(__name__)

_FINAL = ("sent", "late", "lost")
_GRACE = 0.2  # share of the time for a part in which a late verdict is still written to the PLC
_STUCK_SECONDS = 5.0  # beyond the time for two parts; then the heartbeat stops
_COUNTER = "SELECT counter FROM triggers WHERE counter NOT NULL ORDER BY id DESC LIMIT 1"
_LAST = f"SELECT COALESCE (MAX (id), 0), ({_COUNTER}) FROM triggers"
_UNFINISHED = "SELECT id, time, counter, verdict FROM triggers WHERE line = '' ORDER BY id"
_WRITE = "INSERT OR REPLACE INTO triggers VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(eq=False)
class Part:
    """One part; its fields up to `views` are in the record."""

    number: int
    deadline: float = 0.0  # by `time.perf_counter`
    counter: int | None = None  # the PLC's
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    begun: float = field(default_factory=time.perf_counter)
    state: str = "triggered"
    verdict: str = ""
    sent: int | None = None  # the code that the PLC has confirmed
    reason: str = ""
    score: float | None = None
    milliseconds: float = 0.0
    views: dict[str, Row | str] = field(
        default_factory=dict
    )  # by camera: the row, or why there is none
    complete: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def summary(self) -> dict[str, Any]:
        """The row for receivers."""
        names = ("counter", "state", "verdict", "sent", "reason", "score", "milliseconds")
        rows = [(camera, row) for camera, row in self.views.items() if isinstance(row, Row)]
        views = [
            {"camera": camera, "path": row.path, "verdict": row.verdict, "score": row.image_score}
            for camera, row in rows
        ]
        values = {name: getattr(self, name) for name in names}
        return {"id": self.number, "time": self.when, **values, "views": views}


class Station:
    """The threads of a line, from trigger to verdict.

    Args:
        settings: of the station.
        record: of all parts.
        slots: the model of each camera.
        outboxes: of the receivers.
    """

    def __init__(
        self,
        settings: StationSettings,
        record: Record,
        slots: Mapping[str, ModelSlot],
        outboxes: Sequence[Outbox] = (),
    ) -> None:
        self.settings, self._record, self._slots = settings, record, slots
        self._outboxes, self._turn = outboxes, time.monotonic()
        self.plc: Plc | None = None
        if settings.plc is not None:
            self.plc = Plc(settings.plc, lambda: not self.trouble(), self._is_alive)
        self.cameras = {
            name: CameraThread(name, partial(open_camera, camera.source, camera.features))
            for name, camera in settings.cameras.items()
        }
        self._line: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self.parts: Counter[str] = Counter()  # by state, since the start
        self.closing, self.failed = threading.Event(), False
        self._threads: list[threading.Thread] = []

    def check(self) -> None:
        """Connect the PLC, take a picture with each camera, and read the record.

        Raises:
            AnomalyError: one of them doesn't work.
        """
        if self.plc is not None:
            self.plc.connect()
        self._first = {name: camera.first() for name, camera in self.cameras.items()}
        self._number, self.counter = self._record.read(_LAST, ())[0]

    def start(self, triggers: Sequence[Callable[[], None]]) -> None:
        """Start; first finishes a part that was in progress when the last process ended.

        Args:
            triggers: work of the threads that trigger parts.
        """
        for name, (data, _) in self._first.items():  # so that the first part isn't late
            self._slots[name].submit(data, f"start/{name}", PictureRequest(recorded=False)).result()
        self._settle()
        work = [self._deliver, *(camera.work for camera in self.cameras.values())]
        work += [] if self.plc is None else [partial(self.plc.work, self.closing)]
        for call in (*work, *triggers):
            self._threads.append(threading.Thread(target=self._guard, args=(call,), daemon=True))
            self._threads[-1].start()
        del self._threads[len(work) :]  # those of triggers may wait for a line of text

    def _settle(self) -> None:
        code, number = self.plc.last() if self.plc else (0, 0)
        for last, when, counter, verdict in self._record.read(_UNFINISHED, ()):
            part = Part(last, counter=counter, when=when, verdict=verdict)
            confirmed = self.plc is not None and number == last
            part.sent = code if confirmed else None
            part.reason = "the station ended before its verdict was confirmed"
            self._write(part, "sent" if confirmed and CODES.get(verdict) == code else "lost")
        self._number = max(self._number, number)

    def _guard(self, call: Callable[[], None]) -> None:
        """Stop the station on an error in a thread; a supervisor restarts it."""
        try:
            call()
        except Exception:
            log.exception("the station stops because one of its threads has failed")
            self.failed = True
            self.closing.set()

    def close(self) -> None:
        """Accept no more parts, and finish those in progress."""
        self.closing.set()
        self._line.put(None)
        for camera in self.cameras.values():
            camera.wanted.put(None)
        for thread in self._threads:
            thread.join()
        if self.plc is not None:
            self.plc.close()

    def trigger(self, begun: float | None = None, counter: int | None = None) -> Part:
        """Accept a part: it is recorded before its picture is taken.

        Args:
            begun: earliest time of its arrival, by `time.perf_counter`; default: now.
            counter: the PLC's count.
        """
        now = time.perf_counter()
        with self._lock:
            self._number += 1
            deadline = (now if begun is None else begun) + self.settings.part_seconds
            part = Part(self._number, deadline, counter)
            trouble = self._write(part, "triggered")
            self._line.put(part)
        trouble = "it came while the trigger wasn't read" if now > deadline else trouble
        for name, camera in self.cameras.items():
            if trouble:
                self._view(part, name, trouble)
            else:
                camera.wanted.put((deadline, partial(self._taken, part, name)))
        return part

    def _taken(self, part: Part, camera: str, picture: Picture | CameraError) -> None:
        try:
            if isinstance(picture, CameraError):
                raise picture
            name = f"{part.number}/{camera}/{picture[1]}".removesuffix("/")
            scored = self._slots[camera].submit(picture[0], name, PictureRequest())
        except (CameraError, BusyError) as error:
            self._view(part, camera, str(error))
        else:
            self._write(part, "taken")
            scored.add_done_callback(partial(self._scored, part, camera))

    def _scored(self, part: Part, camera: str, scored: Future[Scored]) -> None:
        error = scored.exception()
        self._view(part, camera, scored.result().answer.row if error is None else str(error))

    def _view(self, part: Part, camera: str, view: Row | str) -> None:
        with self._lock:
            part.views[camera] = view
            rejected = isinstance(view, Row) and view.verdict == "reject"
            if rejected or len(part.views) == len(self.cameras):
                part.complete.set()

    def _deliver(self) -> None:
        """Finish parts in their order, each at its deadline at the latest."""
        reason = ""
        while (part := self._line.get()) is not None:
            self._turn = time.monotonic()
            part.complete.wait(max(0.0, part.deadline - time.perf_counter()))
            state = self._delivered(part)
            part.milliseconds = round(1000 * (time.perf_counter() - part.begun), 1)
            self._write(part, state)
            self.parts[state] += 1
            if (
                state != "sent" and part.reason != reason
            ):  # only the first of many with the same reason
                log.warning("part %d is %s: %s", part.number, state, part.reason)
            reason = "" if state == "sent" else part.reason
            for outbox in self._outboxes:
                outbox.wake()
            part.done.set()

    def _delivered(self, part: Part) -> str:
        """Judge a part and write its verdict to the PLC; returns its state."""
        state = "lost" if part.complete.is_set() else "late"
        self._judge(part)
        verdict = part.verdict or self.settings.without_verdict
        if part.verdict:
            state = "sent"
            self._write(part, "judged")
        if time.perf_counter() > part.deadline + _GRACE * self.settings.part_seconds:
            return "lost" if state == "lost" else "late"
        if self.plc is not None and verdict in CODES:
            if unsent := self.plc.say(CODES[verdict], part.number, part.deadline):
                part.reason = unsent
                return "lost"
            part.sent = CODES[verdict]
        in_time = state != "sent" or time.perf_counter() <= part.deadline
        return state if in_time else "late"

    def _judge(self, part: Part) -> None:
        """Set the verdict from all pictures; one rejected picture rejects the part."""
        with self._lock:
            views = {name: part.views[name] for name in self.cameras if name in part.views}
        rows = [view for view in views.values() if isinstance(view, Row)]
        judged = judge_parts(rows, {row.path: "" for row in rows})
        if judged and (judged[0].verdict == "reject" or len(rows) == len(self.cameras)):
            part.verdict, part.reason = judged[0].verdict, judged[0].reason
            part.score = judged[0].image_score
        else:
            reasons = [f"{name}: {view}" for name, view in views.items() if isinstance(view, str)]
            part.reason = "; ".join(reasons) or "no verdict in time"

    def _write(self, part: Part, state: str) -> str:
        """Set and record a part's state; returns why it can't be recorded, else ""."""
        with self._lock:
            if part.state in _FINAL:  # a picture that came too late
                return ""
            part.state = state
            line = json.dumps(part.summary()) if state in _FINAL else ""
            models = ", ".join({slot.name: None for slot in self._slots.values()})
            row = (part.number, part.when, part.counter, state, part.verdict, part.sent, models)
            try:
                with self._record.changing() as db:
                    db.execute(_WRITE, (*row, line))
            except OutputError as error:
                log.error("part %d isn't recorded: %s", part.number, error)
                return str(error)
        return ""

    def _is_alive(self) -> bool:
        waits = time.monotonic() - self._turn > _STUCK_SECONDS + 2 * self.settings.part_seconds
        return self._line.empty() or not waits

    def trouble(self) -> str:
        """Why parts have no verdicts now; empty if they have."""
        reasons = [slot.unusable for slot in self._slots.values()]
        reasons += [f"camera {c.name}: {c.trouble}" for c in self.cameras.values() if c.trouble]
        reasons += [
            self._record.trouble(),
            "the station is stopping" if self.closing.is_set() else "",
        ]
        return "; ".join(filter(None, dict.fromkeys(reasons)))
