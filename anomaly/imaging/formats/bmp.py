"""BMP, uncompressed: palettes, 16-bit colour, 24-bit and 32-bit, with or without alpha.

BMP has no checksum: of a file that is long enough, only a header that contradicts itself shows.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    bgr_to_rgb,
    damaged,
    look_up,
    over_black,
    unsupported,
)

NAME = "BMP"
SUFFIXES: tuple[str, ...] = (".bmp", ".dib")
SIGNATURE = re.compile(rb"BM")

_RGB, _BITFIELDS = 0, 3
_HEADERS = (12, 40, 52, 56, 64, 108, 124)  # bytes; 12 and 64 are OS/2's
_ROWS = 256  # whose colours are picked out at a time, which bounds the wide temporaries
_RGB555 = (0x7C00, 0x03E0, 0x001F, 0)


@dataclass(frozen=True)
class _BmpLayout:
    width: int
    height: int
    bottom_up: bool
    bits: int
    pixels_at: int
    palette_at: int
    palette_entry: int  # bytes
    colours: int  # of the palette
    masks: tuple[int, int, int, int]  # of red, green, blue and alpha, where a pixel is one number

    @property
    def stride(self) -> int:
        return (self.width * self.bits + 31) // 32 * 4

    @property
    def palette_bytes(self) -> int:
        return self.colours * self.palette_entry


def read_header(data: bytes) -> ImageHeader:
    """Read the header; the file must be long enough for its pixels."""
    layout = _layout(data)
    kind = "palette" if layout.bits <= 8 else "rgba" if layout.masks[3] else "rgb"
    bits = layout.bits if layout.bits <= 8 else 8
    return ImageHeader("bmp", f"{kind}{bits}", (layout.height, layout.width), 255.0)


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3)."""
    layout = _layout(data)
    count = layout.stride * layout.height
    rows = np.frombuffer(data, np.uint8, count, layout.pixels_at)
    rows = rows.reshape(layout.height, layout.stride)[:: -1 if layout.bottom_up else 1]
    if layout.bits <= 8:
        return _look_up(data, layout, rows)
    if layout.bits == 24:
        bgr = rows[:, : layout.width * 3].copy()
        return bgr_to_rgb(bgr.reshape(layout.height, layout.width, 3))
    rgb = np.empty((layout.height, layout.width, 3), np.uint8)
    for start in range(0, layout.height, _ROWS):
        band = np.ascontiguousarray(rows[start : start + _ROWS])
        words = band.view("<u2" if layout.bits == 16 else "<u4")[:, : layout.width]
        rgb[start : start + _ROWS] = _masked(words, layout.masks)
    return rgb


def _layout(data: bytes) -> _BmpLayout:
    try:
        layout = _parse(data)
    except struct.error:
        raise damaged("it is cut short inside the BMP header") from None
    if layout.width < 1 or layout.height < 1 or layout.bits not in (1, 2, 4, 8, 16, 24, 32):
        raise damaged("its BMP header has illegal values")
    if layout.pixels_at < layout.palette_at + (layout.bits <= 8) * layout.palette_bytes:
        raise damaged("its BMP header has its pixels start inside the header or the palette")
    if layout.bits in (16, 32) and not _separate(layout.masks, layout.bits):
        raise damaged("its BMP header has no mask for one of the colours, or masks that can't be")
    there, needed = len(data) - layout.pixels_at, layout.stride * layout.height
    if there < needed:
        raise damaged(f"it is cut short: {max(there, 0)} of {needed} bytes of pixels are there")
    return layout


def _parse(data: bytes) -> _BmpLayout:
    pixels_at, header = struct.unpack_from("<II", data, 10)
    if header == 12:  # OS/2 1.x
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        colours = 1 << min(bits, 8)
        return _BmpLayout(width, height, True, bits, pixels_at, 26, 3, colours, (0, 0, 0, 0))
    if header not in _HEADERS:
        raise unsupported(f"its BMP header of {header} bytes isn't a known one")
    width, height, _, bits, packing = struct.unpack_from("<iiHHI", data, 18)
    if packing not in ((_RGB,) if header == 64 else (_RGB, _BITFIELDS)):
        raise unsupported("it is a run-length or otherwise compressed BMP; save it as PNG")
    (colours,) = struct.unpack_from("<I", data, 46)
    masks = (0xFF0000, 0xFF00, 0xFF, 0)  # the fourth byte of 32-bit pixels is reserved, not alpha
    if packing == _BITFIELDS:
        (alpha,) = struct.unpack_from("<I", data, 66) if header >= 56 else (0,)
        masks = (*struct.unpack_from("<III", data, 54), alpha)
    elif bits == 16:
        masks = _RGB555
    return _BmpLayout(
        width=width,
        height=abs(height),
        bottom_up=height > 0,
        bits=bits,
        pixels_at=pixels_at,
        palette_at=14 + header + (12 if packing == _BITFIELDS and header == 40 else 0),
        palette_entry=4,
        colours=min(colours or 256, 1 << min(bits, 8)),
        masks=masks,
    )


def _separate(masks: tuple[int, int, int, int], bits: int) -> bool:
    """Whether each colour has bits of its own, side by side, in a pixel of `bits` bits."""
    in_one_run = all((mask + (mask & -mask)) & mask == 0 for mask in masks)
    red, green, blue, alpha = masks
    apart = red + green + blue + alpha == red | green | blue | alpha < 1 << bits
    return all(masks[:3]) and in_one_run and apart


def _look_up(data: bytes, layout: _BmpLayout, rows: Pixels) -> Pixels:
    entries = np.frombuffer(data, np.uint8, layout.palette_bytes, layout.palette_at)
    palette = entries.reshape(layout.colours, layout.palette_entry)
    indices = rows
    if layout.bits < 8:
        shifts = np.arange(8 - layout.bits, -1, -layout.bits, dtype=np.uint8)
        indices = (rows[..., None] >> shifts & (2**layout.bits - 1)).reshape(layout.height, -1)
    indices = indices[:, : layout.width]
    return look_up(np.ascontiguousarray(indices), palette[:, 2::-1])


def _masked(words: Pixels, masks: tuple[int, int, int, int]) -> Pixels:
    """Pick each channel's bits out of pixels (H, W) and spread them over 0..255."""
    channels = []
    for mask in masks[: 4 if masks[3] else 3]:
        shift = (mask & -mask).bit_length() - 1
        top = mask >> shift
        values = (words >> shift & top).astype(np.uint64 if top > 2**16 else np.uint32)
        channels.append(((values * 255 + top // 2) // top).astype(np.uint8))
    rgb = np.stack(channels[:3], axis=-1)
    return over_black(rgb, channels[3], 255) if masks[3] else rgb
