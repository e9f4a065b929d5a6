"""Everything behind the HTTP routes: models, record, receivers, alarms and figures."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        self.stopping = False
        # Parts and their seconds by model, status and verdict.
        self._answered: dict[tuple[str, ...], tuple[int, float]] = {}
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
            `severity`, `error` or `warning`.
        """
        return [
            {"kind": kind, "model": model, "reason": reason, "severity": severity}
            for severity, found in (("error", self._errors()), ("warning", self._warnings()))
            for kind, model, reason in found
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

    def figures(self) -> str:
        """Counts since the start and current figures, in Prometheus' text format."""
        lines = []
        for key, (count, seconds) in list(self._answered.items()):
            labels = dict(zip(("model", "status", "verdict"), key, strict=True))
            lines.append(_figure("parts_total", count, **labels))
            lines.append(_figure("part_seconds_total", seconds, **labels))
        for slot in self.models.values():
            lines.append(_figure("waiting_parts", slot.waiting, model=slot.name))
            lines.append(_figure("drift_alarm", slot.drifted()["alarm"], model=slot.name))
            lines.append(_figure("version_refused", slot.refused, model=slot.name))
        for outbox in self.outboxes:
            unsent, refused = outbox.state()
            lines.append(_figure("unsent_parts", unsent, receiver=outbox.name))
            lines.append(_figure("refused_parts", refused, receiver=outbox.name))
        lines.append(_figure("held_bytes", self.held))
        lines.append(_figure("record_trouble", bool(self.record.trouble())))
        return "".join(lines)

    @property
    def waiting(self) -> int:
        """Number of accepted parts without an answer."""
        return sum(slot.waiting for slot in self.models.values())

    def refuse_waiting(self) -> None:
        """Refuse the parts that nothing has begun with."""
        if count := sum(slot.refuse_waiting(STOPPING) for slot in self.models.values()):
            log.warning("%d waiting parts were refused; clients have to send them again", count)

    def _publish(self, number: int, answer: Answer) -> None:
        """Publish a recorded part; called in the record's thread."""
        row, key = answer.row, (answer.model, answer.row.status, answer.row.verdict)
        count, seconds = self._answered.get(key, (0, 0.0))
        self._answered[key] = count + 1, seconds + (row.milliseconds or 0.0) / 1000
        for outbox in self.outboxes:
            outbox.wake()
        if answer.heatmap:
            self._recent[number] = answer.heatmap
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        if row.verdict == "good":
            self._files[number] = answer.file
            while sum(map(len, self._files.values())) > _RECENT_BYTES:
                self._files.popitem(last=False)
        self.news += 1


def _figure(name: str, value: float, **labels: str) -> str:
    """A line in Prometheus' text format; labels are escaped as JSON is."""
    shown = (f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in labels.items())
    return f"anomaly_{name}{{{','.join(shown)}}} {float(value)!r}\n"
