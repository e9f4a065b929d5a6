"""WebP, still pictures, lossy and lossless, decoded by OpenCV's libwebp."""

from __future__ import annotations

import struct

import cv2
import numpy as np

from anomaly.formats import exif
from anomaly.formats.codecs import decode_by_opencv
from anomaly.formats.colour import bgr_to_rgb, over_black
from anomaly.formats.header import ImageHeader, Pixels, damaged, unsupported, upright

_ANIMATION = 0x02


def read_header(data: bytes) -> ImageHeader:
    """Read the header; the file must be as long as it says it is."""
    chunks = _chunks(data)
    flags = int.from_bytes(chunks.get(b"VP8X", b"")[:1], "little")
    if flags & _ANIMATION or b"ANMF" in chunks:
        raise unsupported("it is an animated WebP; save the frame to inspect as a file of its own")
    size, alpha = _picture(chunks)
    orientation = exif.orientation(bytes(chunks.get(b"EXIF", b"")))
    return ImageHeader(
        format="webp",
        mode="rgba8" if alpha else "rgb8",
        size=upright(size, orientation),
        full_scale=255.0,
        orientation=orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    size, _ = _picture(_chunks(data))
    pixels = decode_by_opencv(data)
    if pixels is None or pixels.shape[:2] != size or pixels.ndim != 3:
        raise damaged("its pixels can't be decoded")
    if pixels.shape[2] == 3:
        return bgr_to_rgb(pixels)
    rgba = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGRA2RGBA, dst=pixels))
    return over_black(rgba[..., :3], rgba[..., 3], 255)


def _chunks(data: bytes) -> dict[bytes, memoryview]:
    """First chunk of each type; raises unless all of them are whole."""
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise damaged(f"it is cut short: {len(data)} of {end} bytes are there")
    found: dict[bytes, memoryview] = {}
    at = 12
    while at + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, at)
        at += 8
        if at + length > end:
            raise damaged("it is cut short inside a WebP chunk")
        found.setdefault(kind, memoryview(data)[at : at + length])
        at += length + length % 2
    return found


def _picture(chunks: dict[bytes, memoryview]) -> tuple[tuple[int, int], bool]:
    """Size (H, W) of the picture itself, and whether it has alpha."""
    lossy, lossless = chunks.get(b"VP8 ", b""), chunks.get(b"VP8L", b"")
    if len(lossy) >= 10 and lossy[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", lossy, 6)
        return (height & 0x3FFF, width & 0x3FFF), b"ALPH" in chunks
    if len(lossless) >= 5 and lossless[0] == 0x2F:
        (bits,) = struct.unpack_from("<I", lossless, 1)
        return ((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1), bool(bits >> 28 & 1)
    raise damaged("it holds no WebP picture")
