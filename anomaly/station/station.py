"""Parts on their way: triggered → taken → judged → sent, or late, or lost."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
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
from anomaly.station.cameras import CameraError, CameraThread, Frame, open_camera
from anomaly.station.plc import CODES, Plc
from anomaly.station.settings import StationSettings

log = logging.getLogger(__name__)

_GRACE = 0.2  # of the time for a part: so much after its deadline it is still told to the PLC
_STUCK_SECONDS = 5.0  # without a turn of `_deliver`, after which the heartbeat stops
_COUNTS = "SELECT COALESCE (MAX (id), 0), (SELECT counter FROM triggers WHERE counter IS NOT NULL ORDER BY id DESC LIMIT 1) FROM triggers"  # noqa: E501
_UNFINISHED = "SELECT id, time, counter, verdict FROM triggers WHERE line = '' ORDER BY id"


@dataclass(eq=False)
class Part:
    """One part.

    Attributes:
        number: given once, also over restarts.
        cameras: how many pictures are taken of it.
        deadline: when its verdict has to be there, by `time.perf_counter`.
        counter: the PLC's count; None for other triggers.
        state: where it is, in the record, too.
        sent: the verdict code that the PLC has confirmed.
        views: what was said of its pictures, by camera.
        failures: why there is nothing to be said of others.
    """

    number: int
    cameras: int = 0
    deadline: float = 0.0
    counter: int | None = None
    begun: float = field(default_factory=time.perf_counter)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    state: str = "triggered"
    verdict: str = ""
    sent: int | None = None
    reason: str = ""
    score: float | None = None
    milliseconds: float = 0.0
    views: dict[str, Row] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    complete: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, camera: str, view: Row | str) -> None:
        """Take what was said of a picture, or why nothing was."""
        with self.lock:
            if isinstance(view, str):
                self.failures.append(f"{camera}: {view}")
            else:
                self.views[camera] = view
            if len(self.views) + len(self.failures) >= self.cameras:
                self.complete.set()

    def judge(self) -> None:
        """The verdict of all pictures; one that is rejected is enough for that."""
        with self.lock:
            rows = list(self.views.values())
            judged = judge_parts(rows, dict.fromkeys((row.path for row in rows), ""))
            if judged and (judged[0].verdict == "reject" or len(rows) == self.cameras):
                self.verdict, self.score = judged[0].verdict, judged[0].image_score
                self.reason = judged[0].reason
            else:
                self.reason = "; ".join(self.failures) or "no verdict in time"

    def summary(self) -> dict[str, Any]:
        """What receivers are sent."""
        names = ("time", "counter", "state", "verdict", "sent", "reason", "score", "milliseconds")
        views = [
            {"camera": camera, "path": row.path, "verdict": row.verdict, "score": row.image_score}
            for camera, row in self.views.items()
        ]
        return {"part": self.number, **{n: getattr(self, n) for n in names}, "views": views}


class Station:
    """The threads of a line, from trigger to verdict.

    Args:
        settings: of the station.
        record: of all parts.
        slots: the model of each camera.
        outboxes: of the receivers.

    Attributes:
        counter: the PLC's count of the last part that is recorded.
        closing: set to stop.
        failed: whether a thread has ended by a mistake.
    """

    def __init__(
        self,
        settings: StationSettings,
        record: Record,
        slots: Mapping[str, ModelSlot],
        outboxes: list[Outbox],
    ) -> None:
        self.settings, self._record, self._slots = settings, record, slots
        self._outboxes = outboxes
        self.plc: Plc | None = None
        if settings.plc is not None:
            self.plc = Plc(settings.plc, lambda: not self.trouble(), self._is_alive)
        self.cameras = {
            name: CameraThread(name, partial(open_camera, camera.source, camera.features))
            for name, camera in settings.cameras.items()
        }
        self._number, self.counter = record.read(_COUNTS, ())[0]
        self._models = ", ".join(dict.fromkeys(slot.name for slot in slots.values()))
        self._line: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._turn = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.closing, self.failed = threading.Event(), False
        self._threads: list[threading.Thread] = []

    def check(self) -> None:
        """Connect the PLC and take a picture with each camera, in this thread.

        Raises:
            AnomalyError: one of them isn't there.
        """
        if self.plc is not None:
            self.plc.connect()
        self._first = {name: camera.first() for name, camera in self.cameras.items()}

    def warm_up(self) -> None:
        """Have the first pictures judged, so that the first part isn't late.

        Raises:
            AnomalyError: they can't be written down.
        """
        for name, frame in self._first.items():
            self._slots[name].submit(frame.data, f"start/{name}", PictureRequest()).result()

    def start(self, work: list[Callable[[], None]]) -> None:
        """Settle what an earlier process has left, then start all threads, those of triggers last.

        Args:
            work: what threads that trigger parts do.
        """
        self._settle()
        self._start(self._deliver, *(camera.work for camera in self.cameras.values()))
        if self.plc is not None:
            self._start(partial(self.plc.work, self.closing))
        for trigger in work:
            self._start(trigger, last=False)

    def _start(self, *work: Callable[[], None], last: bool = True) -> None:
        for call in work:
            thread = threading.Thread(target=self._guard, args=(call,), daemon=True)
            thread.start()
            self._threads += [thread] * last

    def _guard(self, call: Callable[[], None]) -> None:
        """A mistake in one thread ends the station: its supervisor starts it anew."""
        try:
            call()
        except Exception:
            log.exception("the station stops: one of its threads has failed")
            self.failed = True
            self.closing.set()

    def close(self) -> None:
        """Take no more parts, finish those on their way, stop all threads."""
        self.closing.set()
        self._line.put(None)
        for camera in self.cameras.values():
            camera.end()
        for thread in self._threads:
            thread.join()

    def finish(self) -> None:
        """Close once the last part is done."""
        while sum(self.counts.values()) < self._number - self._settled:
            time.sleep(0.01)
        self.closing.set()

    def _settle(self) -> None:
        """Say of parts that were on their way when the last process ended what became of them."""
        number, code = self.plc.last() if self.plc else (0, 0)
        for part_number, when, counter, verdict in self._record.read(_UNFINISHED, ()):
            part = Part(part_number, counter=counter, time=when, verdict=verdict, state="lost")
            part.reason = "the station ended before its verdict was sent"
            if self.plc and number == part.number:
                part.sent = code
                part.state = "sent" if CODES.get(verdict) == code else "lost"
                part.reason = ""
            self._write(part, final=True)
            log.warning("part %d of the last run: %s", part.number, part.state)
        self._number = self._settled = max(self._number, number)

    def trigger(self, begun: float | None = None, counter: int | None = None) -> Part:
        """Take a part: it is in the record before its picture is taken.

        Args:
            begun: when it came at the earliest, by `time.perf_counter`; now by default.
            counter: the PLC's count.
        """
        now = time.perf_counter()
        with self._lock:
            self._number += 1
            deadline = (now if begun is None else begun) + self.settings.part_seconds
            part = Part(self._number, len(self.cameras), deadline, counter)
            trouble = self._write(part)
            self._line.put(part)
        if now > deadline:
            trouble = trouble or "it came while nobody looked"
        for name, camera in self.cameras.items():
            if trouble:
                part.add(name, trouble)
            else:
                camera.take(deadline, partial(self._taken, part, name))
        return part

    def _taken(self, part: Part, camera: str, frame: Frame | CameraError) -> None:
        if isinstance(frame, CameraError):
            part.add(camera, str(frame))
            return
        name = "/".join(filter(None, (str(part.number), camera, frame.file)))
        try:
            scored = self._slots[camera].submit(frame.data, name, PictureRequest())
        except BusyError as error:
            part.add(camera, str(error))
            return
        with part.lock:
            if part.state == "triggered":
                part.state = "taken"
                self._write(part)
        scored.add_done_callback(partial(self._scored, part, camera))

    def _scored(self, part: Part, camera: str, scored: Future[Scored]) -> None:
        error = scored.exception()
        part.add(camera, scored.result().answer.row if error is None else str(error))

    def _deliver(self) -> None:
        """Finish parts in their order, each at its deadline at the latest."""
        while True:
            self._turn = time.monotonic()
            with suppress(queue.Empty):
                if (part := self._line.get(timeout=0.5)) is None:
                    return
                part.complete.wait(max(0.0, part.deadline - time.perf_counter()))
                self._finish(part)

    def _finish(self, part: Part) -> None:
        state = "lost" if part.complete.is_set() else "late"
        part.judge()
        verdict = part.verdict
        if verdict:
            state = "sent"
            with part.lock:
                part.state = "judged"
                self._write(part)
        elif self.settings.without_verdict == "reject":
            verdict = "reject"
        last = part.deadline + _GRACE * self.settings.part_seconds
        if time.perf_counter() > last:
            state = "late" if state == "sent" else state
        elif verdict and self.plc is not None:
            unsent = self.plc.say(part.number, CODES[verdict], part.deadline)
            part.sent = None if unsent else CODES[verdict]
            if unsent:
                state, part.reason = ("lost" if state == "sent" else state), unsent
        if state == "sent" and time.perf_counter() > part.deadline:
            state = "late"
        part.state = state
        part.milliseconds = round(1000 * (time.perf_counter() - part.begun), 1)
        self._write(part, final=True)
        self.counts[state] += 1
        if state != "sent":
            log.warning("part %d is %s: %s", part.number, state, part.reason)
        for outbox in self._outboxes:
            outbox.wake()
        part.done.set()

    def _write(self, part: Part, *, final: bool = False) -> str:
        """Write a part's row; returns why it can't be, empty once it is."""
        line = json.dumps(part.summary()) if final else ""
        row = (part.number, part.time, part.counter, part.state, part.verdict, part.sent)
        try:
            with self._record.changing() as db:
                insert = "INSERT OR REPLACE INTO triggers VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
                db.execute(insert, (*row, self._models, line))
        except OutputError as error:
            log.error("part %d isn't recorded: %s", part.number, error)
            return str(error)
        return ""

    def _is_alive(self) -> bool:
        return time.monotonic() - self._turn < _STUCK_SECONDS + 2 * self.settings.part_seconds

    def trouble(self) -> str:
        """Why parts have no verdicts now; empty while they have."""
        reasons = [slot.unusable for slot in self._slots.values()]
        reasons += [f"camera {c.name}: {c.trouble}" for c in self.cameras.values() if c.trouble]
        reasons += [self._record.trouble(), "it is stopping" if self.closing.is_set() else ""]
        return "; ".join(filter(None, dict.fromkeys(reasons)))

    def status(self) -> dict[str, Any]:
        """Whether it is ready, and what became of the parts since its start."""
        trouble = self.trouble()
        parts = {state: self.counts[state] for state in ("sent", "late", "lost")}
        return {"ready": not trouble, "trouble": trouble, "last": self._number, "parts": parts}
