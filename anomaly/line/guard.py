"""Checks before a request reaches its route: who asks, and size and speed of its body."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from anomaly.errors import visible

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_OPEN = ("/v2/health/live", "/v2/health/ready")  # for supervisors, which have no token
_ALWAYS = (*_OPEN, "/metrics")  # answered even when too many clients are connected
_PAGE_HEADER = b"x-requested-with"  # sent by our page's scripts, see line.js
_LINGER_SECONDS = 1.0
_HEADER_CHARACTERS = 1000
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


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        body_bytes: of one image file.
        short_bytes: of any other body.
        held_bytes: of all images being received or waiting to be scored.
        receive_seconds: until a body is complete.
        begin_seconds: after which a body has to come at `bytes_a_second` at least.
        answer_seconds: until a part is answered.
        waiting_parts: parts in progress of each model.
    """

    body_bytes: int = 64_000_000
    short_bytes: int = 64_000
    held_bytes: int = 512_000_000
    receive_seconds: float = 30.0
    begin_seconds: float = 5.0
    bytes_a_second: int = 1000
    answer_seconds: float = 60.0
    waiting_parts: int = 64

    @classmethod
    def of(cls, body_bytes: int) -> Limits:
        """Limits that let one image file of `body_bytes` be scored while another waits."""
        return cls(body_bytes, held_bytes=max(cls.held_bytes, 2 * body_bytes))


class Guard:
    """Refuses requests that aren't allowed, by the same rules for all routes.

    Without a token only this machine can ask: the server listens on loopback, and other host names
    are refused, so that no web page can reach it by a name of its own.
    Bodies reach a route whole; images to score arrive piece by piece.

    Args:
        app: the ASGI application behind it.
        token: shown as `Authorization: Bearer TOKEN`, or as the password that a browser asks for
            beside a name; empty for none, and only this machine may ask.
        limits: of bodies.
        count: called with the status of each answer.
    """

    def __init__(
        self,
        app: Callable[[Any, Any, Any], Awaitable[None]],
        token: str,
        limits: Limits | None = None,
        count: Callable[[int], object] = lambda status: None,
    ) -> None:
        self._app = app
        self._token = token
        self._limits = limits or Limits()
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        image = scope["method"] == "POST" and scope["path"].endswith("/score")
        most = self._limits.body_bytes if image else self._limits.short_bytes
        body = _Body(receive, headers, most, self._limits)
        leaves = False

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
                own_headers = dict(message["headers"])
                if leaves or not body.ended:
                    own_headers[b"connection"] = b"close"
                message = {**message, "headers": list((_SAFE | own_headers).items())}
            elif not message.get("more_body", False) and not body.ended:
                await send({**message, "more_body": True})
                await body.linger()
                message = {"type": "http.response.body"}
            await send(message)

        try:
            body.welcome = self._welcome(scope, headers)
            connection = scope.get("state", {}).get("connection")
            leaves = not body.welcome or not (connection is None or connection.let_in())
            if scope["path"] not in _ALWAYS:
                if leaves:
                    raise refusal(503, "too many clients are connected; try again in 1 s")
                if connection is not None:
                    await connection.turns.come()
            check_charset(headers.get(b"content-type", ""))
            body.check_head()
            if not image:
                await body.read()
            await self._app(scope, body.receive, answer)
        except HTTPException as refused:
            response = JSONResponse(
                {"detail": refused.detail}, refused.status_code, refused.headers
            )
            await response(dict(scope), receive, answer)
        except ClientDisconnect:
            pass

    def _welcome(self, scope: Scope, headers: Mapping[bytes, str]) -> bool:
        """Whether the request has access; False for a supervisor without a token."""
        host = headers.get(b"host", "")
        if not self._token and not is_loopback(_netloc(f"//{host}")[1]):
            raise refusal(403, "without a token only this machine may ask, as localhost")
        if _is_of_another_site(scope, headers, host):
            raise refusal(403, "requests from pages of other sites are refused")
        shown = credentials(headers.get(b"authorization", ""))[1]
        if not self._token or hmac.compare_digest(shown.encode(), self._token.encode()):
            return True
        if scope["path"] in _OPEN:
            return False
        ask = {"WWW-Authenticate": 'Basic realm="anomaly", charset="UTF-8"'}
        raise refusal(401, "the token is missing or wrong", ask)


class _Body:
    """One request's body as it comes, within limits of length and time.

    Attributes:
        ended: whether all of it has arrived.
        welcome: whether to wait for its client.
    """

    def __init__(
        self, receive: Receive, headers: Mapping[bytes, str], most: int, limits: Limits
    ) -> None:
        self._receive, self._headers = receive, headers
        self._most, self._limits = most, limits
        self._begun = asyncio.get_running_loop().time()
        self._count = 0
        self._whole: bytes | None = None  # the whole body, after `read`
        self._late = False
        self.welcome = False
        length = headers.get(b"content-length", "0")
        self.ended = b"transfer-encoding" not in headers and length == "0"

    def check_head(self) -> None:
        """Refuse a body by what its headers say."""
        length = self._headers.get(b"content-length")
        if length is None:
            return
        if b"transfer-encoding" in self._headers:
            raise refusal(
                400,
                "Content-Length and Transfer-Encoding contradict each other; send one of the two",
            )
        if int(length) > self._most:  # h11 has seen that it is a number
            raise self._too_long()

    async def read(self) -> None:
        """Receive a short body whole."""
        pieces = []
        while not self.ended:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            pieces.append(message.get("body", b""))
        self._whole = b"".join(pieces)

    async def receive(self) -> Any:
        """The next piece, as an ASGI message.

        Raises:
            HTTPException: 408 for a body that comes too slowly, 413 for one that is too long.
        """
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return {"type": "http.request", "body": whole, "more_body": False}
        if self.ended:
            return await self._receive()
        limits = self._limits
        end = limits.begin_seconds + self._count / limits.bytes_a_second
        try:
            async with asyncio.timeout_at(self._begun + min(end, limits.receive_seconds)):
                message = await self._receive()
        except TimeoutError:
            self._late = True
            raise refusal(
                408,
                "the body arrived too slowly: it must be complete within "
                f"{limits.receive_seconds:g} s and, after {limits.begin_seconds:g} s, arrive at "
                f"{limits.bytes_a_second} bytes a second or more",
            ) from None
        self._count += len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        if self._count > self._most:
            raise self._too_long()
        return message

    async def linger(self) -> None:
        """Read on briefly, until a client that is still sending reads the answer.

        A connection that is closed while data arrives is reset, and the answer is lost.
        """
        if not self.welcome or self._late:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while not self.ended:
                    self.ended = not (await self._receive()).get("more_body", False)

    def _too_long(self) -> HTTPException:
        most = self._most
        shown = f"{most / 1e6:g} MB" if most >= 1e6 else f"{most / 1e3:g} kB"
        return refusal(413, f"the body is longer than {shown}, which is the limit")


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> HTTPException:
    """An answer after which the connection is closed."""
    retry = {"Retry-After": "1"} if status == 503 else {}
    return HTTPException(status, message, {"Connection": "close", **retry, **(headers or {})})


def check_charset(content_type: str) -> None:
    """Refuse a content type with an unknown charset; `binary` is allowed for images.

    Raises:
        HTTPException: 400.
    """
    charset = parse_options_header(content_type[:_HEADER_CHARACTERS])[1].get("charset", "utf-8")
    try:
        if charset.lower() != "binary":
            b"-".decode(charset)
    except UnicodeDecodeError:
        pass  # it is known
    except (LookupError, ValueError):  # ValueError: a name with a null in it
        raise refusal(400, f"the charset {charset[:40]!r} isn't known; send UTF-8") from None


def author(request: Request, typed: str) -> str:
    """Author of a judgement: the typed name, else the name given beside the token."""
    login = credentials(request.headers.get("authorization", ""))[0]
    return visible((typed.strip() or login)[:80])


def credentials(authorization: str) -> tuple[str, str]:
    """Name and token in an Authorization header; a bearer's token has no name."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return "", value.strip()
    if scheme.lower() == "basic":
        with suppress(ValueError):
            user, _, token = base64.b64decode(value, validate=True).decode().partition(":")
            return user, token
    return "", ""


def _is_of_another_site(scope: Scope, headers: Mapping[bytes, str], host: str) -> bool:
    """True if the browser says that a page of another site asks.

    Links to the page itself may be followed. Over plain HTTP browsers name the origin alone, and a
    proxy may have put its own host in: a header of our page's then tells it from others, whose
    browsers would first ask here whether they may send it. Scripts hold no data.
    """
    if site := headers.get(b"sec-fetch-site"):
        is_page = scope["method"] == "GET" and scope["path"] == "/"
        link = is_page and headers.get(b"sec-fetch-mode") == "navigate"
        return site not in ("same-origin", "none") and not link
    origin = headers.get(b"origin")
    own = _PAGE_HEADER in headers or scope["path"].endswith(".js")
    return origin is not None and _netloc(origin)[0] != host and not own


def _netloc(address: str) -> tuple[str, str]:
    """Host and port together, and the host alone; empty for an invalid address."""
    try:
        parts = urlsplit(address)
        return parts.netloc, parts.hostname or ""
    except ValueError:
        return "", ""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
