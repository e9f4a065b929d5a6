"""TIFF: grey and RGB of 8 or 16 bits or of floats, in strips or tiles.

The samples are read by this program itself, because libraries differ, without a word, over
big-endian files, reduce 16-bit colour to 8, and fill damaged blocks with black. Only LZW and
PackBits are left to OpenCV's libtiff, block by block.

Floats are taken as 0 to 1. `MaxSampleValue` isn't used: TIFF 6.0 has it for statistics only.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.formats.base import (
    Directory,
    ImageHeader,
    Pixels,
    damaged,
    decode_by_opencv,
    grey_to_rgb,
    inflate,
    read_directories,
    unsupported,
    upright,
)

NAME = "TIFF"
SUFFIXES: tuple[str, ...] = (".tif", ".tiff")
SIGNATURE = re.compile(rb"II\*\0|MM\0\*")

_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE = 1, 5, 8, 32773, 32946
_PREDICTED = (_LZW, _DEFLATE, _OLD_DEFLATE)  # those that a predictor belongs to
_CHANNELS = {1: 1, 2: 3}  # of grey and RGB, by TIFF's number of them
_NUMBERS = {(1, 8): "u1", (1, 16): "u2", (3, 32): "f4"}  # by SampleFormat and BitsPerSample
_REDUCED = 1  # bit of NewSubfileType: a thumbnail of another picture in the file
_MOST_PAGES = 20  # looked at
_LARGEST_TILE = 1 << 24  # pixels, where its picture is far smaller
# A byte of 0 that leaves no trace in what follows: in LZW between codes that clear the table.
_ZERO = {_LZW: b"\x80\0\x20\x10\x08\x04\x02\x01\0", _PACK_BITS: b"\0\0"}
_ROW_BYTES = 1024


class _Tag(IntEnum):
    """Tags of the TIFF 6.0 specification, by what they tell."""

    NEW_SUBFILE_TYPE = 254
    WIDTH = 256
    HEIGHT = 257
    BITS = 258
    COMPRESSION = 259
    PHOTOMETRIC = 262
    FILL_ORDER = 266
    STRIP_OFFSETS = 273
    SAMPLES = 277
    ROWS_PER_STRIP = 278
    STRIP_BYTES = 279
    PLANAR = 284
    PREDICTOR = 317
    TILE_WIDTH = 322
    TILE_HEIGHT = 323
    TILE_OFFSETS = 324
    TILE_BYTES = 325
    SAMPLE_FORMAT = 339


@dataclass(frozen=True, eq=False)
class _TiffLayout:
    """How the samples of one picture are stored.

    Attributes:
        size: (H, W) of the picture as stored.
        count: samples a pixel, 1 or 3.
        number: type of the samples as stored.
        compression: TIFF's number of it.
        differences: each sample is stored as its difference from the one on its left.
        tiled: blocks are tiles, all of one size; else strips, of which the last may be shorter.
        block: (rows, columns) of a block.
        offsets: where each block starts in the file.
        sizes: bytes of each block in the file.
        orientation: as in EXIF.
    """

    size: tuple[int, int]
    count: int
    number: np.dtype[Any]
    compression: int
    differences: bool
    tiled: bool
    block: tuple[int, int]
    offsets: NDArray[Any]
    sizes: NDArray[Any]
    orientation: int


def read_header(data: bytes) -> ImageHeader:
    """Read the header; all pixel data must lie inside the file."""
    layout = _layout(data)
    is_float, bits = layout.number.kind == "f", 8 * layout.number.itemsize
    return ImageHeader(
        format="tiff",
        mode=f"{'grey' if layout.count == 1 else 'rgb'}{'float' if is_float else ''}{bits}",
        size=upright(layout.size, layout.orientation),
        full_scale=1.0 if is_float else 2.0**bits - 1,
        orientation=layout.orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    layout, view = _layout(data), memoryview(data)
    pixels = np.empty((*layout.size, layout.count), layout.number.newbyteorder("="))
    (rows, columns), across = layout.block, -(-layout.size[1] // layout.block[1])
    row_bytes = columns * layout.count * layout.number.itemsize
    places = zip(layout.offsets.tolist(), layout.sizes.tolist(), strict=True)
    for i, (offset, size) in enumerate(places):
        y, x = i // across * rows, i % across * columns
        block = pixels[y : y + rows, x : x + columns]
        # The last strip is often shorter; tiles aren't. Some programs fill up the last strip.
        expected = (rows if layout.tiled else len(block)) * row_bytes
        content = view[offset : offset + size]
        if layout.compression in _ZERO:
            content = _by_libtiff(content, layout.compression, expected)
        elif layout.compression != _NONE:
            content = memoryview(inflate(content, rows * row_bytes))
        if len(content) < expected:
            raise damaged(f"a block of its pixels ends after {len(content)} of {expected} bytes")
        values = np.frombuffer(content[:expected], layout.number)
        values = values.reshape(-1, columns, layout.count)
        block[...] = values[: len(block), : block.shape[1]]
        if layout.differences:  # modulo the range of their type
            np.cumsum(block, axis=1, dtype=block.dtype, out=block)
    return grey_to_rgb(pixels) if layout.count == 1 else pixels


def _layout(data: bytes) -> _TiffLayout:
    """Where and how the samples are stored; raises where they aren't all in the file."""
    first = islice(read_directories(data), _MOST_PAGES)
    pages = [page for page in first if not page.first(_Tag.NEW_SUBFILE_TYPE, 0) & _REDUCED]
    if len(pages) != 1:
        raise unsupported("it is a TIFF of no or several pages; save each page as a file")
    page = pages[0]
    height, width = page.first(_Tag.HEIGHT), page.first(_Tag.WIDTH)
    tiled = page.first(_Tag.TILE_WIDTH, 0) > 0
    rows = page.first(_Tag.TILE_HEIGHT if tiled else _Tag.ROWS_PER_STRIP, height)
    count, number, compression, differences = _kind(page)
    layout = _TiffLayout(
        size=(height, width),
        count=count,
        number=number.newbyteorder(">" if data[:2] == b"MM" else "<"),
        compression=compression,
        differences=differences,
        tiled=tiled,
        block=(rows if tiled else min(rows, height), page.first(_Tag.TILE_WIDTH, width)),
        offsets=page.values(_Tag.TILE_OFFSETS if tiled else _Tag.STRIP_OFFSETS).astype(np.int64),
        sizes=page.values(_Tag.TILE_BYTES if tiled else _Tag.STRIP_BYTES),
        orientation=page.orientation,
    )
    # A tile may be larger than its picture, but one far larger only serves to fill the memory.
    sane = math.prod(layout.block) <= max(_LARGEST_TILE, 4 * width * height)
    if not (width and height and min(layout.block) and sane):
        raise damaged("its TIFF header has illegal values")
    blocks = -(-height // layout.block[0]) * -(-width // layout.block[1])
    if len(layout.offsets) != blocks or len(layout.sizes) != blocks:
        raise damaged(f"it lists {len(layout.offsets)} of {blocks} blocks of pixels")
    if not layout.sizes.all() or (layout.offsets + layout.sizes).max() > len(data):
        raise damaged("it is cut short: a block of its pixels lies beyond its end")
    return layout


def _kind(page: Directory) -> tuple[int, np.dtype[Any], int, bool]:
    """Samples a pixel, their type and compression, and whether they are stored as differences.

    Refuses what isn't plain grey or RGB, of all that TIFF may hold.
    """
    count, compression = page.first(_Tag.SAMPLES, 1), page.first(_Tag.COMPRESSION, _NONE)
    number = _NUMBERS.get((page.same(_Tag.SAMPLE_FORMAT, 1), page.same(_Tag.BITS, 1)))
    # What stands beside other compressions is left of an earlier one.
    predictor = page.first(_Tag.PREDICTOR, 1) if compression in _PREDICTED else 1
    if (
        number is None
        or count != _CHANNELS.get(page.first(_Tag.PHOTOMETRIC))
        or (count > 1 and page.first(_Tag.PLANAR, 1) != 1)
        or page.first(_Tag.FILL_ORDER, 1) != 1
        or compression not in (_NONE, _PACK_BITS, *_PREDICTED)
        or predictor not in ((1,) if number == "f4" else (1, 2))
    ):
        raise unsupported(
            "it is a TIFF of a rare kind; save it as plain grey or RGB of 8 or 16 bits, with no "
            "compression, LZW, deflate or PackBits, or as PNG"
        )
    return count, np.dtype(number), compression, predictor == 2


def _by_libtiff(block: memoryview, compression: int, expected: int) -> memoryview:
    """Undo LZW or PackBits by OpenCV, as the only strip of a grey picture (TIFF 6.0, section 2).

    OpenCV reports damage in 16-bit pictures but ignores it in 8-bit ones. So the picture has 16
    bits, and zeros in front fill its rows.
    """
    rows = -(-expected // _ROW_BYTES)
    zeros = rows * _ROW_BYTES - expected
    strip = _ZERO[compression] * zeros + block
    tags = {
        _Tag.WIDTH: _ROW_BYTES // 2,
        _Tag.HEIGHT: rows,
        _Tag.BITS: 16,
        _Tag.COMPRESSION: compression,
        _Tag.PHOTOMETRIC: 1,
        _Tag.STRIP_OFFSETS: 8 + 2 + 12 * 7 + 4,  # header, number of tags, 7 tags, no next page
        _Tag.STRIP_BYTES: len(strip),
    }
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    file = header + directory + bytes(4) + strip
    pixels = decode_by_opencv(file, (rows, _ROW_BYTES // 2))
    return pixels.reshape(-1).view(np.uint8).data[zeros:]
