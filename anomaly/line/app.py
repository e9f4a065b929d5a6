"""The HTTP routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Body, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field

from anomaly.errors import AnomalyError, DataError, nearest, visible
from anomaly.line.models import BusyError, ModelSlot
from anomaly.line.record import in_utc
from anomaly.line.report import PAGE, Period, report
from anomaly.line.server import author
from anomaly.line.service import STOPPING, InspectionService
from anomaly.runtime import __version__

_T = TypeVar("_T")

# Beginnings of a form, of JSON, of an address that holds the data, of a PNG or JPEG as base64.
_TEXT = (b"--", b"{", b"[", b'"', b"data:", b"iVBOR", b"/9j/")
_START = 64
_IS_TEXT = (
    "the body is a form or text (JSON or base64), not an image file; send the file as it is: "
    "curl --data-binary @part.png"
)
_ANSWER_SECONDS = 60.0
_LONGEST_NAME = 255
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_Include = Literal["heatmap", "mask", "regions"]
Number = Annotated[int, Path(ge=1, lt=2**63, description="id of the part")]


_Model = Annotated[str, Query(description="only parts of this model", max_length=300)]


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
    app.add_exception_handler(RequestValidationError, _misunderstood)
    app.add_exception_handler(AnomalyError, _in_trouble)
    _score_routes(app, service)
    _model_routes(app, service)
    _part_routes(app, service)
    rooms = ("anomaly.line", "anomaly.report")
    app.mount("/", StaticFiles(packages=[(room, "assets") for room in rooms], html=True))
    return app


async def _misunderstood(request: Request, error: Exception) -> Response:
    """400 for an invalid parameter; 422 is for images that can't be scored."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return JSONResponse({"detail": f"{where}: {first['msg']}"}, 400)


async def _in_trouble(request: Request, error: Exception) -> Response:
    """503: the record can't be read or written, or too many parts or clients are waiting."""
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
            raise BusyError(STOPPING)
        has_none = slot.now and slot.now.model.thresholds is None
        if has_none and {"mask", "regions"} & {*include}:
            reason = f"{name} has no thresholds, so it has no masks or regions"
            raise HTTPException(400, reason)
        data = await anext(request.stream())  # the server passes it whole
        if data[:_START].lstrip().startswith(_TEXT):
            raise HTTPException(415, _IS_TEXT)
        filename = _shown_name(request.query_params.get("name", ""))
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                part = asyncio.wrap_future(slot.submit(data, filename, include))
                answer = await asyncio.shield(part)
        except TimeoutError:
            raise HTTPException(504, "no answer in time; the part will still be recorded") from None
        return JSONResponse(answer, 200 if answer["status"] == "ok" else 422)


def _slot(service: InspectionService, name: str) -> ModelSlot:
    if name not in service.models:
        known = nearest(name, service.models)
        raise HTTPException(404, f"there is no model {_shown_name(name)!r}; {known}")
    return service.models[name]


def _shown_name(name: str) -> str:
    """A client's name for an image, on one line without control characters."""
    return visible(name[:_LONGEST_NAME])[:_LONGEST_NAME]


def _model_routes(app: FastAPI, service: InspectionService) -> None:
    look, check = InTurn(), InTurn()

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

    async def __call__(self, function: Callable[..., _T], *arguments: object) -> _T:
        """The function's result."""
        await self._turn.acquire()
        begun = time.monotonic()
        try:
            return await asyncio.to_thread(function, *arguments)
        finally:
            asyncio.get_running_loop().call_later(time.monotonic() - begun, self._turn.release)


def _part_routes(app: FastAPI, service: InspectionService) -> None:
    read, draw = InTurn(), InTurn()

    @app.get("/v1/parts", summary="The newest parts, the newest first")
    async def parts(
        limit: Annotated[int, Query(ge=1, le=500)] = 60,
        before: Annotated[int | None, Query(ge=1, lt=2**63, description="a higher id")] = None,
        verdict: Literal["", "good", "review", "reject"] = "",
        model: _Model = "",
    ) -> JSONResponse:
        found = await read(service.parts, before, verdict, limit, model)
        return JSONResponse({"parts": found})

    @app.get("/v1/parts/{number}", summary="One part")
    async def part(number: Number) -> dict[str, Any]:
        if (row := await read(service.part, number)) is None:
            raise HTTPException(404, f"there is no part {number}")
        return row

    @app.get("/v1/parts/{number}/heatmap", summary="A part's heatmap, reduced in size")
    async def heatmap(number: Number) -> Response:
        return _picture(number, await read(service.heatmap, number))

    @app.get("/v1/parts/{number}/photograph", summary="A part's image as a JPEG")
    async def photograph(number: Number) -> Response:
        return _picture(number, await draw(service.photograph, number))

    @app.post("/v1/parts/{number}/feedback", summary="Judge a part: good or defect")
    def feedback(
        number: Number, judgement: Annotated[Feedback, Body()], request: Request
    ) -> dict[str, Any]:
        try:
            who = author(request.headers.get("authorization", ""), judgement.who)
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
        end = datetime.now().astimezone()  # a length in hours, whatever the clocks do
        period = Period(end - timedelta(hours=hours), end)
        try:
            pages, _ = await draw(report, service.record.file, period, {})
        except DataError as error:
            raise HTTPException(404, str(error)) from None
        policy = {"Content-Security-Policy": _REPORT_POLICY}  # the page's own one says which style
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
    shown = 0
    while not service.stopping:
        if service.news != shown:
            shown = service.news
            yield f"data: {shown}\n\n"
        await asyncio.sleep(0.5)


def _picture(number: int, picture: bytes | None) -> Response:
    if picture is None:
        raise HTTPException(404, f"no picture of part {number} is kept")
    kept = {"Cache-Control": "private, max-age=86400, immutable"}
    return Response(picture, media_type="image/jpeg", headers=kept)
