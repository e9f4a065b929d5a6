"""Everything behind the HTTP routes: models, record, and clients that follow events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from anomaly.desk.golden import keep_missed
from anomaly.errors import DataError, visible
from anomaly.imaging.pool import read_one
from anomaly.imaging.read import DEFAULT
from anomaly.line.models import BusyError, ModelRegistry
from anomaly.line.record import Answer, Record, Recorder
from anomaly.line.sinks import Outbox, Sink
from anomaly.maps.heatmap import photograph

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_RECENT = 120  # recent parts whose small heatmap is in memory
_RECENT_BYTES = 64_000_000  # limit for files of the newest good parts in memory
_BEHIND = 200  # events that a follower may be behind before it has to reload
_SIGN_OF_LIFE_SECONDS = 10.0
MOST_FOLLOWERS = 64
STOPPING = "the service is stopping"
# By kind of alarm.
_NOT_READY = {
    "stopping": STOPPING,
    "unwritable": "parts can't be recorded: {reason}",
    "failed": "{model} has failed",
    "loading": "{model} is still being loaded",
}


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        body_bytes: of one image file.
        short_bytes: of any other body.
        held_bytes: of all bodies being received or waiting for their answers.
        receive_seconds: until a body is complete.
        answer_seconds: until a part is answered.
        waiting_parts: parts in progress of each model.
    """

    body_bytes: int = 64_000_000
    short_bytes: int = 64_000
    held_bytes: int = 512_000_000
    receive_seconds: float = 30.0
    answer_seconds: float = 60.0
    waiting_parts: int = 64


class InspectionService:
    """The inspection service. Use it in a `with` statement, which finishes accepted parts.

    Args:
        folders: the models' folders by name.
        record: of all results; closed at the end.
        device: that the networks run on.
        limits: of requests.
        sinks: receivers of all results.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        record: Record,
        *,
        device: torch.device,
        limits: Limits | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.held = 0  # bytes of bodies being received or waiting for their answers
        self.record = record
        self.outboxes = [Outbox(self.record, sink) for sink in sinks]
        self._recorder = Recorder(self.record, self._publish)
        self.registry = ModelRegistry(
            folders,
            self._recorder,
            device=device,
            waiting_parts=self.limits.waiting_parts,
        )
        self.metrics = Metrics(self)
        self.stopping = False
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._files: OrderedDict[int, bytes] = OrderedDict()
        self._followers: set[_Follower] = set()
        self._open = ExitStack()

    def __enter__(self) -> InspectionService:
        self._open.callback(self.record.close)
        for outbox in self.outboxes:
            self._open.enter_context(outbox)
        self._open.enter_context(self._recorder)
        self._open.enter_context(self.registry)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def heatmap(self, number: int) -> bytes | None:
        """A part's small heatmap; None if it is neither recent nor kept."""
        return self._recent.get(number) or self.record.picture(number, "heatmap")

    def picture_file(self, number: int) -> bytes | None:
        """A part's image file; None if it is neither recent nor kept."""
        return self._files.get(number) or self.record.picture(number, "file")

    def photograph(self, number: int) -> bytes | None:
        """A part's image as a JPEG for a browser; None if it is neither recent nor kept.

        Raises:
            ImageError: decoding it took too long or too much.
        """
        part = self.record.part(number)
        file = self.picture_file(number)
        if part is None or file is None:
            return None
        slot = self.registry.models.get(part["model"])
        now = None if slot is None else slot.now
        decoding = DEFAULT if now is None else now.model.loading.decoding
        decoded = read_one(photograph, file, decoding, about=Path(part["path"]))
        return bytes(decoded)

    def parts(
        self, before: int | None, verdict: str, limit: int, model: str
    ) -> list[dict[str, Any]]:
        """The newest parts, as `Record.parts` gives them; `picture` says whether there is one."""
        return [self._seen(part) for part in self.record.parts(before, verdict, limit, model)]

    def part(self, number: int) -> dict[str, Any] | None:
        """One part; None if there is none of this number."""
        part = self.record.part(number)
        return None if part is None else self._seen(part)

    def _seen(self, part: dict[str, Any]) -> dict[str, Any]:
        return part | {"picture": part["picture"] or part["id"] in self._recent}

    def changed(self, number: int) -> None:
        """Tell followers that a part was judged."""
        part = self.part(number)
        if part is not None:
            self._send_event({"kind": "feedback", "part": part})

    def keep_missed(self, number: int, who: str) -> None:
        """Keep a missed defect as a golden part of its model.

        Raises:
            DataError: it can't be kept; the message says why.
            OutputError: the disk is full, or another process is changing the run.
        """
        part = self.record.part(number) or {}
        judgement = part.get("feedback")
        if part.get("verdict") != "good" or not judgement or judgement["verdict"] != "defect":
            raise DataError(f"part {number} isn't a defect that was called good; nothing was kept")
        file, slot = self.picture_file(number), self.registry.models.get(part["model"])
        if file is None or slot is None:
            gone = "its picture isn't kept" if file is None else f"model {part['model']} is gone"
            raise DataError(
                f"part {number} can't be kept: {gone}. Give the file to anomaly explain --keep. "
                "serve --keep-good 1 keeps the pictures of all good parts"
            )
        kept = keep_missed(slot.folder, f"part-{number}", file)
        note = "; ".join(filter(None, [judgement["note"], f"known missed defect: {kept.name}"]))
        self.record.add_feedback(
            judgement["verdict"],
            who=who,
            part=number,
            defect_type=judgement["defect_type"],
            note=note,
        )
        self.changed(number)

    async def follow(self) -> AsyncIterator[dict[str, Any] | None]:
        """Events from now on; None at once and while nothing happens.

        Yields:
            `{"kind": "part" or "feedback", "part": …}`, and `{"kind": "behind"}` for a follower
            that was too slow and has missed some.

        Raises:
            BusyError: too many clients follow already.
        """
        if len(self._followers) >= MOST_FOLLOWERS:
            raise BusyError(f"{MOST_FOLLOWERS} pages are open, the limit; close one of them")
        follower = _Follower(asyncio.get_running_loop())
        self._followers.add(follower)
        try:
            yield None
            while not self.stopping:
                try:
                    async with asyncio.timeout(_SIGN_OF_LIFE_SECONDS):
                        event = await follower.events.get()
                except TimeoutError:
                    yield None
                    continue
                if event is not None:
                    yield event
        finally:
            self._followers.discard(follower)

    def health(self) -> dict[str, Any]:
        """Whether parts are accepted and recorded; also for clients without a token.

        Returns:
            `ready`; `reason`, why not; `models`, the state of each.
        """
        # Clients without a token mustn't learn the record's path.
        place, name = visible(str(self.record.file)), visible(self.record.file.name)
        reasons = [
            _NOT_READY[kind].format(model=model, reason=reason.replace(place, name))
            for kind, model, reason in self._errors()
        ]
        states = {slot.name: slot.state for slot in self.registry.models.values()}
        return {"ready": not reasons, "reason": "; ".join(reasons), "models": states}

    def alarms(self) -> list[dict[str, str]]:
        """The current alarms, errors first.

        Returns:
            Of each: `kind`, its key in words.json, which holds the text in every language;
            `model`, empty if it concerns all; `reason`, details that the kind's text doesn't give;
            `severity`, `error` or `warning`; `text` in English.
        """
        found = [("error", *error) for error in self._errors()]
        found += [("warning", *warning) for warning in self._warnings()]
        return [
            {
                "kind": kind,
                "model": model,
                "reason": reason,
                "severity": severity,
                "text": _words()[kind]["en"].format(model=model, reason=reason),
            }
            for severity, kind, model, reason in found
        ]

    def _errors(self) -> Iterator[tuple[str, str, str]]:
        """Kind, model and reason of each alarm with which the service isn't ready."""
        if self.stopping:
            yield "stopping", "", ""
        if trouble := self.record.trouble():
            yield "unwritable", "", trouble
        for slot in self.registry.models.values():
            if slot.state != "ready":
                yield slot.state, slot.name, slot.trouble

    def _warnings(self) -> Iterator[tuple[str, str, str]]:
        """Kind, model and reason of each other alarm."""
        for slot in self.registry.models.values():
            if slot.refused:
                yield "refused", slot.name, slot.trouble
            drift = slot.drifted()
            if drift["alarm"]:
                yield "drift", slot.name, ""
            if drift["flagged"]:
                yield "more" if drift["compared"] == "more" else "fewer", slot.name, ""

    def stop(self) -> None:
        """Disconnect followers and accept no more parts."""
        self.stopping = True
        for follower in list(self._followers):
            follower.put(None)

    @property
    def waiting(self) -> int:
        """Number of accepted parts without an answer."""
        return sum(slot.waiting for slot in self.registry.models.values())

    def refuse_waiting(self) -> None:
        """Refuse the parts that nothing has begun with."""
        count = sum(slot.refuse_waiting(STOPPING) for slot in self.registry.models.values())
        if count:
            log.warning("%d waiting parts were refused; clients have to send them again", count)

    def _publish(self, number: int, answer: Answer) -> None:
        """Publish a recorded part; called in the record's thread."""
        self.metrics.note(answer)
        for outbox in self.outboxes:
            outbox.wake()
        if answer.heatmap:
            self._recent[number] = answer.heatmap
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        if answer.row.verdict == "good":
            self._files[number] = answer.file
            while sum(map(len, self._files.values())) > _RECENT_BYTES:
                self._files.popitem(last=False)
        row = {**asdict(answer.row), "id": number, "model": answer.model, "feedback": None}
        self._send_event({"kind": "part", "part": {**row, "picture": bool(answer.heatmap)}})

    def _send_event(self, event: dict[str, Any]) -> None:
        for follower in list(self._followers):
            follower.put(event)


@cache
def _words() -> dict[str, dict[str, str]]:
    words = files("anomaly.line").joinpath("assets", "words.json").read_text("utf-8")
    return dict(json.loads(words))


class _Follower:
    """A client that follows events, on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_BEHIND)
        self._loop = loop

    def put(self, event: dict[str, Any] | None) -> None:
        """Hand over an event, from any thread."""
        self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: dict[str, Any] | None) -> None:
        if self.events.full():
            while not self.events.empty():
                self.events.get_nowait()
            event = event and {"kind": "behind"}
        self.events.put_nowait(event)


_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
# Of each model, the record and each receiver: figures that are read at each request.
_FIGURES: tuple[tuple[str, str, str, Callable[[Any], float]], ...] = (
    ("model", "waiting_parts", "Accepted parts without an answer", lambda slot: slot.waiting),
    ("model", "drift_alarm", "1 once parts have drifted", lambda slot: slot.drifted()["alarm"]),
    ("model", "version_refused", "1 while a new version is refused", lambda slot: slot.refused),
    (
        "",
        "record_trouble",
        "1 while nothing can be recorded",
        lambda record: bool(record.trouble()),
    ),
    ("receiver", "unsent_parts", "Parts that wait for it", lambda outbox: outbox.state()[0]),
    ("receiver", "refused_parts", "Parts that it has refused", lambda outbox: outbox.state()[1]),
)


class Metrics:
    """The service's figures, in a registry of their own.

    Args:
        service: whose figures they are.
    """

    def __init__(self, service: InspectionService) -> None:
        registry = self._registry = CollectorRegistry()
        self.parts = Counter(
            "anomaly_parts_total",
            "Parts answered and recorded",
            ("model", "status", "verdict"),
            registry=registry,
        )
        self.seconds = Histogram(
            "anomaly_part_seconds",
            "Seconds from accepting a part to its row",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.answers = Counter(
            "anomaly_http_answers_total",
            "Answers of the service by status code",
            ("code",),
            registry=registry,
        )
        held = Gauge("anomaly_held_bytes", "Bytes of images that wait", registry=registry)
        held.set_function(lambda: service.held)
        sources: dict[str, Mapping[str, Any]] = {
            "model": service.registry.models,
            "receiver": {outbox.name: outbox for outbox in service.outboxes},
        }
        for label, name, text, figure in _FIGURES:
            gauge = Gauge(f"anomaly_{name}", text, [label] * bool(label), registry=registry)
            if not label:
                gauge.set_function(partial(figure, service.record))
            for one, source in sources.get(label, {}).items():
                gauge.labels(one).set_function(partial(figure, source))

    def note(self, answer: Answer) -> None:
        """Count a part that was answered."""
        row = answer.row
        self.parts.labels(answer.model, row.status, row.verdict).inc()
        self.seconds.labels(answer.model).observe((row.milliseconds or 0.0) / 1000)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)
