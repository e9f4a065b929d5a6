"""BMP, uncompressed: palettes, 24-bit and 32-bit colour, decoded by OpenCV.

BMP has no checksum: of a file that is long enough, only a header that contradicts itself shows.
"""

from __future__ import annotations

import re
import struct

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    damaged,
    decode_by_opencv,
    to_rgb,
    unsupported,
)

NAME = "BMP"
SUFFIXES: tuple[str, ...] = (".bmp", ".dib")
SIGNATURE = re.compile(rb"BM")

_HEADERS = (40, 52, 56, 108, 124)  # bytes
_PLAIN, _MASKED = 0, 3  # values of biCompression
_MODES = {1: "palette1", 4: "palette4", 8: "palette8", 24: "rgb8", 32: "rgb8"}
_MASKS = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)  # of red, green and blue in 32 bits
_ALPHA = struct.pack("<I", 0xFF000000)


def read_header(data: bytes) -> ImageHeader:
    """Read the header; the file must be long enough for its pixels."""
    try:
        pixels_at, header, width, height, _, bits, packing = struct.unpack_from(
            "<IIiiHHI", data, 10
        )
        (colours,) = struct.unpack_from("<I", data, 46)
    except struct.error:
        raise damaged("it is cut short inside the BMP header") from None
    mode = _MODES.get(bits)
    masked = packing == _MASKED and bits == 32 and data[54:66] == _MASKS
    if header not in _HEADERS or mode is None or not (packing == _PLAIN or masked):
        raise unsupported("it is a compressed BMP or one of a rare kind; save it as PNG")
    if width < 1 or not height:
        raise damaged("its BMP header has illegal values")
    palette = 4 * min(colours or 256, 1 << bits) if bits <= 8 else 0
    if pixels_at < 14 + header + palette:
        raise damaged("its BMP header has its pixels start inside the header or the palette")
    there, needed = len(data) - pixels_at, (width * bits + 31) // 32 * 4 * abs(height)
    if there < needed:
        raise damaged(f"it is cut short: {max(there, 0)} of {needed} bytes of pixels are there")
    if masked and header >= 56 and data[66:70] == _ALPHA:  # else the fourth byte means nothing
        mode = "rgba8"
    return ImageHeader("bmp", mode, (abs(height), width), 255.0)


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3)."""
    header = read_header(data)
    pixels = decode_by_opencv(data, header.size)
    if pixels.ndim == 3 and header.mode != "rgba8":
        pixels = pixels[..., :3].copy()
    return to_rgb(pixels)
