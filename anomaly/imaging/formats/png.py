"""PNG: the checksums of all chunks, and the pixels' length and checksum, are checked here.

Decoders accept files that lost their last bytes, or that were cut between two chunks and closed
again. So the stream is inflated here, checked, and passed to OpenCV's libpng as stored
(uncompressed) blocks: libpng then only undoes the row filters, and the work isn't done twice.

`sBIT` doesn't change the full scale: the PNG specification has encoders scale samples up to the
full range of the container, whatever their significant bits.

Notes that aren't used here are held against their checksums only, and what follows the end of the
pixel stream or of the PNG is left alone, as phones and cameras append previews and films.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from isal import isal_zlib

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    damaged,
    decode_by_opencv,
    exif_orientation,
    inflate,
    to_rgb,
    unsupported,
    upright,
)

NAME = "PNG"
SUFFIXES: tuple[str, ...] = (".png",)
SIGNATURE = re.compile(rb"\x89PNG\r\n\x1a\n")

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KINDS = {0: ("grey", 1), 2: ("rgb", 3), 3: ("palette", 1), 4: ("greya", 2), 6: ("rgba", 4)}
_BLOCK_BYTES = 0xFFFF


@dataclass(frozen=True)
class _Png:
    """A PNG whose chunks are whole.

    Attributes:
        size: (H, W) as stored.
        depth: bits a sample.
        colour: PNG's number of the kind of colour.
        most_bytes: of all rows, each with the number of its filter.
        chunks: contents of each kind of chunk, in file order.
    """

    size: tuple[int, int]
    depth: int
    colour: int
    most_bytes: int
    chunks: dict[bytes, list[memoryview]]


def read_header(data: bytes) -> ImageHeader:
    """Read the header; every chunk's checksum is verified on the way."""
    png = _read(data)
    if b"acTL" in png.chunks:
        raise unsupported("it is an animated PNG; save the frame to inspect as a file of its own")
    orientation = exif_orientation(bytes(png.chunks.get(b"eXIf", [b""])[0]))
    return ImageHeader(
        format="png",
        mode=f"{_KINDS[png.colour][0]}{png.depth}",
        size=upright(png.size, orientation),
        full_scale=65535.0 if png.depth == 16 else 255.0,
        orientation=orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    png = _read(data)
    plain = b"".join(_stored(png, inflate(b"".join(png.chunks.get(b"IDAT", [])), png.most_bytes)))
    pixels = decode_by_opencv(plain, png.size)
    del plain  # as large as the picture
    rgb = to_rgb(pixels)
    # One colour is declared transparent. OpenCV sees to it, but for greys: it spreads low bits.
    for key in png.chunks.get(b"tRNS", []) if png.colour == 0 else []:
        spread = 255 // (2**png.depth - 1) if png.depth < 8 else 1
        rgb[pixels == int.from_bytes(key, "big") * spread] = 0
    return rgb


def _read(data: bytes) -> _Png:
    """Read what is in front of IEND; raises unless all chunks are whole."""
    chunks: dict[bytes, list[memoryview]] = {}
    view, at, kind = memoryview(data), len(_SIGNATURE), b""
    while kind != b"IEND":
        if at + 12 > len(data):
            raise damaged("it is cut short: the end of the PNG is missing")
        length, kind = struct.unpack_from(">I4s", data, at)
        end, name = at + 12 + length, kind.decode("ascii", "backslashreplace")
        if end > len(data):
            raise damaged(f"it is cut short inside its {name} chunk")
        if isal_zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise damaged(f"the checksum of its {name} chunk at byte {at} is wrong")
        if kind[0] < 0x60 and kind not in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
            raise unsupported(f"it needs the PNG extension {name}")
        chunks.setdefault(kind, []).append(view[at + 8 : end - 4])
        at = end
    header = b"".join(chunks.get(b"IHDR", []))
    if len(header) != 13:
        raise damaged("its PNG header is missing or malformed")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    if not (width and height and colour in _KINDS):
        raise damaged("its PNG header has illegal values")
    most_bytes = height * (1 + (width * depth * _KINDS[colour][1] + 7) // 8)
    if interlaced:  # into seven pictures, of less than twice as many rows in all
        most_bytes += 4 * height + 32
    return _Png((height, width), depth, colour, most_bytes, chunks)


def _stored(png: _Png, rows: bytes) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a PNG of the given rows, not compressed, with their palette."""
    yield _SIGNATURE
    for kind in (b"IHDR", b"PLTE", b"tRNS"):
        for content in png.chunks.get(kind, []):
            yield from _chunk(kind, content)
    yield from _chunk(b"IDAT", b"\x78\x01")  # zlib header (RFC 1950)
    view = memoryview(rows)
    for start in range(0, len(view), _BLOCK_BYTES):
        block = view[start : start + _BLOCK_BYTES]  # stored (RFC 1951, section 3.2.4)
        yield from _chunk(b"IDAT", struct.pack("<BHH", 0, len(block), len(block) ^ 0xFFFF), block)
    yield from _chunk(b"IDAT", b"\1\0\0\xff\xff", struct.pack(">I", isal_zlib.adler32(view)))
    yield from _chunk(b"IEND")


def _chunk(kind: bytes, *contents: bytes | memoryview) -> Iterator[bytes | memoryview]:
    yield struct.pack(">I4s", sum(map(len, contents)), kind)
    checksum = isal_zlib.crc32(kind)
    for content in contents:
        yield content
        checksum = isal_zlib.crc32(content, checksum)
    yield struct.pack(">I", checksum)
