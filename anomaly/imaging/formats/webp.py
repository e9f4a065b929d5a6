"""WebP, still pictures, lossy and lossless, decoded by OpenCV's libwebp."""

from __future__ import annotations

import re
import struct

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    bgr_to_rgb,
    bgra_over_black,
    damaged,
    decode_by_opencv,
    exif_orientation,
    unsupported,
    upright,
)

NAME = "WebP"
SUFFIXES: tuple[str, ...] = (".webp",)
SIGNATURE = re.compile(rb"RIFF.{4}WEBP", re.DOTALL)

_ANIMATION, _ALPHA, _EXIF = 0x02, 0x10, 0x08  # bits of VP8X (RFC 9649, section 2.7.1)
_MOST_CHUNKS = 10_000


def read_header(data: bytes) -> ImageHeader:
    """Read the header; the file must be as long as it says it is."""
    chunks = _chunks(data)
    flags = int.from_bytes(chunks.get(b"VP8X", b"")[:1], "little")
    if flags & _ANIMATION or b"ANMF" in chunks:
        raise unsupported("it is an animated WebP; save the frame to inspect as a file of its own")
    size, alpha = _picture(chunks)
    _check_promises(chunks, size)
    orientation = exif_orientation(bytes(chunks.get(b"EXIF", b"")))
    return ImageHeader(
        format="webp",
        mode="rgba8" if alpha else "rgb8",
        size=upright(size, orientation),
        full_scale=255.0,
        orientation=orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    chunks = _chunks(data)
    size, _ = _picture(chunks)
    pixels = decode_by_opencv(_bare(chunks, size))
    if pixels is None or pixels.shape[:2] != size or pixels.ndim != 3:
        raise damaged("its pixels can't be decoded")
    return bgr_to_rgb(pixels) if pixels.shape[2] == 3 else bgra_over_black(pixels)


def _chunks(data: bytes) -> dict[bytes, memoryview]:
    """First chunk of each type; raises unless all of them are whole."""
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise damaged(f"it is cut short: {len(data)} of {end} bytes are there")
    chunks: dict[bytes, memoryview] = {}
    at = 12
    for _ in range(_MOST_CHUNKS):
        if at >= end:  # by 1 where padding is missing
            return chunks
        if at + 8 > end:
            raise damaged("the lengths of its WebP chunks don't add up")
        kind, length = struct.unpack_from("<4sI", data, at)
        at += 8
        if at + length > end:
            raise damaged("it is cut short inside a WebP chunk")
        chunks.setdefault(kind, memoryview(data)[at : at + length])
        at += length + length % 2
    raise damaged(f"it is in over {_MOST_CHUNKS} chunks")


def _picture(chunks: dict[bytes, memoryview]) -> tuple[tuple[int, int], bool]:
    """Size (H, W) of the picture itself, and whether it has alpha."""
    lossy, lossless = chunks.get(b"VP8 ", b""), chunks.get(b"VP8L", b"")
    if lossy and lossless:
        raise damaged("it holds two WebP pictures")
    if len(lossy) >= 10 and lossy[3:6] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", lossy, 6))
        if width and height:
            return (height, width), b"ALPH" in chunks
    if len(lossless) >= 5 and lossless[0] == 0x2F:
        (bits,) = struct.unpack_from("<I", lossless, 1)
        return ((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1), bool(bits >> 28 & 1)
    raise damaged("it holds no WebP picture")


def _check_promises(chunks: dict[bytes, memoryview], size: tuple[int, int]) -> None:
    """Raise unless the extended header, where there is one, agrees with the other chunks."""
    extended = chunks.get(b"VP8X")
    if extended is None:
        return
    if len(extended) != 10 or _canvas(size) != extended[4:]:
        raise damaged("its WebP headers contradict each other")
    alpha = b"ALPH" in chunks or b"VP8L" in chunks  # a lossless picture has its alpha inside
    for flag, what, there in ((_ALPHA, "alpha", alpha), (_EXIF, "EXIF", b"EXIF" in chunks)):
        if extended[0] & flag and not there:
            raise damaged(f"its WebP header promises {what} data that isn't there")


def _canvas(size: tuple[int, int]) -> bytes:
    """The last bytes of VP8X: width and height of (H, W), less 1, in 24 bits each."""
    return (size[1] - 1).to_bytes(3, "little") + (size[0] - 1).to_bytes(3, "little")


def _bare(chunks: dict[bytes, memoryview], size: tuple[int, int]) -> bytes:
    """A WebP file of the picture alone: libwebp would read on into what follows a cut picture."""
    parts: list[tuple[bytes, bytes | memoryview]]
    parts = [(kind, chunks[kind]) for kind in (b"VP8L", b"VP8 ") if kind in chunks]
    if parts[0][0] == b"VP8 " and b"ALPH" in chunks:
        extended = bytes([_ALPHA, 0, 0, 0]) + _canvas(size)
        parts = [(b"VP8X", extended), (b"ALPH", chunks[b"ALPH"]), *parts]
    body = b"".join(
        piece
        for kind, content in parts
        for piece in (kind, struct.pack("<I", len(content)), content, bytes(len(content) % 2))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body
