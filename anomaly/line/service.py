"""Everything behind the HTTP routes: models, record, receivers, alarms and figures."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from anomaly.imaging.pool import read_one
from anomaly.imaging.read import DEFAULT
from anomaly.line.models import ModelSlot
from anomaly.line.record import Answer, Record
from anomaly.line.sinks import Outbox, Sink
from anomaly.maps.heatmap import photograph

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_RECENT = 120  # recent parts whose small heatmap is in memory
_RECENT_BYTES = 64_000_000  # limit for files of the newest good parts in memory
STOPPING = "the service is stopping"
# By kind of alarm; clients without a token read it, so it names no paths.
_NOT_READY = {
    "stopping": STOPPING,
    "unwritable": "parts can't be recorded",
    "failed": "{model} has failed",
    "loading": "{model} is still being loaded",
}


class InspectionService:
    """The inspection service. Use it in a `with` statement, which finishes accepted parts.

    Args:
        folders: the models' folders by name.
        record: of all results; closed at the end.
        device: that the networks run on.
        sinks: receivers of all results.

    Attributes:
        held: bytes of bodies being received or waiting for their answers.
        news: a number that changes with each new part and judgement.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        record: Record,
        *,
        device: torch.device,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.held = 0
        self.news = round(1000 * time.time())  # another one after a restart
        self.record = record
        self.outboxes = [Outbox(self.record, sink) for sink in sinks]
        self.models = {
            name: ModelSlot(name, folder, record, device=device, publish=self._publish)
            for name, folder in folders.items()
        }
        self.metrics = Metrics(self)
        self.stopping = False
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._files: OrderedDict[int, bytes] = OrderedDict()
        self._open = ExitStack()

    def __enter__(self) -> InspectionService:
        self._open.callback(self.record.close)
        for outbox in self.outboxes:
            self._open.enter_context(outbox)
        for slot in self.models.values():
            self._open.enter_context(slot)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def heatmap(self, number: int) -> bytes | None:
        """A part's small heatmap; None if it is neither recent nor kept."""
        return self._recent.get(number) or self.record.picture(number, "heatmap")

    def photograph(self, number: int) -> bytes | None:
        """A part's image as a JPEG for a browser; None if it is neither recent nor kept.

        Raises:
            ImageError: decoding it took too long or too much.
        """
        part = self.record.part(number)
        file = self._files.get(number) or self.record.picture(number, "file")
        if part is None or file is None:
            return None
        slot = self.models.get(part["model"])
        decoding = slot.now.model.loading.decoding if slot and slot.now else DEFAULT
        return bytes(read_one(photograph, file, decoding, about=Path(part["path"])))

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
        return part | {"picture": bool(part["picture"] or part["id"] in self._recent)}

    def judge(self, number: int, **judgement: str) -> dict[str, Any]:
        """Record a judgement, as `Record.add_feedback` does; a recent part's picture is kept.

        Returns:
            The part.
        """
        file = self._files.get(number)
        picture = None if file is None else (file, self._recent.get(number, b""))
        self.record.add_feedback(part=number, picture=picture, **judgement)
        self.news += 1
        return self.part(number) or {}

    def health(self) -> dict[str, Any]:
        """Whether parts are accepted and recorded; also for clients without a token.

        Returns:
            `ready`; `reason`, why not; `models`, the state of each.
        """
        reasons = [_NOT_READY[kind].format(model=model) for kind, model, _ in self._errors()]
        states = {slot.name: slot.state for slot in self.models.values()}
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
        for slot in self.models.values():
            if slot.state != "ready":
                yield slot.state, slot.name, slot.trouble

    def _warnings(self) -> Iterator[tuple[str, str, str]]:
        """Kind, model and reason of each other alarm."""
        for slot in self.models.values():
            if slot.refused:
                yield "refused", slot.name, slot.trouble
            drift = slot.drifted()
            if drift["alarm"]:
                yield "drift", slot.name, ""
            if drift["flagged"]:
                yield "more" if drift["compared"] == "more" else "fewer", slot.name, ""

    @property
    def waiting(self) -> int:
        """Number of accepted parts without an answer."""
        return sum(slot.waiting for slot in self.models.values())

    def refuse_waiting(self) -> None:
        """Refuse the parts that nothing has begun with."""
        count = sum(slot.refuse_waiting(STOPPING) for slot in self.models.values())
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
        self.news += 1


@cache
def _words() -> dict[str, dict[str, str]]:
    words = files("anomaly.line").joinpath("assets", "words.json").read_text("utf-8")
    return dict(json.loads(words))


_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_BY_MODEL = {
    "waiting_parts": "Accepted parts without an answer",
    "drift_alarm": "1 once parts have drifted",
    "version_refused": "1 while a new version is refused",
}
_BY_RECEIVER = {
    "unsent_parts": "Parts that wait for it",
    "refused_parts": "Parts that it has refused",
}


class Metrics(Collector):
    """The service's figures, in a registry of their own.

    Args:
        service: whose figures they are.
    """

    def __init__(self, service: InspectionService) -> None:
        self._service, self._registry = service, CollectorRegistry()
        self.parts = Counter(
            "anomaly_parts_total",
            "Parts answered and recorded",
            ("model", "status", "verdict"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "anomaly_part_seconds",
            "Seconds from accepting a part to its row",
            ("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.answers = Counter(
            "anomaly_http_answers_total",
            "Answers of the service by status code",
            ("code",),
            registry=self._registry,
        )
        self._registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The figures that are read at each request."""
        service = self._service
        trouble = float(bool(service.record.trouble()))
        yield GaugeMetricFamily("anomaly_held_bytes", "Bytes of images that wait", service.held)
        yield GaugeMetricFamily("anomaly_record_trouble", "1 while nothing is recorded", trouble)
        models = {
            slot.name: (slot.waiting, slot.drifted()["alarm"], slot.refused)
            for slot in service.models.values()
        }
        yield from _gauges("model", _BY_MODEL, models)
        receivers = {outbox.name: outbox.state() for outbox in service.outboxes}
        yield from _gauges("receiver", _BY_RECEIVER, receivers)

    def note(self, answer: Answer) -> None:
        """Count a part that was answered."""
        row = answer.row
        self.parts.labels(answer.model, row.status, row.verdict).inc()
        self.seconds.labels(answer.model).observe((row.milliseconds or 0.0) / 1000)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)


def _gauges(
    label: str, texts: Mapping[str, str], figures: Mapping[str, Sequence[float]]
) -> Iterator[GaugeMetricFamily]:
    """Gauges with a label: names and texts, and by the label's value a figure for each."""
    for place, (name, text) in enumerate(texts.items()):
        gauge = GaugeMetricFamily(f"anomaly_{name}", text, labels=[label])
        for one, values in figures.items():
            gauge.add_metric([one], values[place])
        yield gauge
