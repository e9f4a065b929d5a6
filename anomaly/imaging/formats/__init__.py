"""The picture formats that can be read, told apart by content, never by a file's name.

Another format is a module that has what `Format` lists, and a line in `FORMATS`.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Protocol

from anomaly.imaging.formats import bmp, jpeg, png, tiff, webp
from anomaly.imaging.formats.base import ImageHeader, Pixels, damaged, unsupported

__all__ = ["FORMATS", "HEAD_BYTES", "Format", "ImageHeader", "Pixels", "identify"]


class Format(Protocol):
    """What each format's module has. Both functions raise ImageError, without the file's name.

    Attributes:
        NAME: what messages call it.
        SUFFIXES: how such files' names end.
        SIGNATURE: matches the first bytes of such a file.
    """

    NAME: str
    SUFFIXES: tuple[str, ...]
    SIGNATURE: re.Pattern[bytes]

    def read_header(self, data: bytes) -> ImageHeader:
        """Read what the file says about its picture, without decoding it."""
        ...

    def decode(self, data: bytes) -> Pixels:
        """Decode RGB pixels (H, W, 3) as stored, orientation not applied."""
        ...


FORMATS: MappingProxyType[str, Format] = MappingProxyType(
    {"png": png, "jpeg": jpeg, "bmp": bmp, "tiff": tiff, "webp": webp}
)
HEAD_BYTES = 64

_OTHERS = (
    (b"GIF8", "a GIF"),
    (b"II+\0", "a BigTIFF picture"),
    (b"MM\0+", "a BigTIFF picture"),
    (b"%PDF", "a PDF document"),
    (b"8BPS", "a Photoshop document"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (b"\x76\x2f\x31\x01", "an OpenEXR picture"),
    (b"#?RADIANCE", "a Radiance HDR picture"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\0\0\x01\0", "a Windows icon"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
)


def identify(head: bytes) -> Format:
    """Tell a file's format by its first `HEAD_BYTES` bytes.

    Raises:
        ImageError: `unsupported` for other known kinds of file, else `unreadable`.
    """
    for known in FORMATS.values():
        if known.SIGNATURE.match(head):
            return known
    if not head:
        raise damaged("it is empty")
    if not any(head):
        raise damaged("it starts with zeros only, as files do whose writing was interrupted")
    *names, last = (known.NAME for known in FORMATS.values())
    most = ", ".join(names)
    if kind := _other_kind(head):
        raise unsupported(f"it is {kind}, not a {most} or {last} picture")
    raise damaged(f"it isn't a {most} or {last} picture, or its first bytes are damaged")


def _other_kind(head: bytes) -> str | None:
    for signature, kind in _OTHERS:
        if head.startswith(signature):
            return kind
    if head[4:8] == b"ftyp":
        pictures = {b"hei": "a HEIC picture", b"mif": "a HEIF picture", b"avi": "an AVIF picture"}
        return pictures.get(head[8:11], "a video")
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        text = head[: error.start].decode() if error.start >= len(head) - 3 else "\0"
    if text.isprintable() or text.translate(dict.fromkeys(map(ord, "\r\n\t\f"))).isprintable():
        return "a text file"
    return None
