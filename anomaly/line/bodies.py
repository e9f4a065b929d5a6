"""A request's body -> an image file's bytes, within limits of length, time and memory."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from anomaly.line.slot import Limits

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
            length = headers.get(b"content-length", "")
            if not length.isdecimal():
                return 411, "the length of the body has to be said", []
            if int(length) > _SHORT_BYTES:
                return 413, f"the body is longer than {_SHORT_BYTES} bytes, which is the limit", []
        return None

    def _may(self, headers: Mapping[bytes, str]) -> bool:
        token = credentials(headers.get(b"authorization", ""))[1]
        return hmac.compare_digest(token.encode(), self._token.encode())


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


LONGEST_NAME = 255
_LINGER_SECONDS = 1.0


class Bodies:
    """Receives bodies; all requests share one.

    Args:
        limits: what they may take.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0

    @contextmanager
    def holding(self) -> Iterator[Body]:
        """A body to be received; what it holds counts until this is left."""
        body = Body(self)
        try:
            yield body
        finally:
            self.held -= body.held


class Body:
    """One request's body."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._limits = bodies._limits
        self.held = 0

    async def image(self, request: Request) -> tuple[bytes, str]:
        """The image file's bytes, and what the client calls it.

        Raises:
            HTTPException: 400 for a form without a file, 408 for a body that doesn't come, 413 for
                one that is too long, 503 where too much is held already.
        """
        kind = request.headers.get("content-type", "")
        data = await self._received(request)
        name = request.query_params.get("name", "")
        if kind.lower().startswith("multipart/"):
            data, name_there = file_in_form(kind, data)
            name = name or name_there
        return data, shown_name(name)

    async def _received(self, request: Request) -> bytes:
        most = self._limits.body_bytes
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            await _linger(request)
            raise _too_long(most)
        chunks = []
        try:
            async with asyncio.timeout(self._limits.receive_seconds):
                async for chunk in request.stream():
                    self._hold(len(chunk))
                    if self.held > most:
                        break
                    chunks.append(chunk)
        except TimeoutError:
            seconds = self._limits.receive_seconds
            raise _closing(408, f"the body wasn't there within {seconds:g} s") from None
        except ClientDisconnect:
            raise _closing(400, "the connection was closed before the body was there") from None
        if self.held > most:
            chunks.clear()
            await _linger(request)
            raise _too_long(most)
        return b"".join(chunks)

    def _hold(self, count: int) -> None:
        self.held += count
        self._bodies.held += count
        if self._bodies.held > self._limits.held_bytes:
            error = _closing(503, "too many bytes of images wait already; try again in 1 s")
            error.headers = {**(error.headers or {}), "Retry-After": "1"}
            raise error


async def _linger(request: Request) -> None:
    """Let a client that is still sending come to where it reads the answer, for a moment."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_LINGER_SECONDS):
            async for _ in request.stream():
                pass


def _too_long(most: int) -> HTTPException:
    return _closing(413, f"the body is longer than {most / 1e6:g} MB, which is the limit")


def _closing(status: int, message: str) -> HTTPException:
    """An answer to a request whose rest isn't read any more."""
    return HTTPException(status, message, {"Connection": "close"})


def file_in_form(content_type: str, body: bytes) -> tuple[bytes, str]:
    """The file of a multipart/form-data body, and its name (RFC 7578, RFC 2046).

    That of the field `image`, or the only one.

    Raises:
        HTTPException: 400: there is none, or more than one that may be meant.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    files: list[tuple[str, bytes, str]] = []
    if isinstance(boundary, str) and boundary:
        pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("utf-8", "replace"))
        for piece in pieces[1:]:
            if piece.startswith(b"--"):
                break
            head, blank, content = piece.partition(b"\r\n\r\n")
            field, name = _file_names(head)
            if blank and name is not None:
                files.append((field, content, name))
    meant = [file for file in files if file[0] == "image"] or files
    if len(meant) > 1:
        raise HTTPException(
            400, f"the form holds {len(meant)} files; send each by itself, as -F image=@part.png"
        )
    if meant:
        return meant[0][1:]
    raise HTTPException(400, "the form holds no file; send one as -F image=@part.png, or the bytes")


def _file_names(head: bytes) -> tuple[str, str | None]:
    """The field and the file name in a part's headers; None where the part is no file."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            header = Message()
            header["Content-Disposition"] = " ".join(value.split())
            field = header.get_param("name", "", "content-disposition")
            filename = header.get_filename()
            return str(field), None if filename is None else str(filename)
    return "", None


def shown_name(name: str) -> str:
    """What a client calls an image, as text on one line: no character in it controls anything."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in name[:LONGEST_NAME])
    return shown[:LONGEST_NAME]
