"""A request's body -> an image file's bytes, within limits of memory."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import unquote_to_bytes

from fastapi import HTTPException, Request
from multipart import (
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)
from starlette.requests import ClientDisconnect

from anomaly.errors import ImageError, visible
from anomaly.imaging.read import HEAD_BYTES, identify
from anomaly.line.guard import Limits, check_charset, refusal

LONGEST_NAME = 255
_PARTS = 16  # of a form
_HEADERS = 8  # of a part
_HEADER_BYTES = 2048
_SEND_ONE = "send one as -F image=@part.png"
_STAR = re.compile(r";\s*filename\*\s*=\s*([^\s;]+)", re.IGNORECASE)  # RFC 5987
_TEXT = (b"{", b"[", b'"', b"data:")  # JSON, or an address that holds the data


class Bodies:
    """Receives bodies that hold images; all requests share one instance.

    Args:
        limits: of bytes and time.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0

    @asynccontextmanager
    async def image(self, request: Request) -> AsyncIterator[tuple[bytes, str]]:
        """An image file's bytes and name; the bytes count as held inside the `with` block.

        Raises:
            HTTPException: 400 for a form without a file, 415 for text, 503 if too many bytes are
                held, and what receiving raises.
        """
        kind = request.headers.get("content-type", "")
        form = Form(kind) if kind.lower().startswith("multipart/") else None
        pieces, held = [], 0
        try:
            async for piece in request.stream():
                held += len(piece)
                self.held += len(piece)
                if self.held > self._limits.held_bytes:
                    raise refusal(503, "too many images are waiting; try again in 1 s")
                if form is not None:
                    form.add(piece)
                else:
                    pieces.append(piece)
            data, name = (b"".join(pieces), "") if form is None else form.file()
            if _is_text(data):
                path = shown_name(request.url.path)
                raise HTTPException(
                    415,
                    "the body is text (JSON or base64), not an image file; send the file as it "
                    f"is: curl --data-binary @part.png http://HOST:PORT{path}",
                )
            yield data, shown_name(request.query_params.get("name", "") or name)
        except ClientDisconnect:
            raise refusal(400, "the connection was closed before the body was complete") from None
        finally:
            self.held -= held


def _is_text(data: bytes) -> bool:
    """Whether a body is JSON or an image as base64."""
    start = data[: 4 * HEAD_BYTES].lstrip()
    if start.startswith(_TEXT):
        return True
    code = b"".join(start.split())[:HEAD_BYTES]
    try:
        identify(base64.b64decode(code, validate=True))
    except (ValueError, ImageError):
        return False
    return True


class Form:
    """Parses a multipart/form-data body piece by piece, and keeps its image file (RFC 7578).

    The file is that of the field `image`, or the only one. Other fields are dropped.

    Args:
        content_type: the request's header.

    Raises:
        HTTPException: 400: the form can't be read. All methods raise it.
    """

    def __init__(self, content_type: str) -> None:
        boundary = parse_options_header(content_type[:_HEADER_BYTES])[1].get("boundary", "")
        self._files: list[tuple[str, str, list[bytes]]] = []
        self._kept: list[bytes] | None = None
        try:
            self._parser = PushMultipartParser(
                boundary,
                max_header_size=_HEADER_BYTES,
                max_header_count=_HEADERS,
                max_segment_count=_PARTS,
            )
        except MultipartError as error:
            raise _unreadable(error) from None

    def add(self, piece: bytes) -> None:
        """Parse the next bytes of the body."""
        if self._parser.closed or not piece:
            return
        try:
            for event in self._parser.parse(piece):
                if isinstance(event, MultipartSegment):
                    self._begin(event)
                elif event is not None and self._kept is not None:
                    self._kept.append(event)
        except MultipartError as error:
            raise _unreadable(error) from None

    def file(self) -> tuple[bytes, str]:
        """The file's bytes and name, after the whole body."""
        try:
            self._parser.close()
        except MultipartError as error:
            raise _unreadable(error) from None
        meant = [file for file in self._files if file[0] == "image"] or self._files
        if len(meant) > 1:
            raise HTTPException(
                400,
                f"the form holds {len(meant)} files; send each by itself, as -F image=@part.png",
            )
        if not meant:
            raise HTTPException(400, f"the form holds no file; {_SEND_ONE}, or the bytes")
        return b"".join(meant[0][2]), meant[0][1]

    def _begin(self, part: MultipartSegment) -> None:
        check_charset(part.header("Content-Type", ""))
        name = part.filename
        if name is None and (star := _STAR.search(part["Content-Disposition"])):
            name = _decoded(star[1])
        self._kept = None
        if name is not None:
            self._kept = []
            self._files.append((part.name or "", name, self._kept))


def _unreadable(error: MultipartError) -> HTTPException:
    return refusal(400, f"the form can't be read ({error}); {_SEND_ONE}")


def _decoded(value: str) -> str:
    """A name as RFC 5987 writes it: charset, language, bytes in percent notation."""
    charset, _, rest = value.strip('"').partition("'")
    check_charset(f"; charset={charset}")
    try:
        return unquote_to_bytes(rest.partition("'")[2]).decode(charset, "replace")
    except (LookupError, ValueError):
        raise refusal(400, f"the file's name isn't in {charset!r}; send it in UTF-8") from None


def shown_name(name: str) -> str:
    """A client's name for an image, on one line without control characters."""
    return visible(name[:LONGEST_NAME])[:LONGEST_NAME]
