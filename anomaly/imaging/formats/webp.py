"""WebP, still pictures, lossy and lossless, decoded by OpenCV's libwebp."""

from __future__ import annotations

import re
import struct
from contextlib import suppress

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    damaged,
    decode_by_opencv,
    exif_orientation,
    to_rgb,
    unsupported,
    upright,
)

NAME = "WebP"
SUFFIXES: tuple[str, ...] = (".webp",)
SIGNATURE = re.compile(rb"RIFF.{4}WEBP", re.DOTALL)

_ALPHA, _EXIF = 0x10, 0x08  # bits of VP8X (RFC 9649, section 2.7.1)


def read_header(data: bytes) -> ImageHeader:
    """Read the header; the file must be as long as it says it is."""
    chunks = _chunks(data)
    if b"ANIM" in chunks:
        raise unsupported("it is an animated WebP; save the frame to inspect as a file of its own")
    size, alpha, _ = _picture(data, chunks)
    if extended := data[chunks.get(b"VP8X", slice(0))]:
        # A lossless picture has its alpha inside, and may be promised one that it doesn't need.
        promised = extended[0] & _ALPHA and not (b"VP8L" in chunks and not alpha)
        if bool(promised) != alpha or (extended[0] & _EXIF and b"EXIF" not in chunks):
            raise damaged("its WebP header and its alpha or EXIF data contradict each other")
    orientation = exif_orientation(data[chunks.get(b"EXIF", slice(0))])
    return ImageHeader(
        format="webp",
        mode="rgba8" if alpha else "rgb8",
        size=upright(size, orientation),
        full_scale=255.0,
        orientation=orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    size, _, end = _picture(data, _chunks(data))
    # A file that ends with the picture: libwebp would read on into what follows.
    body = data[8:end] + bytes(end % 2)
    file = b"RIFF" + struct.pack("<I", len(body)) + body
    return to_rgb(decode_by_opencv(file, size))


def _chunks(data: bytes) -> dict[bytes, slice]:
    """Place of the first chunk of each type; raises unless all chunks are whole."""
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise damaged(f"it is cut short: {len(data)} of {end} bytes are there")
    chunks: dict[bytes, slice] = {}
    at = 12
    while at < end:
        content = slice(at + 8, at + 8 + int.from_bytes(data[at + 4 : at + 8], "little"))
        if content.stop > end:
            raise damaged("it is cut short inside a WebP chunk")
        chunks.setdefault(data[at : at + 4], content)
        at = content.stop + content.stop % 2
    return chunks


def _picture(data: bytes, chunks: dict[bytes, slice]) -> tuple[tuple[int, int], bool, int]:
    """Size (H, W) of the picture itself, whether it has alpha, and where it ends."""
    with suppress(struct.error):
        if lossy := chunks.get(b"VP8 "):
            width, height = struct.unpack_from("<HH", data, lossy.start + 6)
            alpha = chunks.get(b"ALPH", lossy).start < lossy.start
            return (height & 0x3FFF, width & 0x3FFF), alpha, lossy.stop
        if lossless := chunks.get(b"VP8L"):
            (bits,) = struct.unpack_from("<I", data, lossless.start + 1)
            size = (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
            return size, bool(bits >> 28 & 1), lossless.stop
    raise damaged("it holds no WebP picture")
