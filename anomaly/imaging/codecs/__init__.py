"""The picture formats that can be read, told apart by content, never by a file's name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol

from anomaly.imaging.codecs import bmp, jpeg, png, tiff, webp
from anomaly.imaging.codecs.base import ImageHeader, Pixels, damaged, unsupported

__all__ = ["FORMATS", "HEAD_BYTES", "Format", "ImageHeader", "Pixels", "identify"]


class Format(Protocol):
    """What each format's module does. Both raise ImageError, without the file's name."""

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

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"II+\0", "tiff"),
    (b"MM\0+", "tiff"),
)
_OTHERS = (
    (b"GIF8", "a GIF"),
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
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return FORMATS["webp"]
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return FORMATS[name]
    if not head:
        raise damaged("it is empty")
    if not any(head):
        raise damaged("it starts with zeros only, as files do whose writing was interrupted")
    if kind := _other_kind(head):
        raise unsupported(f"it is {kind}, not a PNG, JPEG, BMP, TIFF or WebP picture")
    raise damaged("it isn't a PNG, JPEG, BMP, TIFF or WebP picture, or its first bytes are damaged")


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
