"""Who may ask, and how much they may say before an image is asked for."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_SHORT_BYTES = 65_536  # of whatever isn't an image
_OPEN = ("/v2/health/live", "/v2/health/ready")  # a supervisor has no token


class Guard:
    """Answers what isn't allowed, and lets pass what is.

    Without a token only this machine can ask: the server listens on loopback, and a host name
    that isn't loopback's is refused, with which a page could reach it by a name of its own.

    Args:
        app: the ASGI application behind it.
        token: as `Authorization: Bearer TOKEN`, or as the password that a browser asks for; empty
            for none.
    """

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]], token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] == "http" and (refused := self._refused(scope)):
            status, message, headers = refused
            body = b'{"detail":"' + message.encode() + b'"}'
            fixed = [(b"content-type", b"application/json"), (b"connection", b"close")]
            length = (b"content-length", str(len(body)).encode())
            start = {"type": "http.response.start", "status": status}
            await send({**start, "headers": [*fixed, length, *headers]})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        host = headers.get(b"host", "")
        if not self._token and not is_loopback(_netloc(f"//{host}")[1]):
            return 403, "without a token only this machine may ask, as localhost", []
        origin = headers.get(b"origin")
        if origin is not None and _netloc(origin)[0] != host:
            return 403, "pages of other sites may not ask", []
        if self._token and scope["path"] not in _OPEN and not self._may(headers):
            ask = (b"www-authenticate", b'Basic realm="anomaly", charset="UTF-8"')
            return 401, "the token is missing or wrong", [ask]
        if scope["method"] not in ("GET", "HEAD") and not scope["path"].endswith("/score"):
            told = headers.get(b"content-length", "")
            if not told.isdecimal():
                return 411, "the length of the body has to be said", []
            if int(told) > _SHORT_BYTES:
                return 413, f"the body is longer than {_SHORT_BYTES} bytes, which is the limit", []
        return None

    def _may(self, headers: Mapping[bytes, str]) -> bool:
        given = credentials(headers.get(b"authorization", ""))[1]
        return hmac.compare_digest(given.encode(), self._token.encode())


def credentials(authorization: str) -> tuple[str, str]:
    """The user's name and the token in an Authorization header; empty where there are none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return "", value.strip()
    if scheme.lower() == "basic":
        try:
            user, _, token = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return "", ""
        return user, token
    return "", ""


def _netloc(address: str) -> tuple[str, str]:
    """Host and port together, and the host alone; empty where an address makes no sense."""
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
