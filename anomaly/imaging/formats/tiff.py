"""TIFF: grey and RGB of whole bytes or a packed depth, in strips or tiles.

The samples are read by this program itself, because libraries differ, without a word, over
big-endian and 10- to 14-bit files, reduce 16-bit colour to 8, and fill damaged blocks with black.
Only LZW and PackBits are left to OpenCV's libtiff, block by block.

Floats are taken as 0 to 1. `BitsPerSample` is the declared depth: a 12-bit file has full scale
4095. `MaxSampleValue` isn't used: TIFF 6.0 has it for statistics only.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
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
    longest_stored,
    read_directories,
    unsupported,
    upright,
)

NAME = "TIFF"
SUFFIXES: tuple[str, ...] = (".tif", ".tiff")
SIGNATURE = re.compile(rb"II\*\0|MM\0\*")

_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE = 1, 5, 8, 32773, 32946
_COMPRESSIONS = (_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE)
_DIFFERENCES = 2  # a predictor
_PREDICTED = (_LZW, _DEFLATE, _OLD_DEFLATE)  # those that a predictor belongs to
_WHITE_IS_ZERO = 0
_CHANNELS = {_WHITE_IS_ZERO: 1, 1: 1, 2: 3}  # of grey and RGB, by TIFF's number of them
_UINT, _FLOAT = 1, 3
_UINT_BITS, _FLOAT_BITS = (1, 2, 4, 8, 10, 12, 14, 16), (16, 32, 64)
_REDUCED = 1  # bit of NewSubfileType: a thumbnail of another picture in the file
_LARGEST_TILE = 1 << 24  # pixels, where its picture is far smaller
_MOST_BLOCKS = 1 << 18
_WIDEST = 1 << 20  # columns that OpenCV takes
_BAND_BYTES = 1 << 24  # unpacked at a time, which bounds the temporaries


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
        white_is_zero: grey, of which 0 is white.
        count: samples a pixel, 1 or 3.
        bits: bits a sample.
        number: samples of whole bytes: their numpy type as stored.
        compression: one of `_COMPRESSIONS`.
        differences: each sample is stored as its difference from the one on its left.
        tiled: blocks are tiles, all of one size; else strips, of which the last may be shorter.
        block: (rows, columns) of a block.
        offsets: where each block starts in the file.
        sizes: bytes of each block in the file.
        orientation: as in EXIF.
    """

    size: tuple[int, int]
    white_is_zero: bool
    count: int
    bits: int
    number: np.dtype[Any]
    compression: int
    differences: bool
    tiled: bool
    block: tuple[int, int]
    offsets: NDArray[Any]
    sizes: NDArray[Any]
    orientation: int

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks down and across."""
        return -(-self.size[0] // self.block[0]), -(-self.size[1] // self.block[1])

    @property
    def full_scale(self) -> float:
        if self.number.kind == "f":
            return 1.0
        return 255.0 if self.bits <= 8 else float(2**self.bits - 1)


def read_header(data: bytes) -> ImageHeader:
    """Read the header; all pixel data must lie inside the file."""
    layout = _layout(data)
    number = "float" if layout.number.kind == "f" else ""
    return ImageHeader(
        format="tiff",
        mode=f"{'grey' if layout.count == 1 else 'rgb'}{number}{layout.bits}",
        size=upright(layout.size, layout.orientation),
        full_scale=layout.full_scale,
        orientation=layout.orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    layout = _layout(data)
    values = _read_samples(data, layout)
    if layout.bits < 8:
        values *= 255 // (2**layout.bits - 1)
    if layout.white_is_zero:
        values = values.dtype.type(layout.full_scale) - values
    return grey_to_rgb(values) if layout.count == 1 else values


def _layout(data: bytes) -> _TiffLayout:
    """Where and how the samples are stored; raises where they aren't all in the file."""
    pages = [d for d in read_directories(data) if not d.first(_Tag.NEW_SUBFILE_TYPE, 0) & _REDUCED]
    if len(pages) != 1:
        raise unsupported(f"it is a TIFF of {len(pages)} pages; save each page as a file")
    page = pages[0]
    is_float, bits = page.same(_Tag.SAMPLE_FORMAT, _UINT) == _FLOAT, page.same(_Tag.BITS, 1)
    _check_kind(page, is_float, bits)
    height, width = page.first(_Tag.HEIGHT), page.first(_Tag.WIDTH)
    tiled = page.first(_Tag.TILE_WIDTH, 0) > 0
    rows = page.first(_Tag.TILE_HEIGHT if tiled else _Tag.ROWS_PER_STRIP, height)
    number = np.dtype(f"f{bits // 8}" if is_float else np.uint8 if bits <= 8 else np.uint16)
    layout = _TiffLayout(
        size=(height, width),
        white_is_zero=page.first(_Tag.PHOTOMETRIC) == _WHITE_IS_ZERO,
        count=page.first(_Tag.SAMPLES, 1),
        bits=bits,
        number=number.newbyteorder(">" if data[:2] == b"MM" else "<"),
        compression=page.first(_Tag.COMPRESSION, _NONE),
        differences=_predictor(page) == _DIFFERENCES,
        tiled=tiled,
        block=(rows if tiled else min(rows, height), page.first(_Tag.TILE_WIDTH, width)),
        offsets=page.values(_Tag.TILE_OFFSETS if tiled else _Tag.STRIP_OFFSETS),
        sizes=page.values(_Tag.TILE_BYTES if tiled else _Tag.STRIP_BYTES),
        orientation=page.orientation,
    )
    # A tile may be larger than its picture, but one far larger only serves to fill the memory.
    sane = math.prod(layout.block) <= max(_LARGEST_TILE, 4 * width * height)
    if not (width and height and min(layout.block) and sane):
        raise damaged("its TIFF header has illegal values")
    _check_blocks(data, layout)
    return layout


def _check_kind(page: Directory, is_float: bool, bits: int) -> None:
    """Refuse what isn't plain grey or RGB, of all that TIFF may hold."""
    count, photometric = page.first(_Tag.SAMPLES, 1), page.first(_Tag.PHOTOMETRIC)
    if (
        count != _CHANNELS.get(photometric)
        or (count > 1 and page.first(_Tag.PLANAR, 1) != 1)
        or page.first(_Tag.FILL_ORDER, 1) != 1
        or page.first(_Tag.COMPRESSION, _NONE) not in _COMPRESSIONS
        or page.same(_Tag.SAMPLE_FORMAT, _UINT) not in (_UINT, _FLOAT)
        or bits not in (_FLOAT_BITS if is_float else _UINT_BITS)
        or (_predictor(page) != 1 and (is_float or bits % 8 or _predictor(page) != _DIFFERENCES))
    ):
        raise unsupported(
            "it is a TIFF of a rare kind; save it as plain grey or RGB of 8 or 16 bits, with no "
            "compression, LZW, deflate or PackBits, or as PNG"
        )


def _predictor(page: Directory) -> int:
    """1 for none; what stands beside other compressions is left of an earlier one, and ignored."""
    predicted = page.first(_Tag.COMPRESSION, _NONE) in _PREDICTED
    return page.first(_Tag.PREDICTOR, 1) if predicted else 1


def _check_blocks(data: bytes, layout: _TiffLayout) -> None:
    blocks, offsets, sizes = math.prod(layout.grid), layout.offsets, layout.sizes
    if blocks > _MOST_BLOCKS:
        raise unsupported(f"its pixels are in {blocks} strips or tiles; save it as PNG")
    if len(offsets) != blocks or len(sizes) != blocks:
        raise damaged(f"it lists {len(offsets)} of {blocks} blocks of pixels")
    ends = offsets.astype(np.int64) + sizes
    if not sizes.all() or ends.max() > len(data):
        raise damaged("it is cut short: a block of its pixels lies beyond its end")


def _read_samples(data: bytes, layout: _TiffLayout) -> Pixels:
    """Read all samples (H, W, count): integers as they are stored, floats as float32.

    Raises:
        ImageError: `unreadable` where a block is damaged or shorter than its size asks for.
    """
    view, dtype = memoryview(data), layout.number.newbyteorder("=")
    whole = np.empty((*layout.size, layout.count), np.float32 if dtype.kind == "f" else dtype)
    (rows, columns), (_, across) = layout.block, layout.grid
    row_bytes = (columns * layout.count * layout.bits + 7) // 8  # rows start on a byte
    step = max(1, _BAND_BYTES // row_bytes)
    places = zip(layout.offsets.tolist(), layout.sizes.tolist(), strict=True)
    for i, (offset, size) in enumerate(places):
        y, x = i // across * rows, i % across * columns
        block = whole[y : y + rows, x : x + columns]
        # The last strip is often shorter; tiles aren't. Some programs fill up the last strip.
        expected = (rows if layout.tiled else len(block)) * row_bytes
        content = _decompressed(
            view[offset : offset + size], layout.compression, expected, rows * row_bytes
        )
        stored = np.frombuffer(content, np.uint8, expected).reshape(-1, row_bytes)
        for start in range(0, len(block), step):
            band = block[start : start + step]
            with np.errstate(over="ignore"):  # a double beyond float32 becomes inf: refused later
                band[...] = _values(stored[start : start + len(band)], layout)[:, : band.shape[1]]
    return whole


def _decompressed(
    block: memoryview, compression: int, expected: int, most: int
) -> bytes | memoryview:
    """A block's bytes: `expected` at least, and `most` at most."""
    if compression in (_LZW, _PACK_BITS):
        return _by_libtiff(bytes(block[: longest_stored(expected)]), compression, expected)
    content = block if compression == _NONE else inflate(block, most)
    if len(content) < expected:
        raise damaged(f"a block of its pixels ends after {len(content)} of {expected} bytes")
    return content


def _by_libtiff(block: bytes, compression: int, expected: int) -> bytes:
    """Undo LZW or PackBits by OpenCV, as the only strip of a grey picture.

    OpenCV reports damage in 16-bit pictures but ignores it in 8-bit ones, so blocks are read as
    16-bit. An odd number of bytes is evened out by a zero for PackBits; of LZW, such blocks are
    read a second time.
    """
    zeros = expected % 2 if compression == _PACK_BITS else 0
    content = b""
    for bits in (16, 8):
        count = (expected + zeros) * 8 // bits
        if count and len(content) < expected:
            picture = _grey_picture(block + b"\0\0" * zeros, compression, bits, count)
            decoded = decode_by_opencv(picture)
            if decoded is None:
                raise damaged("its compressed pixel data is damaged or cut short")
            content = decoded.tobytes()
    return content


def _grey_picture(strip: bytes, compression: int, bits: int, count: int) -> bytes:
    """Write a little-endian grey TIFF of one strip of `count` samples (TIFF 6.0, section 2)."""
    least = max(1, -(-count // _WIDEST))
    rows = next((n for n in range(least, least + 1000) if count % n == 0), 0)
    if not rows:
        raise unsupported(
            f"the size of its LZW or PackBits blocks ({count}) is odd; save it as PNG"
        )
    tags = {
        _Tag.WIDTH: count // rows,
        _Tag.HEIGHT: rows,
        _Tag.BITS: bits,
        _Tag.COMPRESSION: compression,
        _Tag.PHOTOMETRIC: 1,
        _Tag.STRIP_OFFSETS: 8 + 2 + 12 * 9 + 4,  # header, number of tags, nine tags, no next page
        _Tag.SAMPLES: 1,
        _Tag.ROWS_PER_STRIP: rows,
        _Tag.STRIP_BYTES: len(strip),
    }
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + directory + bytes(4) + strip


def _values(stored: NDArray[np.uint8], layout: _TiffLayout) -> Pixels:
    """Turn bytes (rows, bytes a row) into samples (rows, columns, count)."""
    shape = (len(stored), layout.block[1], layout.count)
    if layout.bits % 8:
        return _unpacked(stored, layout.bits, shape)
    values = stored.view(layout.number).reshape(shape)
    if layout.differences:  # modulo the range of their type
        return np.cumsum(values, axis=1, dtype=layout.number.newbyteorder("="))
    return values


def _unpacked(stored: NDArray[np.uint8], bits: int, shape: tuple[int, int, int]) -> Pixels:
    """Unpack samples that aren't whole bytes; rows start on a byte, high bits come first."""
    flat = np.unpackbits(stored, axis=1, count=math.prod(shape[1:]) * bits)
    digits = flat.reshape(*shape, bits)
    values = np.zeros(shape, np.uint8 if bits <= 8 else np.uint16)
    for i in range(bits):
        values = values << 1 | digits[..., i]
    return values
