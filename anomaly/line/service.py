"""The inspection service: models, record, receivers, alarms and figures, and its HTTP routes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field

from anomaly.errors import AnomalyError, DataError, nearest, visible
from anomaly.imaging.pool import read_one
from anomaly.imaging.read import DEFAULT
from anomaly.line.models import ModelSlot
from anomaly.line.record import Answer, Record, in_utc
from anomaly.line.report import PAGE, Period, report
from anomaly.line.sinks import Outbox, Sink
from anomaly.maps.heatmap import photograph
from anomaly.runtime import __version__

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_RECENT = 120  # newest parts whose heatmaps are in memory: twice as many as the page shows
_RECENT_BYTES = 64_000_000  # limit for image files of the newest good parts in memory
_STOPPING = "the service is stopping"
# Reasons by kind of alarm. Clients without a token read them, so they name no paths.
_NOT_READY = {
    "stopping": _STOPPING,
    "unwritable": "parts can't be recorded",
    "failed": "{model} has failed",
    "loading": "{model} is still being loaded",
}

# How bodies begin that are a form, JSON, a data address, or a PNG or JPEG as base64.
_TEXT = (b"--", b"{", b"[", b'"', b"data:", b"iVBOR", b"/9j/")
_START = 64  # bytes in which white space before that is passed over
_IS_TEXT = (
    "the body is a form or text (JSON or base64), not an image file; send the file as it is: "
    "curl --data-binary @part.png"
)
_ANSWER_SECONDS = 60.0  # until a client gets 504
_LONGEST_NAME = 255  # characters
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_Include = Literal["heatmap", "mask", "regions"]
_Number = Annotated[int, Field(ge=1, lt=2**63, description="id of the part")]
_Model = Annotated[str, Query(description="only parts of this model", max_length=300)]


class InspectionService:
    """The inspection service. Use it in a `with` statement, which finishes accepted parts.

    Args:
        folders: the models' folders by name.
        record: closed at the end.

    Attributes:
        held: bytes of bodies being received or waiting for their answers.
        news: a number that changes with each new part and judgement.
        stopping: true once no more parts are accepted; the server sets it.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        record: Record,
        *,
        device: str | torch.device,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.held = 0
        self.news = round(1000 * time.time())  # higher than before a restart
        self.record = record
        self.outboxes = [Outbox(self.record, sink) for sink in sinks]
        self.models = {
            name: ModelSlot(name, folder, record, device=device, publish=self._publish)
            for name, folder in folders.items()
        }
        self.stopping = False
        # Number of parts and their seconds, by model, status and verdict.
        self._answered: dict[tuple[str, str, str], tuple[int, float]] = {}
        # Pictures by the part's number, the oldest first. The record keeps few of good parts.
        self._heatmaps: OrderedDict[int, bytes] = OrderedDict()
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
        self._open.close()  # the models first, the record last

    def heatmap(self, number: int) -> bytes | None:
        """A part's heatmap as a JPEG of reduced size; None if it is neither recent nor kept."""
        return self._heatmaps.get(number) or self.record.picture(number, "heatmap")

    def photograph(self, number: int) -> bytes | None:
        """A part's image as a JPEG for a browser; None if it is neither recent nor kept.

        Raises:
            ImageError: decoding the image took too long or too much memory.
        """
        parts = self.record.parts(number=number)
        file = self._files.get(number) or self.record.picture(number, "file")
        if not parts or file is None:
            return None
        slot = self.models.get(parts[0]["model"])
        decoding = slot.version.model.loading.decoding if slot and slot.version else DEFAULT
        return bytes(read_one(photograph, file, decoding, about=Path(parts[0]["path"])))

    def parts(self, **wanted: Any) -> list[dict[str, Any]]:
        """The parts of `Record.parts`; `picture` is true of recent heatmaps as well."""
        parts = self.record.parts(**wanted)
        return [
            part | {"picture": part["picture"] or part["id"] in self._heatmaps} for part in parts
        ]

    def judge(self, number: int, **judgement: str) -> dict[str, Any]:
        """Record a judgement, as `Record.add_feedback` does, with a recent part's picture.

        Returns:
            The part, as in `parts`.
        """
        file = self._files.get(number)
        picture = None if file is None else (file, self._heatmaps.get(number, b""))
        self.record.add_feedback(part=number, picture=picture, **judgement)
        self.news += 1
        return self.parts(number=number)[0]

    def health(self) -> dict[str, Any]:
        """The service's state, also for clients without a token.

        Returns:
            `ready`: whether parts are accepted and recorded; `reason`, if they aren't; `models`:
            each model's state.
        """
        reasons = [_NOT_READY[kind].format(model=model) for kind, model, _ in self._errors()]
        states = {slot.name: slot.state for slot in self.models.values()}
        return {"ready": not reasons, "reason": "; ".join(reasons), "models": states}

    def alarms(self) -> list[dict[str, str]]:
        """The current alarms, errors first.

        Returns:
            For each alarm: `kind`, the key of its text in words.json; `model`, empty if all models
            are concerned; `reason`, details for the text; `severity`, `error` or `warning`.
        """
        by_severity = {"error": self._errors(), "warning": self._warnings()}
        return [
            {"kind": kind, "model": model, "reason": reason, "severity": severity}
            for severity, alarms in by_severity.items()
            for kind, model, reason in alarms
        ]

    def _errors(self) -> Iterator[tuple[str, str, str]]:
        """Kind, model and reason of each alarm that makes the service not ready."""
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
            drift = slot.drift_facts()
            if drift["alarm"]:
                yield "drift", slot.name, ""
            if drift["compared"] != "as promised":  # but more or fewer
                yield drift["compared"], slot.name, ""

    def figures(self) -> str:
        """Counts since the start and current figures, in Prometheus' text format."""
        lines = []
        for (model, status, verdict), (count, seconds) in list(self._answered.items()):
            labels = {"model": model, "status": status, "verdict": verdict}
            lines.append(_figure("parts_total", count, **labels))
            lines.append(_figure("part_seconds_total", seconds, **labels))
        for slot in self.models.values():
            lines.append(_figure("waiting_parts", slot.waiting, model=slot.name))
            lines.append(_figure("drift_alarm", slot.drift_facts()["alarm"], model=slot.name))
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
        """Refuse the parts whose decoding hasn't begun."""
        if count := sum(slot.refuse_waiting(_STOPPING) for slot in self.models.values()):
            log.warning("%d waiting parts were refused; clients have to send them again", count)

    def _publish(self, number: int, answer: Answer) -> None:
        """Count, keep and announce a recorded part; called in the record's thread."""
        row, key = answer.row, (answer.model, answer.row.status, answer.row.verdict)
        count, seconds = self._answered.get(key, (0, 0.0))
        self._answered[key] = count + 1, seconds + (row.milliseconds or 0.0) / 1000
        for outbox in self.outboxes:
            outbox.wake()
        if answer.heatmap:
            self._heatmaps[number] = answer.heatmap
            while len(self._heatmaps) > _RECENT:
                self._heatmaps.popitem(last=False)
        if row.verdict == "good":
            self._files[number] = answer.file
            while sum(map(len, self._files.values())) > _RECENT_BYTES:
                self._files.popitem(last=False)
        self.news += 1


def _figure(name: str, value: float, **labels: str) -> str:
    """A line in Prometheus' text format, which escapes labels as JSON does."""
    pairs = (f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in labels.items())
    return f"anomaly_{name}{{{','.join(pairs)}}} {float(value)!r}\n"


class Feedback(BaseModel):
    """A person's judgement of a part."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    verdict: Literal["good", "defect", ""] = Field(description="empty withdraws the last judgement")
    defect_type: str = Field("", max_length=80)
    note: str = Field("", max_length=2000)
    who: str = Field("", max_length=80)


def make_app(service: InspectionService) -> FastAPI:
    """The FastAPI application of an inspection service."""
    app = FastAPI(
        title="anomaly",
        version=__version__,
        description="Scores parts, records each result, and takes people's judgements.",
        docs_url=None,  # FastAPI's own pages load scripts from another site
        redoc_url=None,
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(AnomalyError, _unavailable)
    _score_routes(app, service)
    _model_routes(app, service)
    _part_routes(app, service)
    rooms = ("anomaly.line", "anomaly.report")
    app.mount("/", StaticFiles(packages=[(room, "assets") for room in rooms], html=True))
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    """Status 400 for an invalid parameter; FastAPI's 422 is for images that can't be scored."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return JSONResponse({"detail": f"{where}: {first['msg']}"}, 400)


async def _unavailable(request: Request, error: Exception) -> Response:
    """Status 503: the record can't be used, or too many parts wait."""
    return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "5"})


def _score_routes(app: FastAPI, service: InspectionService) -> None:
    @app.post("/v1/models/{name}/score", summary="Score one part")
    async def score(
        request: Request,
        name: str,
        include: Annotated[tuple[_Include, ...], Query(description="besides the row")] = (),
    ) -> JSONResponse:
        slot = _slot(service, name)
        if service.stopping:
            raise AnomalyError(_STOPPING)
        no_masks = slot.version and slot.version.model.thresholds is None
        if no_masks and {"mask", "regions"} & {*include}:
            reason = f"{name} has no thresholds, so it has no masks or regions"
            raise HTTPException(400, reason)
        data = await anext(request.stream())  # whole, see `Guard`
        if data[:_START].lstrip().startswith(_TEXT):
            raise HTTPException(415, _IS_TEXT)
        filename = _shown_name(request.query_params.get("name", ""))
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                part = asyncio.wrap_future(slot.submit(data, filename, include))
                answer = await asyncio.shield(part)  # the part is recorded, however late
        except TimeoutError:
            raise HTTPException(504, "no answer in time; the part will still be recorded") from None
        return JSONResponse(answer, 200 if answer["status"] == "ok" else 422)


def _slot(service: InspectionService, name: str) -> ModelSlot:
    """The model of a name, or status 404."""
    if name not in service.models:
        known = nearest(name, service.models)
        raise HTTPException(404, f"there is no model {_shown_name(name)!r}; {known}")
    return service.models[name]


def _shown_name(name: str) -> str:
    """A client's text on one line, without control characters, at most 255 characters long."""
    return visible(name[:_LONGEST_NAME])[:_LONGEST_NAME]


def _model_routes(app: FastAPI, service: InspectionService) -> None:
    look, check = InTurn(), InTurn()  # supervisors needn't wait for pages

    @app.get("/v1/models", summary="The models: states, thresholds, drift")
    def models() -> dict[str, Any]:
        return {"models": [slot.facts() for slot in service.models.values()]}

    @app.get("/v1/models/{name}", summary="One model")
    def model(name: str) -> dict[str, Any]:
        return _slot(service, name).facts()

    @app.get("/v2/health/live", summary="Whether the service runs")
    async def live() -> dict[str, bool]:  # async: all threads may be busy
        return {"live": True}

    @app.get("/v2/health/ready", summary="Whether parts can be scored and recorded")
    async def ready() -> JSONResponse:
        health = await check(service.health)
        return JSONResponse(health, 200 if health["ready"] else 503)

    @app.get("/v1/alarms", summary="Current alarms, errors first")
    async def alarms() -> dict[str, Any]:
        return {"alarms": await look(service.alarms)}

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(await check(service.figures), media_type="text/plain; version=0.0.4")


class InTurn:
    """Calls functions in threads, one after the other, with as long a rest after each.

    However many clients read the record, most of the machine is left for parts.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore()

    async def __call__(self, function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """The function's result."""
        await self._turn.acquire()
        begun = time.monotonic()
        try:
            return await asyncio.to_thread(function, *arguments, **named)
        finally:
            asyncio.get_running_loop().call_later(time.monotonic() - begun, self._turn.release)


def _part_routes(app: FastAPI, service: InspectionService) -> None:
    read, draw = InTurn(), InTurn()  # rows needn't wait for photographs

    @app.get("/v1/parts", summary="The newest parts, the newest first")
    async def parts(
        limit: Annotated[int, Query(ge=1, le=500)] = 60,
        before: Annotated[int | None, Query(ge=1, lt=2**63, description="a higher id")] = None,
        verdict: Literal["", "good", "review", "reject"] = "",
        model: _Model = "",
    ) -> JSONResponse:
        rows = await read(service.parts, before=before, verdict=verdict, limit=limit, model=model)
        return JSONResponse({"parts": rows})

    @app.get("/v1/parts/{number}", summary="One part")
    async def part(number: _Number) -> dict[str, Any]:
        if rows := await read(service.parts, number=number):
            return rows[0]
        raise HTTPException(404, f"there is no part {number}")

    @app.get("/v1/parts/{number}/heatmap", summary="A part's heatmap, reduced in size")
    async def heatmap(number: _Number) -> Response:
        return _picture(number, await read(service.heatmap, number))

    @app.get("/v1/parts/{number}/photograph", summary="A part's image as a JPEG")
    async def photograph(number: _Number) -> Response:
        return _picture(number, await draw(service.photograph, number))

    @app.post("/v1/parts/{number}/feedback", summary="Judge a part: good or defect")
    def feedback(number: _Number, judgement: Feedback, request: Request) -> dict[str, Any]:
        who = visible(judgement.who or request.user[:80])
        try:
            return service.judge(number, **judgement.model_dump() | {"who": who})
        except DataError as error:
            raise HTTPException(409, str(error)) from None

    @app.get("/v1/counts", summary="Counts of parts since a time, by verdict")
    async def counts(
        since: Annotated[str, Query(description="ISO 8601, in UTC", max_length=40)],
        model: _Model = "",
    ) -> dict[str, int]:
        try:
            begin = in_utc(datetime.fromisoformat(since))
            return await read(service.record.counts, begin, model)
        except (ValueError, OverflowError):
            raise HTTPException(400, f"since can't be {since!r}; give a time in ISO 8601") from None

    @app.get("/report", include_in_schema=False)
    async def last_hours(hours: Annotated[int, Query(ge=1, le=10_000)] = 24) -> Response:
        end = datetime.now().astimezone()  # with its offset: clocks may change in between
        period = Period(end - timedelta(hours=hours), end)
        try:
            pages, _ = await draw(report, service.record.file, period, {})
        except DataError as error:
            raise HTTPException(404, str(error)) from None
        policy = {"Content-Security-Policy": _REPORT_POLICY}  # the page has a stricter one
        return Response(pages[PAGE], media_type="text/html", headers=policy)

    @app.get("/v1/news", summary="A number that changes with each new part and judgement")
    async def news() -> dict[str, int]:
        return {"news": service.news}

    @app.get("/v1/events", summary="That number as server-sent events, each time it changes")
    async def events() -> StreamingResponse:
        # nginx otherwise holds events back until it has 4 kB of them.
        at_once = {"X-Accel-Buffering": "no"}
        return StreamingResponse(_events(service), media_type="text/event-stream", headers=at_once)


async def _events(service: InspectionService) -> AsyncIterator[str]:
    sent = 0
    while not service.stopping:
        if service.news != sent:
            sent = service.news
            yield f"data: {sent}\n\n"
        await asyncio.sleep(0.5)


def _picture(number: int, picture: bytes | None) -> Response:
    """A JPEG as a response, or status 404."""
    if picture is None:
        raise HTTPException(404, f"no picture of part {number} is kept")
    kept = {"Cache-Control": "private, max-age=86400, immutable"}
    return Response(picture, media_type="image/jpeg", headers=kept)
