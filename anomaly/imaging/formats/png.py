"""PNG: chunks, their order and checksums, and the pixels' length are checked before decoding.

Decoders accept files that lost their last bytes, or that were cut between two chunks and closed
again. So the stream is inflated here, checked, and passed to OpenCV's libpng as stored
(uncompressed) blocks: libpng then only undoes the row filters, and the work isn't done twice.

`sBIT` doesn't change the full scale: the PNG specification has encoders scale samples up to the
full range of the container, whatever their significant bits.

What the specification forbids is refused, but for what can't change the picture: notes that aren't
used here are held against their checksums only, and what follows the end of the pixel stream or of
the PNG is left alone, as phones and cameras append previews and films.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import cv2
import numpy as np
from isal import isal_zlib

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    bgr_to_rgb,
    bgra_over_black,
    damaged,
    decode_by_opencv,
    exif_orientation,
    grey_to_rgb,
    inflate,
    longest_stored,
    over_black,
    unsupported,
    upright,
)

NAME = "PNG"
SUFFIXES: tuple[str, ...] = (".png",)
SIGNATURE = re.compile(rb"\x89PNG\r\n\x1a\n")

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KINDS = {0: ("grey", 1), 2: ("rgb", 3), 3: ("palette", 1), 4: ("greya", 2), 6: ("rgba", 4)}
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
# (first column, first row, column step, row step) of each pass
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
_BLOCK_BYTES = 0xFFFF
_MOST_CHUNKS = 1 << 18
_USED = (b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"acTL", b"fdAT", b"IDAT", b"IEND")
_ONCE = (b"IHDR", b"PLTE", b"tRNS", b"eXIf")
# What has to stand in front of what (PNG specification, section 5.6).
_BEFORE = {b"PLTE": (b"IDAT", b"tRNS"), b"tRNS": (b"IDAT",)}


@dataclass(frozen=True)
class _PngLayout:
    width: int
    height: int
    depth: int
    colour: int
    interlaced: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows of all passes, each with its filter byte."""
        total, bits = 0, self.depth * _KINDS[self.colour][1]
        for x, y, dx, dy in _ADAM7 if self.interlaced else ((0, 0, 1, 1),):
            columns, rows = -(-(self.width - x) // dx), -(-(self.height - y) // dy)
            if columns > 0 and rows > 0:
                total += rows * (1 + (columns * bits + 7) // 8)
        return total


def read_header(data: bytes) -> ImageHeader:
    """Read the header; every chunk's checksum is verified on the way."""
    chunks = _chunks(data)
    layout = _layout(chunks)
    frames = int.from_bytes(b"".join(chunks.get(b"acTL", []))[:4], "big")
    if frames > 1 or b"fdAT" in chunks:  # the first frame's data is IDAT, or it isn't a frame
        raise unsupported("it is an animated PNG; save the frame to inspect as a file of its own")
    orientation = exif_orientation(bytes(chunks.get(b"eXIf", [b""])[0]))
    return ImageHeader(
        format="png",
        mode=f"{_KINDS[layout.colour][0]}{layout.depth}",
        size=upright((layout.height, layout.width), orientation),
        full_scale=65535.0 if layout.depth == 16 else 255.0,
        orientation=orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    chunks = _chunks(data)
    layout = _layout(chunks)
    # A palette is looked up here: libpng is shown its indices as if they were greys.
    shown = 0 if layout.colour == 3 else layout.colour
    plain = b"".join(_stored(layout, shown, _inflate(layout, chunks.pop(b"IDAT", []))))
    pixels = decode_by_opencv(plain)
    if pixels is None or pixels.shape[:2] != (layout.height, layout.width):
        raise damaged("its pixels can't be decoded")
    del plain  # as large as the picture
    if layout.colour == 3:
        return _look_up(chunks, layout.depth, pixels)
    return _rgb(chunks, layout, pixels)


def _chunks(data: bytes) -> dict[bytes, list[memoryview]]:
    """Contents of the chunks in use, up to IEND; raises unless all are whole and in order."""
    chunks: dict[bytes, list[memoryview]] = {}
    view, at, before = memoryview(data), len(_SIGNATURE), b""
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(data):
            raise damaged("it is cut short: the end of the PNG is missing")
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            raise damaged(f"it is cut short inside its {_name(kind)} chunk")
        if isal_zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise damaged(f"the checksum of its {_name(kind)} chunk at byte {at} is wrong")
        _check_place(kind, before, length, chunks)
        if kind[0] < 0x60 and kind not in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
            raise unsupported(f"it needs the PNG extension {_name(kind)}")
        if kind in _USED:
            chunks.setdefault(kind, []).append(view[at + 8 : end - 4])
        if kind == b"IEND":
            return chunks
        at, before = end, kind
    raise damaged(f"it is in over {_MOST_CHUNKS} chunks")


def _check_place(
    kind: bytes, before: bytes, length: int, chunks: dict[bytes, list[memoryview]]
) -> None:
    """Refuse a chunk that the specification forbids where it is.

    Args:
        kind: of the chunk.
        before: kind of the one before; empty for the first.
        length: of its content.
        chunks: those before.
    """
    name = _name(kind)
    if not (kind.isascii() and kind.isalpha()):
        raise damaged(f"{name!r} isn't the name of a PNG chunk")
    if not before and kind != b"IHDR":
        raise damaged(f"it starts with its {name} chunk, not with the PNG header")
    if kind in _ONCE and kind in chunks:
        raise damaged(f"it has two {name} chunks where one is allowed")
    if any(other in chunks for other in _BEFORE.get(kind, ())):
        raise damaged(f"its {name} chunk comes too late")
    if kind == b"IDAT" and kind in chunks and before != kind:
        raise damaged("its pixel data is in several places")
    if kind == b"IEND" and length:
        raise damaged("its last PNG chunk isn't empty")


def _name(kind: bytes) -> str:
    return kind.decode("ascii", "backslashreplace")


def _layout(chunks: dict[bytes, list[memoryview]]) -> _PngLayout:
    header = b"".join(chunks.get(b"IHDR", []))
    if len(header) != 13:
        raise damaged("its PNG header is missing or malformed")
    width, height, depth, colour, packing, filtering, interlace = struct.unpack(">IIBBBBB", header)
    legal = depth in _DEPTHS.get(colour, ()) and not packing and not filtering and interlace < 2
    if not (width and height and legal):
        raise damaged("its PNG header has illegal values")
    _check_palette(chunks, colour, depth)
    return _PngLayout(width, height, depth, colour, interlace == 1)


def _check_palette(chunks: dict[bytes, list[memoryview]], colour: int, depth: int) -> None:
    """Refuse a palette or transparency that doesn't go with the kind of colour and its depth."""
    palette, rest = divmod(len(chunks.get(b"PLTE", [b""])[0]), 3)
    if rest or (colour == 3 and not palette) or (b"PLTE" in chunks and not palette):
        raise damaged("its palette is missing or malformed")
    if palette > (2**depth if colour == 3 else 256):
        raise damaged(f"it has a palette of {palette} colours, more than it can name")
    if palette and colour in (0, 4):
        raise damaged("it is grey and has a palette")
    if b"tRNS" in chunks:
        length = len(chunks[b"tRNS"][0])
        legal = {0: length == 2, 2: length == 6, 3: length <= palette}
        if not legal.get(colour, False):
            raise damaged("its transparency doesn't go with its colours")


def _inflate(layout: _PngLayout, idat: list[memoryview]) -> bytes:
    """Inflate the filtered rows; raises unless they are complete and their checksum holds."""
    expected = layout.row_bytes
    before = accumulate((len(part) for part in idat), initial=0)
    pairs = zip(idat, before, strict=False)
    rows_bytes = inflate(
        b"".join(part for part, start in pairs if start < longest_stored(expected)), expected
    )
    if len(rows_bytes) < expected:
        raise damaged(f"its pixel data ends after {len(rows_bytes)} of {expected} bytes")
    return rows_bytes


def _stored(layout: _PngLayout, colour: int, rows_bytes: bytes) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a PNG of the given rows, not compressed, and nothing else."""
    interlace = int(layout.interlaced)
    yield _SIGNATURE
    yield from _chunk(
        b"IHDR",
        struct.pack(">IIBBBBB", layout.width, layout.height, layout.depth, colour, 0, 0, interlace),
    )
    view = memoryview(rows_bytes)
    yield from _chunk(b"IDAT", b"\x78\x01")  # zlib header (RFC 1950)
    for start in range(0, len(view), _BLOCK_BYTES):
        block = view[start : start + _BLOCK_BYTES]
        last = start + len(block) == len(view)
        size = struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF)
        yield from _chunk(b"IDAT", size, block)  # a stored block (RFC 1951, section 3.2.4)
    yield from _chunk(b"IDAT", struct.pack(">I", isal_zlib.adler32(view)))
    yield from _chunk(b"IEND")


def _chunk(kind: bytes, *contents: bytes | memoryview) -> Iterator[bytes | memoryview]:
    yield struct.pack(">I4s", sum(map(len, contents)), kind)
    checksum = isal_zlib.crc32(kind)
    for content in contents:
        yield content
        checksum = isal_zlib.crc32(content, checksum)
    yield struct.pack(">I", checksum)


def _look_up(chunks: dict[bytes, list[memoryview]], depth: int, shown: Pixels) -> Pixels:
    """Replace palette indices, shown as greys spread over 0..255, by their colours."""
    entries = np.frombuffer(b"".join(chunks.get(b"PLTE", [])), np.uint8)
    colours = entries.reshape(-1, 1, 3)
    alpha = np.full((len(colours), 1), 255, np.uint8)
    opacity = np.frombuffer(b"".join(chunks.get(b"tRNS", [])), np.uint8)
    alpha[: len(opacity), 0] = opacity
    indices = shown // (255 // (2**depth - 1)) if depth < 8 else shown
    if indices.max() >= len(colours):
        raise damaged(f"it uses colour {indices.max()} of a palette of {len(colours)}")
    table = np.zeros((256, 1, 3), np.uint8)
    table[: len(colours)] = over_black(colours, alpha)
    return np.asarray(cv2.LUT(grey_to_rgb(indices), table))


def _rgb(chunks: dict[bytes, list[memoryview]], layout: _PngLayout, pixels: Pixels) -> Pixels:
    if layout.colour in (4, 6):
        return bgra_over_black(pixels)
    rgb = bgr_to_rgb(pixels) if layout.colour == 2 else grey_to_rgb(pixels)
    key = b"".join(chunks.get(b"tRNS", []))
    if key:
        # One colour is declared transparent. Low-bit greys have been spread over 0..255.
        spread = 255 // (2**layout.depth - 1) if layout.depth < 8 else 1
        transparent = np.frombuffer(key, ">u2").astype(np.uint32) * spread
        rgb[(rgb == transparent).all(axis=2)] = 0
    return rgb
