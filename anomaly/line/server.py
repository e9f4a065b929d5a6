"""The HTTP server: uvicorn, behind checks of the client, and of a body's size and time.

It is for this machine, or for a proxy in front of it (docker/nginx.conf): slow clients and the
number of connections are the proxy's job.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from anomaly.errors import AnomalyError, why
from anomaly.line.service import InspectionService

App = Callable[[Any, Any, Any], Awaitable[None]]

_MOST_AT_ONCE = 256  # requests in progress; health and figures are always answered
_IDLE_SECONDS = 15  # until a connection without a request is closed
_HEAD_BYTES = 32768
_IMAGE_BYTES = 256_000_000  # of an image file
_SHORT_BYTES = 64_000  # of any other body
_HELD_BYTES = 512_000_000  # of all bodies being received or waiting for their answers
_RECEIVE_SECONDS = 30.0  # until a body is complete
_DRAIN_SECONDS = 1.0  # for the rest of a refused body
_LAST_SECONDS = 3  # after a stop, until waiting parts are refused; then for slow clients
_MOST_LAST_SECONDS = 60  # after a stop, for parts whose decoding has begun
_OPEN = ("/v2/health/live", "/v2/health/ready")  # for supervisors, which have no token
_ALWAYS = (*_OPEN, "/metrics")
_PAGE_HEADER = b"x-requested-with"  # of the page's requests, see line.js
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFE = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}


def listening(host: str, port: int) -> socket.socket:
    """A listening socket for the service; port 0 takes any free port.

    Raises:
        AnomalyError: the address can't be listened at.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = why(error) if isinstance(error, OSError) else "the address is invalid"
        reason = reason.partition(" (")[0]  # behind it Python repeats the address
        raise AnomalyError(
            f"can't listen at {host}, port {port} ({reason}); give another --host or --port"
        ) from None


def serve(
    app: App,
    service: InspectionService,
    listener: socket.socket,
    token: str,
    stopped: Callable[[], bool],
) -> None:
    """Answer requests until `stopped` returns true, which is asked ten times a second.

    Accepted parts are finished, see `_Server`. `service` is entered; for `token` see `Guard`.
    """
    config = uvicorn.Config(
        Guard(app, token, service),
        http="h11",
        log_config=None,
        log_level="error",  # a warning for each bad request would let anybody fill the log
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    asyncio.run(_Server(config, service, stopped).serve([listener]))


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the command.

    Once stopped, it refuses new parts, and after some seconds waiting ones; parts whose decoding
    has begun are answered, unless one takes a minute.
    """

    def __init__(
        self, config: uvicorn.Config, service: InspectionService, stopped: Callable[[], bool]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._stopped = stopped

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Change no signal handler: the command has its own."""
        yield

    async def on_tick(self, counter: int) -> bool:
        return self._stopped() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish accepted parts as far as the class promises, then close all connections."""
        begun = time.monotonic()
        self._service.stopping = True
        while self._service.waiting and (past := time.monotonic() - begun) < _MOST_LAST_SECONDS:
            if past > _LAST_SECONDS:
                self._service.refuse_waiting()
            await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(_LAST_SECONDS, self._leave_slow_clients)
        await super().shutdown(sockets)

    def _leave_slow_clients(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class Guard:
    """Refuses requests that aren't allowed, by the same rules for all routes.

    Without a token only this machine can ask: the server listens on loopback, and other host names
    are refused, so that no web page can reach it by a name of its own. A body reaches its route
    whole, and the name that a browser's user gave beside the token as `request.user`.

    Args:
        token: sent as `Authorization: Bearer TOKEN`, or as the password that a browser asks for;
            empty for none, and only this machine may ask.
        service: counts the bytes held.
    """

    def __init__(self, app: App, token: str, service: InspectionService) -> None:
        self._app = app
        self._token = token
        self._service = service
        self._in_progress = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it; the ASGI protocol."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        admitted, pieces = False, list[bytes]()

        async def answer(message: Any) -> None:  # with headers for a browser's safety
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*(_SAFE | dict(message["headers"])).items()]}
            await send(message)

        self._in_progress += 1
        try:
            self._admit(scope, headers)
            admitted = True
            await self._read(scope, headers, receive, pieces)
            whole = iter([{"type": "http.request", "body": pieces[0]}])

            async def receive_whole() -> Any:  # then only the client's end can come
                return next(whole, None) or await receive()

            await self._app(scope, receive_whole, answer)
        except HTTPException as refused:
            # A connection closed while a body arrives is reset, and the client gets no answer. A
            # body from a stranger, or one that has come too slowly, isn't waited for.
            if admitted and refused.status_code != 408:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DRAIN_SECONDS):
                        while (await receive()).get("more_body", False):
                            pass
            close = {"Connection": "close", **(refused.headers or {})}
            response = JSONResponse({"detail": refused.detail}, refused.status_code, close)
            await response(scope, receive, answer)
        except ClientDisconnect:
            pass
        finally:
            self._in_progress -= 1
            self._service.held -= sum(map(len, pieces))

    def _admit(self, scope: Any, headers: Mapping[bytes, str]) -> None:
        """Refuse clients without access, and while too many ask, all but health and figures.

        The user's name goes into `scope`.
        """
        host = headers.get(b"host", "")
        if not self._token and not is_loopback(_hostname(host)):
            raise HTTPException(403, "without a token only this machine may ask, as localhost")
        if _is_of_another_site(scope, headers, host):
            raise HTTPException(403, "requests from pages of other sites are refused")
        scope["user"], shown = _credentials(headers.get(b"authorization", ""))
        known = not self._token or hmac.compare_digest(shown.encode(), self._token.encode())
        if not known and scope["path"] not in _OPEN:
            ask = {"WWW-Authenticate": 'Basic realm="anomaly", charset="UTF-8"'}
            raise HTTPException(401, "the token is missing or wrong", ask)
        if self._in_progress > _MOST_AT_ONCE and scope["path"] not in _ALWAYS:
            raise _busy("too many requests are in progress")

    async def _read(
        self, scope: Any, headers: Mapping[bytes, str], receive: Any, pieces: list[bytes]
    ) -> None:
        """Receive a request's body as one piece, which counts as held from its first bytes on.

        `pieces`, an empty list, gets the body, or what came before an error.

        Raises:
            HTTPException: 408, 413 or 503: too slow, too long, or too many bytes are held.
        """
        image = scope["method"] == "POST" and scope["path"].endswith("/score")
        most = _IMAGE_BYTES if image else _SHORT_BYTES
        limit = f"{most / 1e6:g} MB" if most >= 1e6 else f"{most / 1e3:g} kB"
        too_long = HTTPException(413, f"the body is longer than {limit}, which is the limit")
        if int(headers.get(b"content-length", 0)) > most:  # h11 has seen that it is a number
            raise too_long
        left = most
        more = True
        try:
            async with asyncio.timeout(_RECEIVE_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    pieces.append(message["body"])
                    left -= len(pieces[-1])
                    self._service.held += len(pieces[-1])
                    if left < 0:
                        raise too_long
                    if self._service.held > _HELD_BYTES:
                        raise _busy("too many images are waiting")
                    more = message["more_body"]
        except TimeoutError:
            reason = f"the body must be complete within {_RECEIVE_SECONDS:g} s"
            raise HTTPException(408, reason) from None
        pieces[:] = [b"".join(pieces)]


def _busy(reason: str) -> HTTPException:
    return HTTPException(503, f"{reason}; try again in 1 s", {"Retry-After": "1"})


def _credentials(authorization: str) -> tuple[str, str]:
    """Name and token in an Authorization header; empty where it holds none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return "", value.strip()
    if scheme.lower() == "basic":
        with suppress(ValueError):
            user, _, token = base64.b64decode(value, validate=True).decode().partition(":")
            return user, token
    return "", ""


def _is_of_another_site(scope: Any, headers: Mapping[bytes, str], host: str) -> bool:
    """True if the browser says that a page of another site asks.

    Links to the page itself may be followed. Over plain HTTP browsers name the origin alone, and a
    proxy may have put its own name into `host`. A header of our page then tells it from others,
    whose browsers ask the server before they send one. Scripts hold no data.
    """
    if site := headers.get(b"sec-fetch-site"):
        is_page = scope["method"] == "GET" and scope["path"] == "/"
        link = is_page and headers.get(b"sec-fetch-mode") == "navigate"
        return site not in ("same-origin", "none") and not link
    origin = headers.get(b"origin")
    own = _PAGE_HEADER in headers or scope["path"].endswith(".js")
    return origin is not None and origin.partition("://")[2] != host and not own


def _hostname(host: str) -> str:
    """The name or address in a `Host` header, without its port; empty if the header is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses, which other machines can't reach."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
